"""Write docs/algorithms.md from the docstrings: python docs/make_algorithms.py."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import yaml
from class_docs import Block, read_docstring, read_parameters

from fedbc_lightning import algorithms, local, server
from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.cli.classes import IN_PYTHON, NO_CHOICES, fold, import_path
from fedbc_lightning.cli.parser import MARKUP

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "algorithms.md"
CONFIGS = ROOT / "configs"

FAMILIES = {
    "Baselines": ["FedAvg", "FedProx", "MOON", "SCAFFOLD", "Local", "Centralized"],
    "FedBC family": ["FedBC", "FedBCFineTune", "PerFedBC"],
    "Server optimizers and step sizes": [
        "FedAvgM",
        "FedAdagrad",
        "FedAdam",
        "FedYogi",
        "FedExP",
        "FedNova",
        "FedLiLS",
        "FedLiLU",
    ],
    "Asynchronous": ["FedBuff", "FedAsync"],
    "Dual variables": ["FedDyn", "FedADMM", "FedPD"],
    "Fair and robust": ["QFedAvg", "RFA"],
    "Personalised": ["PerFedAvg", "PFedMe", "Ditto", "APFL", "FedRep", "FedBABU"],
    "Fed+ family": ["FedAvgPlus", "FedGeoMedPlus", "FedCoMedPlus", "FedPlus"],
    "L2GD and its variance-reduced kin": ["L2GD", "L2SGD", "L2SGD2", "L2SGDPlus", "L2SGDPlusPlus"],
    "Composition": ["ComposedAlgorithm"],
}
"""The chapters of the page, each with its classes in order."""

PARTS = {
    "Terms": local.TermFactory,
    "Solvers": local.Solver,
    "Server callbacks": server.ServerCallback,
    "Robust rules": server.RobustRule,
    "Penalties of Fed+": local.Penalty,
    "Codecs of messages": server.Codec,
    "Others, for methods in Python": object,
}
"""The parts by their base classes, of which the first counts that fits."""

BASES = {*PARTS.values(), local.AfterStep, local.Engine, local.Term, *NO_CHOICES, server.Sums}
"""What parts are derived from, or given to."""

HEAD = """\
# Algorithms

<!-- Made by `python docs/make_algorithms.py` from the docstrings in `fedbc_lightning/algorithms`. Do not edit. -->

`fedbc-cli fit --algorithm.help NAME` shows the same in the terminal. A method is chosen by its usual name, in any case
(`--algorithm fedavgm`), or with all its parameters from a file: `--config algorithms/fedavgm.yaml`.

Symbols: N clients, S of them in a round (S_t); n_i training samples of client i, p_i its weight in the mean; z the
global model, w_i the client's iterate in local training, x_i the model that a client keeps, all in d parameters; f_i
and g_i its loss and mini-batch gradient; η the learning rate of the user's optimizer; E epochs; Δ_i = z − w_i.
"""


PARTS_HEAD = """\
## Parts

