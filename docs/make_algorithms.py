"""Write docs/algorithms.md and a page per method in docs/methods from docstrings: python docs/make_algorithms.py."""

from __future__ import annotations

import csv
import inspect
import re
from pathlib import Path

import yaml
from class_docs import Block, read_docstring, read_parameters
from formulas import set_formulas

from fedbc_lightning import algorithms, local, server
from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.cli.classes import IN_PYTHON, NO_CHOICES, fold, import_path
from fedbc_lightning.cli.parser import MARKUP

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "algorithms.md"
METHODS = ROOT / "docs" / "methods"
TABLE = METHODS / "curves.csv"
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
"""Family to its classes in order."""

PERSONAL = ("FedBC family", "Personalised", "Fed+ family", "L2GD and its variance-reduced kin")
"""Families whose result is a model for each client; of the others it is one model, but for ``Local``."""

PAPERS = {
    "1602.05629": ["FedAvg"],
    "1812.06127": ["FedProx"],
    "2103.16257": ["MOON"],
    "1910.06378": ["SCAFFOLD"],
    "2206.10815": ["FedBC", "FedBCFineTune", "PerFedBC"],
    "2003.00295": ["FedAvgM", "FedAdagrad", "FedAdam", "FedYogi"],
    "2301.09604": ["FedExP"],
    "2007.07481": ["FedNova"],
    "2408.17145": ["FedLiLS", "FedLiLU"],
    "2106.06639": ["FedBuff"],
    "1903.03934": ["FedAsync"],
    "2111.04263": ["FedDyn"],
    "2203.15104": ["FedADMM"],
    "2005.11418": ["FedPD"],
    "1905.10497": ["QFedAvg"],
    "1912.13445": ["RFA"],
    "2002.07948": ["PerFedAvg"],
    "2006.08848": ["PFedMe"],
    "2012.04221": ["Ditto"],
    "2003.13461": ["APFL"],
    "2102.07078": ["FedRep"],
    "2106.06042": ["FedBABU"],
    "2009.06303": ["Local", "FedAvgPlus", "FedGeoMedPlus", "FedCoMedPlus", "FedPlus"],
    "2002.05516": ["L2GD", "L2SGD", "L2SGD2", "L2SGDPlus", "L2SGDPlusPlus"],
}
"""The paper's number on arXiv to the methods that it describes."""

PROPERTIES = [
    "State", "Communication", "Partial work", "Local model", "Degenerate cases", "Departures"
]  # fmt: skip
"""Sections of a docstring that the page of a method shows in short."""

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

KEPT = re.compile(
    r"(?:Each client keeps )?(.*?)(?:[.;](?: |$)|, (?:which|a column|the parameters|its last)| and the server)"
)
"""What the section State says first of what a client keeps."""

MADE = "<!-- Made by `python docs/make_algorithms.py` from the docstrings. Do not edit. -->"

HEAD = f"""\
# Methods

{MADE}

Each method has a page with its formulas, paper, settings, config and a curve on digits.
`fedbc-cli fit --algorithm.help NAME` shows the same in the terminal.
A method is chosen by its usual name, in any case (`--algorithm fedavgm`), or with its parameters from a file:
`--config algorithms/fedavgm.yaml`.

- **model**: whether the method's result is one model for all clients, or a model for each.
- **a client keeps**: what a client stores between rounds; d is the number of the model's parameters, b of its buffers.
- **sent**: kB that server and clients send per round on digits, with 5 of 10 clients and a model of 19 kB. (\\*)
  marks methods that train all 10.

[Parts](methods/parts.md) are what methods are made of: terms, solvers, server callbacks, robust rules, penalties and
codecs.
"""

SYMBOLS = {
    "N": "the number of clients",
    "S": "the number of clients in a round",
    "S_t": "the set of a round's clients",
    "n_i": "the number of client i's training samples",
    "p_i": "client i's weight in the mean",
    "z": "the global model",
    "w_i": "client i's model in local training",
    "x_i": "the model that client i keeps",
    "f_i": "client i's loss",
    "g_i": "client i's gradient on a mini-batch",
    "η": "the learning rate of the user's optimizer",
    "E": "the number of epochs",
}
"""What is meant on a page that does not say so itself."""

CURVES = """\
One run with [digits.yaml](../../configs/digits.yaml), the config below, and seed 0: ten clients, {clients} of them in
a round.
It shows how the method behaves as it is shipped; which method is better only [a study](../studies.md) tells."""

