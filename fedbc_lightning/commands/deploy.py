"""The command ``deploy``, which writes a run as an app of Flower, and what that app consists of."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import yaml

from fedbc_lightning import __version__
from fedbc_lightning.cli.classes import find_class
from fedbc_lightning.cli.command_arguments import PROG, option_values, prepare_arguments
from fedbc_lightning.cli.federated import FederatedCLI
from fedbc_lightning.cli.parser import FederatedArgumentParser
from fedbc_lightning.core.errors import ConfigurationError, UsageError, needs, one_line, report
from fedbc_lightning.core.files import make_folder, url_of, write
from fedbc_lightning.core.origin import INSTALLED, PACKAGE
from fedbc_lightning.core.text import PrintableRecord
from fedbc_lightning.data import FederatedDataModule, SitesDataModule
from fedbc_lightning.distributed.flower_backend import content_of, parts_of
from fedbc_lightning.trainer.client_round import ClientRound

DESCRIPTION = """\
Write a run as an app of Flower, which `flwr run` runs in simulation or on real clients. All further options are those
of fit. Modules of yours that the config names are copied; data are not."""

MODULE = """\
\"\"\"The apps of Flower: the server of the run in config.yaml, and its clients.\"\"\"

from fedbc_lightning.commands.deploy import client_app, server_app

server = server_app(__file__)
client = client_app(__file__)
"""

PROJECT = """\
# Written by {prog} deploy flower

[project]
name = "{name}"
version = "1.0.0"
description = "A run of fedbc_lightning {version}, which server and clients have installed"
license = "LicenseRef-Proprietary"
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


class _Built(FederatedCLI):
    """Builds everything that ``fit`` would train, and does not train it."""

    def run_command(self, command: str) -> None:
        """Do nothing: an app of Flower trains."""


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
    cli = _Built(args=prepare_arguments(["fit", *rest, "--trainer.backend=Flower"]), parser_kwargs={"prog": PROG})
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
    for path in modules:
        make_folder((folder / path).parent)
        write(folder / path, path.read_bytes())
    copied = f" with {', '.join(map(str, modules))}" if modules else ""
    number = getattr(cli.datamodule, "num_clients", None) or "N"
    print(f"{folder} is an app of Flower{copied}. Try it with {number} clients, one for each of the data:")
    print(f"  flwr run {folder} --stream --federation-config 'num-supernodes={number}'")
    return 0


def command_parser() -> FederatedArgumentParser:
    """Return the parser of the command."""
    parser = FederatedArgumentParser(prog=f"{PROG} deploy", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("platform", nargs="?", choices=["flower"], help="Whose app is written.")
    parser.add_argument("--config", "-c", type=str, help="Config of fit; further ones are layered over it.")
    parser.add_argument("--folder", type=str, help="New folder of the app.")
    return parser


def _own_modules(folder: Path) -> list[Path]:
    """Return the files of imported modules that lie in a folder and belong to no installed package."""
    found = set[Path]()
    for name, module in sys.modules.copy().items():
        file = Path(getattr(module, "__file__", None) or "/")
        if name.partition(".")[0] != PACKAGE and file.is_relative_to(folder) and not INSTALLED & {*file.parts}:
            path = file.relative_to(folder)
            found |= {path, *(init for above in path.parents[:-1] if (init := above / "__init__.py").exists())}
    return sorted(found)


# what the app consists of


def server_app(file: str) -> Any:
    """Return the server's app of Flower, which trains the run of a config as ``fit`` does.

    Args:
        file: The app's module, beside which the config lies.
    """
    with needs("an app of Flower", "flower-deploy"):
        from flwr.serverapp import ServerApp
    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        logging.setLogRecordFactory(PrintableRecord)
        try:
            cli = _build(_words(file, context, None))
            cli.trainer.settings.chosen_backend.connect(grid, lambda: getattr(cli.datamodule, "client_names", None))
            cli.trainer.fit(**cli.method_arguments("fit"))
        except ConfigurationError as error:  # Flower prints the traceback of what is raised here
            raise ConfigurationError(one_line(error)).with_traceback(None) from None

    return app


def client_app(file: str) -> Any:
    """Return the clients' app of Flower, which trains one client as the messages of the server ask for.

    Args:
        file: The app's module, beside which the config lies.
    """
    with needs("an app of Flower", "flower-deploy"):
        from flwr.app import Message
        from flwr.clientapp import ClientApp
    app = ClientApp()
    workers: dict[Any, ClientRound] = {}  # one process of a simulation answers many messages

    @app.query()
    def who(message: Any, context: Any) -> Any:
        return Message(content_of({"up": str(_client(context)).encode()}), reply_to=message)

    @app.train()
    def train(message: Any, context: Any) -> Any:
        try:
            words = _words(file, context, _client(context))
            key = context.run_id, *words
            if key not in workers:
                cli = _build(words)
                workers[key] = ClientRound(cli.model, cli.datamodule, cli.algorithm, cli.trainer.settings)
            asked = parts_of(message.content)
            parts = {"up": workers[key].answer(asked["start"], asked["down"])}
        except Exception as error:  # the server says which client it is, and goes on without it
            is_plain = isinstance(error, ConfigurationError)
            said = one_line(error) if is_plain else f"{type(error).__name__}: {one_line(error)}"
            print(said if is_plain else report(error), file=sys.stderr)
            parts = {"error": " ".join(said.split()).rstrip(".").encode()}
        return Message(content_of(parts), reply_to=message)

    return app


def _client(context: Any) -> Any:
    """Return name or number of the client that a SuperNode is: ``client`` of its node-config, or of the simulation."""
    return context.node_config.get("client", context.node_config.get("partition-id", "nobody"))


def _words(file: str, context: Any, client: Any) -> list[str]:
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
    if kind is not None and issubclass(kind, SitesDataModule):
        _leave_others(config["data"].get("init_args") or {}, client)
    options = [f"--{key}={value}" for key, value in {**context.run_config, **own}.items() if value != ""]
    return ["fit", "--config", yaml.safe_dump(config, allow_unicode=True), *options]


def _build(words: list[str]) -> FederatedCLI:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Flower shows those of all packages
        return _Built(args=words, parser_kwargs={"prog": PROG})


def _leave_others(data: dict[str, Any], client: Any) -> None:
    """Leave a client its own data alone, and the server none, where the config lists those of each site."""
    names = [str(name) for name in data.get("names") or ()]
    mine = names.index(str(client)) if str(client) in names else client
    for split in ("train", "val", "test"):
        sites = data.get(split)
        if isinstance(sites, list):
            data[split] = [site if str(k) == str(mine) else None for k, site in enumerate(sites)]
