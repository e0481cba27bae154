"""Write two pages of docs/reference: python docs/make_settings.py.

``settings.md`` has every key of a config with its default, ``trainer.md`` every name of the trainer in hooks.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

# Below that line, because the scripts beside this one are found by it alone, also where a test imports this one.
from class_docs import Parameter, read_docstring, read_parameters  # noqa: E402
from make_algorithms import families, first_line, inline, slug  # noqa: E402

from fedbc_lightning import (  # noqa: E402
    Codecs,
    FederatedTrainer,
    Privacy,
    System,
    datamodules,
    models,
    partition,
)
from fedbc_lightning.cli.classes import import_path  # noqa: E402
from fedbc_lightning.core.lightning_arguments import LIGHTNING_ARGUMENTS  # noqa: E402
from fedbc_lightning.data import FederatedDataModule  # noqa: E402
from fedbc_lightning.federation.participation import Stragglers  # noqa: E402
from fedbc_lightning.module.trainer_names import HOOKS, MISSING, NAMES, PHASES  # noqa: E402
from fedbc_lightning.partition import Partitioner  # noqa: E402
from fedbc_lightning.studies.study import Study  # noqa: E402
from fedbc_lightning.trainer.arguments import REFUSED_CALLBACKS  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "settings.md"
TRAINER_PAGE = PAGE.with_name("trainer.md")

TRAINER_PARTS = {"stragglers": Stragglers, "privacy": Privacy, "codec": Codecs, "system": System}
"""Keys of the trainer that are mappings with keys of their own."""

HEAD = """\
# Settings

<!-- Made by `python docs/make_settings.py` from signatures and docstrings. Do not edit. -->

A config names what differs from the defaults on this page.
`--print_config` prints all settings of a run, and `config.yaml` in its folder holds them.
A key below is an option as well: `--trainer.max_rounds 20`.
"""

RUN = [
    Parameter("seed_everything", "0", "Seed of everything random: initial model, partition, sampling, shuffling, ..."),
    Parameter(
        "optimizer", "null", "Optimizer in place of the model's own: ``{class_path: AdamW, init_args: {lr: 0.001}}``."
    ),
    Parameter("lr_scheduler", "null", "Scheduler of that optimizer, stepped once per local epoch."),
    Parameter("ckpt_path", "null", "Checkpoint or run folder to resume; ``last``: the newest run of this name."),
    Parameter("other_seed", "false", "Whether a checkpoint that was trained with another seed may be resumed."),
    Parameter("strict", "false", "Whether a checkpoint of other settings, data or code is refused, and not warned of."),
]
"""Keys outside of the sections, which :class:`~fedbc_lightning.cli.federated.FederatedCLI` adds itself."""


def classes_of(package: ModuleType, base: type | None = None) -> list[type]:
    """Return the classes that a package exports, those derived from ``base`` if it is given, sorted by name."""
    found = [getattr(package, name) for name in package.__all__]
    return [
        cls for cls in found if isinstance(cls, type) and cls is not base and (base is None or issubclass(cls, base))
    ]


def table(parameters: Iterable[Parameter], prefix: str = "") -> str:
    """Return a table of keys, defaults and meanings."""
    rows = [
        f"| `{prefix}{p.name}` | {'*required*' if p.default is None else f'`{p.default}`'} | "
        f"{inline(p.meaning, cell=True)} |"
        for p in parameters
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) if rows else "No settings of its own."


def section(cls: type, shared: Iterable[Parameter] = ()) -> str:
    """Return the section of a class, without the settings that it shares with all classes of its kind."""
    known = {(p.name, p.default) for p in shared}
    own = [p for p in read_parameters(cls) if (p.name, p.default) not in known]
    return f"### {cls.__name__}\n\n`{import_path(cls)}`: {first_line(cls)}\n\n{table(own)}"


def of_lightning() -> str:
    """Return the tables of ``lightning.Trainer``'s arguments and of the callbacks that need parts of it."""
    text = "## lightning.Trainer's arguments\n\nThe trainer's settings take the place of Lightning's, or are the same:"
    rows = [
        f"| `{name}` | {'kept' if place.use is None else place.use or 'nothing'} | {place.note or 'The same.'} |"
        for name, place in LIGHTNING_ARGUMENTS.items()
    ]
    callbacks = [f"| `{kind.__name__}` | {instead} |" for kind, instead in REFUSED_CALLBACKS.items()]
    text += "\n\n" + "\n".join(["| lightning.Trainer | here | meaning |", "|---|---|---|", *rows])
    text += "\n\nSome callbacks need parts of `lightning.Trainer` that a federated run does not have:\n\n"
    return text + "\n".join(["| callback | in its place |", "|---|---|", *callbacks])