PARTS_HEAD = f"""\
# Parts of methods

{MADE}

[Methods](../algorithms.md) are made of these parts, and so is a [`ComposedAlgorithm`](composedalgorithm.md) or a
method of your own.
Parts with a table of parameters can be given in YAML; those marked "(in Python)" need a tensor, or the client half of
their method.
`fedbc-cli fit --algorithm.help Composed --algorithm.server_callbacks.help` lists those that fit a key, and
`--algorithm.server_callbacks.help DualAscent` explains one.
The same goes for `terms` and `solver`, for `--algorithm.robust_rule.help` and `--algorithm.penalty.help` of other
methods, and for `--trainer.codec.up.help`."""


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


def make_pages() -> dict[Path, str]:
    """The text of each page by its path."""
    files, sent = overlays(), sent_bytes()
    pages = {PAGE: HEAD, METHODS / "parts.md": part_list()}
    for title, classes in families().items():
        rows = [index_row(cls, sent[read_docstring(cls).name], title) for cls in classes]
        head = ["| method | what it does | model | a client keeps | sent |", "|---|---|---|---|---|"]
        pages[PAGE] += "\n".join([f"\n## {title}\n", *head, *rows, ""])
        for cls in classes:
            pages[METHODS / f"{slug(cls)}.md"] = method(cls, files[cls.__name__])
    names = [f"{read_docstring(cls).name} <methods/{slug(cls)}>" for part in families().values() for cls in part]
    pages[PAGE] += "\n".join(["\n```{toctree}", ":hidden:\n", *names, "methods/parts", "```", ""])
    return pages


