"""The command ``deploy``, which writes a run as an app of Flower."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import yaml

from fedbc_lightning import __version__
from fedbc_lightning.cli.classes import find_class
from fedbc_lightning.cli.command_arguments import PROG, option_values, prepare_arguments
from fedbc_lightning.cli.parser import FederatedArgumentParser
from fedbc_lightning.core.errors import ConfigurationError, UsageError
from fedbc_lightning.core.files import make_folder, url_of, write
from fedbc_lightning.core.origin import INSTALLED, PACKAGE
from fedbc_lightning.data import FederatedDataModule, SitesDataModule
from fedbc_lightning.data.datamodule import SPLITS
from fedbc_lightning.studies.parsed_runs import Built

DESCRIPTION = """\
Write a run as an app of Flower, which `flwr run` runs in simulation or on real clients. All further options are those
of fit. Modules of yours that the config names are copied; data are not."""

MODULE = """\
\"\"\"The apps of Flower: the server of the run in config.yaml, and its clients.\"\"\"

from fedbc_lightning.commands.flower_app import client_app, server_app

server = server_app(__file__)
client = client_app(__file__)
"""

PROJECT = """\
# Written by {prog} deploy flower

[project]
name = "{name}"
version = "1.0.0"
description = "A run of fedbc_lightning {version}, which server and clients have installed"
license = "LicenseRef-Proprietary"  # what is said of your modules; Flower warns without one
dependencies = []  # Flower would install these anew for every run, and at the clients not at all

[tool.flwr.app]
publisher = "fedbc-lightning"

[tool.flwr.app.components]
serverapp = "federated_app:server"
clientapp = "federated_app:client"

# Settings of the run that `flwr run --run-config 'trainer.max_rounds=3'` may change
[tool.flwr.app.config]
trainer.max_rounds = {max_rounds}
trainer.default_root_dir = '{root}'
ckpt_path = ""
"""


def deploy(words: list[str]) -> int:
    """Run ``fedbc-cli deploy``: build what ``fit`` would train, and write the folder of an app that trains it.

    Args:
        words: Words of the command line after the command.

    Returns:
        The exit status, 0.

    Raises:
        ConfigurationError: What the config says cannot be deployed.
        UsageError: The platform or the folder is missing, or the folder is there.
    """
    folders = [*option_values(words, ("--folder",))]
    if words[:1] != ["flower"] or not folders:
        command_parser().parse_args([word for word in words if word in ("-h", "--help")])
        raise UsageError(f"deploy what, and where to? {PROG} deploy flower --config FILE --folder NEW_FOLDER")
    position, name = folders[-1]
    folder = Path(name)
    if url_of(name) or folder.exists():
        raise UsageError(f"--folder {name}: give the name of a new folder, on a disk")
    rest = [*words[1 : position - (words[position] == name)], *words[position + 1 :]]
    flower = "--trainer.backend=Flower"  # before options of it, and behind configs with another backend
    cli = Built(args=prepare_arguments(["fit", flower, *rest, flower]), parser_kwargs={"prog": PROG})
    if cli.algorithm.trains_pooled:
        raise ConfigurationError(f"algorithm: {cli.algorithm} cannot be deployed: it trains on the data of all clients")
    config = cli.config["fit"].clone()
    for key in ("ckpt_path", "other_seed", "strict"):
        config.pop(key, None)
    settings, modules = cli.trainer.settings, _own_modules(Path.cwd())
    project = PROJECT.format(
        prog=PROG, version=__version__, root=Path(settings.default_root_dir).absolute(), max_rounds=settings.max_rounds,
        name=re.sub("[^a-z0-9]+", "-", f"fedbc-{settings.name}".lower()).strip("-"),
    )  # fmt: skip
    make_folder(folder)
    write(folder / "config.yaml", cli.command_parsers["fit"].dump(config, skip_none=False))
    write(folder / "federated_app.py", MODULE)
    write(folder / "pyproject.toml", project)
    for path, source in modules.items():
        make_folder((folder / path).parent)
        write(folder / path, source.read_bytes())
    copied = f" with {', '.join(map(str, modules))}" if modules else ""
    number = getattr(cli.datamodule, "num_clients", None) or "N"
    print(f"{folder} is an app of Flower{copied}. Try it with {number} clients, one for each of the data:")
    print(f"  flwr run {folder} --stream --federation-config 'num-supernodes={number}'")
    return 0


def command_parser() -> FederatedArgumentParser:
    """Return the parser of the command."""
    parser = FederatedArgumentParser(prog="fedbc-cli deploy", description=DESCRIPTION)
    parser.add_argument("platform", nargs="?", choices=["flower"], help="Whose app is written.")
    parser.add_argument("--config", "-c", type=str, help="Config of fit; further ones are layered over it.")
    parser.add_argument("--folder", type=str, help="New folder of the app.")
    return parser


def _own_modules(folder: Path) -> dict[Path, Path]:
    """Return the files of imported modules below a folder that belong to no installed package, by their places.

    A place follows from the module's name, so that the app's folder alone is searched: also for what lay in ``src``.
    """
    found = {}
    for name, module in sorted(sys.modules.items()):
        file, place = Path(getattr(module, "__file__", None) or "/"), Path(*name.split("."))
        is_foreign = place.parts[0] in (PACKAGE, "__main__", "__mp_main__") or INSTALLED & {*file.parts}
        if not is_foreign and file.is_relative_to(folder):
            found[place / file.name if file.stem == "__init__" else place.with_suffix(file.suffix)] = file
    return found


# what the app builds


def words_of(file: str, context: Any, client: Any) -> list[str]:
    """Return the command line of fit for the config beside the app, and the settings of run-config and node-config.

    Args:
        file: The app's module.
        context: Flower's context of the server or of a client.
        client: Name or number of the client; None: the server.
    """
    folder = Path(file).parent
    sys.path[:0] = [] if str(folder) in sys.path else [str(folder)]
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    own = {key: value for key, value in context.node_config.items() if key.partition(".")[0] == "data"}
    kind = find_class(str(config["data"].get("class_path")), FederatedDataModule)
    if issubclass(kind or object, SitesDataModule):
        _leave_others(config["data"].get("init_args") or {}, client)
    options = [f"--{key}={value}" for key, value in {**context.run_config, **own}.items() if value != ""]
    return ["fit", "--config", yaml.safe_dump(config, allow_unicode=True), *options]


def build(words: list[str]) -> Built:
    """Build what the apps of Flower train, from the words of a command line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flower shows those of all packages
        return Built(args=words, parser_kwargs={"prog": PROG})


def _leave_others(data: dict[str, Any], client: Any) -> None:
    """Leave a client its own data alone, and the server none, where the config lists those of each site."""
    names = [str(name) for name in data.get("names") or data.get("train") or ()]  # of a list, no name of a client
    mine = str(names.index(str(client)) if str(client) in names else client)
    for split in SPLITS:
        sites = data.get(split)
        if isinstance(sites, dict):
            data[split] = {name: site if mine == str(names.index(str(name))) else None for name, site in sites.items()}
        elif sites:
            data[split] = [site if mine == str(k) else None for k, site in enumerate(sites)]