def make_page() -> str:
    """Return the whole page."""
    shared = read_parameters(FederatedDataModule)
    text = [HEAD.rstrip(), "## The whole run", table(RUN), "## trainer", table(read_parameters(FederatedTrainer))]
    for key, cls in TRAINER_PARTS.items():
        text += [f"### trainer.{key}", table(read_parameters(cls), f"{key}.")]
    text.append(of_lightning())
    methods = ", ".join(
        f"[{read_docstring(cls).name}](../methods/{slug(cls)}.md)" for part in families().values() for cls in part
    )
    text += ["## algorithm", f"Each method has a table of its settings beside its formulas: {methods}."]
    text += ["## model", *map(section, classes_of(models))]
    text += ["## data", "All data modules have these settings:", table(shared)]
    text += [section(cls, shared) for cls in classes_of(datamodules, FederatedDataModule)]
    text += ["## data.partitioner", *map(section, classes_of(partition, Partitioner))]
    of_study = [p for p in read_parameters(Study) if p.name != "tuning"]  # its keys follow one by one
    text += ["## A study", "A config of `compare` has other keys:", table(of_study)]
    return "\n\n".join(text) + "\n"


TRAINER_HEAD = """\
# The trainer in hooks

<!-- Made by `python docs/make_settings.py` from `module/trainer_names.py`. Do not edit. -->

Hooks of the module (`self.trainer`), of callbacks (`trainer`) and of the data module are given one trainer.
Inside of a client it means that client's training, as if `lightning.Trainer` trained that client alone for a round.
Outside of clients it means the run.
It also has every attribute of the `FederatedTrainer`, such as `current_round`, `max_rounds`, `server` and `clients`, \
and `current_client`, which is None outside of clients.
A setting of the `FederatedTrainer` may be set, as in `trainer.eval_every_n_rounds = 5`; a name of `lightning.Trainer` \
may not, but for `should_stop`.

`tests/walkers/protocol.py` runs programs under `lightning.Trainer` and here on one client, and compares these names \
in all hooks; the last column has every difference.
"""


def make_trainer_page() -> str:
    """Return the page about the names of the trainer."""
    known = defaultdict(list)
    for name, one in NAMES.items():
        known[one.meaning, tuple(one.differs.items())].append(f"`{name}`")
    rows = [
        f"| {', '.join(names)} | {meaning} | {differences(dict(differs))} |"
        for (meaning, differs), names in known.items()
    ]
    missing = [f"| `{name}` | {instead} |" for name, instead in MISSING.items()]
    hooks = ", ".join(f"`{name}`" for name in HOOKS)
    return "\n".join([
        TRAINER_HEAD, "| name | meaning | differs from lightning.Trainer |", "|---|---|---|", *rows, "",
        "Some names have no meaning here:", "", "| name | instead |", "|---|---|", *missing, "",
        "Hooks come in Lightning's order, with Lightning's arguments. "
        f"Only these come at another time, because {next(iter(HOOKS.values()))}: {hooks}.", "",
    ])  # fmt: skip


def differences(differs: dict[str, str]) -> str:
    """Return where and why a name has another value than under ``lightning.Trainer``."""
    phases = defaultdict(list)
    for phase, why in differs.items():
        phases[why].append(phase)
    said = {why: "everywhere" if len(found) == len(PHASES) else ", ".join(found) for why, found in phases.items()}
    return "; ".join(f"{found}: {why}" for why, found in said.items())


def main() -> None:
    """Write the pages."""
    for page, text in ((PAGE, make_page()), (TRAINER_PAGE, make_trainer_page())):
        page.write_text(text, encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