def sent_bytes() -> dict[str, float]:
    """Method to the kB that all clients and the server send per round on digits, by the runs of make_curves.py."""
    with TABLE.open(encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {row["method"]: 1000 * float(row["megabytes"]) / max(1, int(row["rounds"])) for row in rows}


def index_row(cls: type[FederatedAlgorithm], sent: float, family: str) -> str:
    """One method in the table of all, with the anchor by which other pages have linked to it."""
    doc = read_docstring(cls)
    is_personal = family in PERSONAL or doc.name == "Local"
    state = " ".join(line for block in doc.sections["State"] for line in block.lines)
    kept = None if re.match(r"The (method|server) keeps", state) else KEPT.match(state)
    name = f'<a id="{anchor(cls)}"></a>[{doc.name}](methods/{slug(cls)}.md)'
    cells = [
        inline(doc.summary[:1].upper() + doc.summary[1:], cell=True),
        "personal" if is_personal else "one",
        inline(kept[1], cell=True) if kept else "nothing",
        f"{sent:.0f}" + r" (\*)" * cls.needs_all_clients,
    ]
    return f"| {name} | {' | '.join(cells)} |"


def slug(cls: type) -> str:
    """Name of a method's page and picture, without suffix."""
    return cls.__name__.lower()


def anchor(cls: type) -> str:
    """What a link to a method goes to; a name's own anchor would be that of FedAvg for FedAvg+, too."""
    return f"method-{cls.__name__.lower()}"


def method(cls: type[FederatedAlgorithm], files: list[tuple[str, str]]) -> str:
    """The page of one method."""
    doc = read_docstring(cls)
    sections = {title: "\n\n".join(markdown(block) for block in blocks) for title, blocks in doc.sections.items()}
    config = files[0][0]
    text = [f"# {doc.name}", MADE, inline(doc.summary[:1].upper() + doc.summary[1:])]
    text.append(f"```bash\nfedbc-cli fit --config digits.yaml --config {config}{all_clients(cls)}\n```")
    text.append(f"![Accuracy of {doc.name} on digits, beside FedAvg]({slug(cls)}.svg)")
    text.append(CURVES.format(clients="all" if cls.needs_all_clients else "5"))
    text += ["## Problem", sections.get("", ""), sections["Problem"], "## Update", sections["Update"]]
    text += [symbols("\n".join(line for name in ("Problem", "Update") for b in doc.sections[name] for line in b.lines))]
    text += ["## Properties"]
    text += [f"**{title}.** {sections[title]}" for title in PROPERTIES]
    text += ["## Paper", sections["References"], *(f"[arXiv:{n}](https://arxiv.org/abs/{n})" for n in papers(cls))]
    text += ["## Settings", parameter_table(cls), *([sections["Raises"]] if "Raises" in sections else [])]
    text += ["## Config", f"[`{config}`](../../configs/{config}) is layered on an experiment, such as `digits.yaml`:"]
    text.append(f"```yaml\n{(CONFIGS / config).read_text(encoding='utf-8').strip()}\n```")
    if files[1:]:
        text.append("The same class with other settings:")
        text.append("\n".join(f"- [`{name}`](../../configs/{name}): {inline(title)}" for name, title in files[1:]))
    text.append(f"The class is `{import_path(cls)}`, one of [all methods](../algorithms.md).")
    return "\n\n".join(part for part in text if part) + "\n"


def symbols(formulas: str) -> str:
    """What the symbols mean that a method's formulas use and do not define with ``=``."""
    used = [
        f"{name} is {meaning}"
        for name, meaning in SYMBOLS.items()
        if re.search(rf"(?<!\w){name}(?!\w)", formulas) and not re.search(rf"(?<!\S){name}₀? = (?!z)", formulas)
    ]
    return inline(f"Here {'; '.join(used)}.") if used else ""


def all_clients(cls: type[FederatedAlgorithm]) -> str:
    """Option of the command line that a method needs in which every client takes part in each round."""
    return " --trainer.clients_per_round 1.0" if cls.needs_all_clients else ""


def papers(cls: type) -> list[str]:
    """The numbers on arXiv of a method's papers."""
    return [number for number, names in PAPERS.items() if cls.__name__ in names]


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
        text.append(f"## {title}")
        if PARTS[title] is object:
            text.append("\n".join(f"- `{import_path(cls)}`: {first_line(cls)}" for cls in classes))
            continue
        for cls in sorted(classes, key=lambda cls: cls in IN_PYTHON):
            text.append(f"**`{import_path(cls)}`**{' (in Python)' if cls in IN_PYTHON else ''}: {first_line(cls)}")
            if cls not in IN_PYTHON:
                text.append(parameter_table(cls) if read_parameters(cls) else "No parameters.")
    return "\n\n".join(text) + "\n"


def first_line(cls: type) -> str:
    """The first paragraph of a class's docstring in one line."""
    text = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    return inline(text.replace("::", " …"))


def markdown(block: Block) -> str:
    """A block of a docstring."""
    if block.kind == "literal":
        return formula_table(block.lines)
    if block.kind == "items" and len(block.lines) > 1:
        return "\n".join(f"- {inline(line)}" for line in block.lines)
    return inline(block.lines[0])


def formula_table(lines: tuple[str, ...]) -> str:
    """Lines of formulas; words before them, such as ``client``, that begin in the first column, say who does that."""
    rows: list[tuple[str, list[str]]] = []
    for line in lines:
        labelled = re.match(r"([a-z][\w .()−]*?) {2,}(?=\S)", line)
        if labelled or not rows:
            rows.append((labelled[1] if labelled else "", []))
        rows[-1][1].append(inline(line[labelled.end() if labelled else 0 :].strip(), cell=True))
        if re.search(r"[←Σ‖√_]", re.sub(r"\$[^$]*\$", "", rows[-1][1][-1])):
            raise ValueError(f"docs/formulas.py cannot read all of: {line}")
    if not any(label for label, _ in rows):
        return "  \n".join(line for _, part in rows for line in part)
    body = [f"| {inline(label)} | {'<br>'.join(part)} |" for label, part in rows]
    return "\n".join(["| at | step |", "|---|---|", *body])


def inline(text: str, cell: bool = False) -> str:
    """Docstring text as Markdown: roles and literals as code, and what Markdown would take for markup escaped."""
    out, end = [], 0
    for match in MARKUP.finditer(text):
        marked = match["code"] or match["emphasis"]
        name = marked.rpartition(".")[2] if match["last"] else marked
        mark = "*" if match["emphasis"] else "$" if match["role"] == ":math:" else "`"
        out += [set_formulas(text[end : match.start()], _escape), f"{mark}{name}{mark}"]
        end = match.end()
    line = "".join([*out, set_formulas(text[end:], _escape)])
    return line.replace("|", "\\|") if cell else line


def _escape(text: str) -> str:
    text = re.sub(r"([\\*<$])", r"\\\1", text)
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def main() -> None:
    """Write the pages."""
    for path, text in make_pages().items():
        path.write_text(text, encoding="utf-8")
    print(PAGE, METHODS)


if __name__ == "__main__":
    main()