What the methods above are made of, and what a `ComposedAlgorithm` (see
[`algorithms/composed.yaml`](../configs/algorithms/composed.yaml)) or a method of your own can be made of. Parts with a
table of parameters can be given in YAML; those marked "(in Python)" need a tensor, or the client half of their method.
`fedbc-cli fit --algorithm.help Composed --algorithm.server_callbacks.help` lists those that fit a key, and
`--algorithm.server_callbacks.help DualAscent` explains one; likewise `terms`, `solver`, and of other methods
`--algorithm.robust_rule.help` and `--algorithm.penalty.help`, and for codecs `--trainer.codec.up.help`."""


def exported() -> dict[str, type[FederatedAlgorithm]]:
    """Name to class of all methods of the package."""
    classes = {name: getattr(algorithms, name) for name in algorithms.__all__}
    return {
        name: cls
        for name, cls in classes.items()
        if isinstance(cls, type) and issubclass(cls, FederatedAlgorithm) and cls is not FederatedAlgorithm
    }


def families() -> dict[str, list[type[FederatedAlgorithm]]]:
    """Chapter to its classes.

    Raises:
        ValueError: If a class is in no chapter, or a chapter has a class that there is not.
    """
    classes = exported()
    placed = [name for names in FAMILIES.values() for name in names]
    if sorted(placed) != sorted(classes):
        missing, unknown = sorted(set(classes) - set(placed)), sorted(set(placed) - set(classes))
        raise ValueError(f"FAMILIES of {Path(__file__).name}: in no family: {missing}; no such class: {unknown}")
    return {title: [classes[name] for name in names] for title, names in FAMILIES.items()}


def overlays() -> dict[str, list[tuple[str, str]]]:
    """Class name to the (file name, title) of each config in which it is chosen, the plain ones first."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted([*CONFIGS.glob("algorithms/*.yaml"), *CONFIGS.glob("sharing/*.yaml")]):
        text = path.read_text(encoding="utf-8")
        name = yaml.safe_load(text)["algorithm"]["class_path"].rpartition(".")[2]
        found.setdefault(name, []).append(
            (path.relative_to(CONFIGS).as_posix(), text.partition("\n")[0].removeprefix("# overlay:").strip())
        )
    for name, files in found.items():
        files.sort(key=lambda file: (fold(file[1].partition(",")[0]) != fold(name), file))
    return found


def parts() -> dict[str, list[type]]:
    """Title to the parts exported by ``local`` and ``server``."""
    found: dict[str, list[type]] = {title: [] for title in PARTS}
    for package in (local, server):
        for name in package.__all__:
            part = getattr(package, name)
            if isinstance(part, type) and part not in BASES:
                found[next(title for title, base in PARTS.items() if issubclass(part, base))].append(part)
    return {title: sorted(classes, key=lambda cls: cls.__name__) for title, classes in found.items()}


def make_page() -> str:
    """The whole page."""
    chapters, files = families(), overlays()
    contents, body = [], []
    for title, classes in chapters.items():
        contents.append(f"- {title}: " + ", ".join(f"[{read_docstring(cls).name}](#{anchor(cls)})" for cls in classes))
        body.append(f"## {title}")
        body += [method(cls, files.get(cls.__name__, [])) for cls in classes]
    contents.append("- [Parts](#parts)")
    return "\n\n".join([HEAD.rstrip(), "\n".join(contents), *body, part_list()]) + "\n"


def anchor(cls: type) -> str:
    """What a link to a method goes to; a name's own anchor would be that of FedAvg for FedAvg+, too."""
    return f"method-{cls.__name__.lower()}"


def method(cls: type, files: list[tuple[str, str]]) -> str:
    """One method: heading, names, sections, parameters."""
    doc = read_docstring(cls)
    names = [
        f"class `{import_path(cls)}`",
        f"command line `--algorithm {doc.name}`",
        *(f"config [`{name}`](../configs/{name}): {inline(title)}" for name, title in files),
    ]
    text = [f'<a id="{anchor(cls)}"></a>', f"### {doc.name}", inline(doc.summary[:1].upper() + doc.summary[1:])]
    text.append("\n".join(f"- {name}" for name in names))
    for title, blocks in doc.sections.items():
        if title == "Args":
            text += ["**Parameters**", parameter_table(cls)]
        else:
            text += [f"**{title}**"] * bool(title) + [markdown(block) for block in blocks]
    if "Args" not in doc.sections:
        text += ["**Parameters**", parameter_table(cls)]
    return "\n\n".join(text)


def parameter_table(cls: type) -> str:
    """Name, default and meaning of each parameter, those of base classes included."""
    rows = [
        f"| `{p.name}` | {'*required*' if p.default is None else f'`{p.default}`'} | {inline(p.meaning, cell=True)} |"
        for p in read_parameters(cls)
    ]
    return "\n".join(["| name | default | meaning |", "|---|---|---|", *rows]) if rows else "None."


def part_list() -> str:
    """The last chapter: what a :class:`ComposedAlgorithm` is made of, and what YAML may say of each part."""
    text = [PARTS_HEAD]
    for title, classes in parts().items():
        text.append(f"### {title}")
        if PARTS[title] is object:
            text.append("\n".join(f"- `{import_path(cls)}`: {first_line(cls)}" for cls in classes))
            continue
        for cls in sorted(classes, key=lambda cls: cls in IN_PYTHON):
            text.append(f"**`{import_path(cls)}`**{' (in Python)' if cls in IN_PYTHON else ''}: {first_line(cls)}")
            if cls not in IN_PYTHON:
                text.append(parameter_table(cls) if read_parameters(cls) else "No parameters.")
    return "\n\n".join(text)


def first_line(cls: type) -> str:
    """The first paragraph of a class's docstring in one line."""
    text = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    return inline(text.replace("::", " …"))


def markdown(block: Block) -> str:
    """A block of a docstring."""
    if block.kind == "literal":
        return "\n".join(["```text", *block.lines, "```"])
    if block.kind == "items" and len(block.lines) > 1:
        return "\n".join(f"- {inline(line)}" for line in block.lines)
    return inline(block.lines[0])


def inline(text: str, cell: bool = False) -> str:
    """Docstring text as Markdown: roles and literals as code, and what Markdown would take for markup escaped."""
    out, end = [], 0
    for match in MARKUP.finditer(text):
        marked = match["code"] or match["emphasis"]
        name = marked.rpartition(".")[2] if match["last"] else marked
        mark = "*" if match["emphasis"] else "$" if match["role"] == ":math:" else "`"
        out += [_escape(text[end : match.start()]), f"{mark}{name}{mark}"]
        end = match.end()
    line = "".join([*out, _escape(text[end:])])
    return line.replace("|", "\\|") if cell else line


def _escape(text: str) -> str:
    text = re.sub(r"([\\*<$])", r"\\\1", text)
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def main() -> None:
    """Write the page."""
    PAGE.write_text(make_page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
