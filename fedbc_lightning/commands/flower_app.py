"""The app of Flower that ``fedbc-cli deploy flower`` writes: a server, and clients.

Flower starts a process for each message to a client, so what a client does not need for its answer is not imported.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError, needs, one_line, report
from fedbc_lightning.core.files import make_folder, read, write
from fedbc_lightning.core.text import PrintableRecord
from fedbc_lightning.distributed.flower_messages import content_of, parts_of


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
        from fedbc_lightning.commands.deploy import build, words_of

        logging.setLogRecordFactory(PrintableRecord)
        try:
            cli = build(words_of(file, context, None))
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
        from flwr.app import ConfigRecord, Message
        from flwr.clientapp import ClientApp
    app = ClientApp()
    workers: dict[Any, Any] = {}  # one process of a simulation answers many messages

    @app.query()
    def who(message: Any, context: Any) -> Any:
        return Message(content_of({"up": str(_client(context)).encode()}), reply_to=message)

    @app.train()
    def train(message: Any, context: Any) -> Any:
        from fedbc_lightning.commands.deploy import build, words_of
        from fedbc_lightning.trainer.client_round import ClientRound

        try:
            words = words_of(file, context, _client(context))
            key = context.run_id, *words
            if key not in workers:
                cli = build(words)
                workers[key] = ClientRound(cli.model, cli.datamodule, cli.algorithm, cli.trainer.settings)
            # Flower keeps it as long as the SuperNode lives, and for this run of its own
            rows = workers[key].rows = context.state.setdefault("fedbc", ConfigRecord())
            folder = context.node_config.get("rows")
            if folder:
                make_folder(Path(folder))
                rows.update({path.stem: read(path) for path in Path(folder).glob("*.rows")})
            asked = parts_of(message.content)
            parts = {"up": workers[key].answer(asked["start"], asked["down"])}
            for name, data in rows.items() if folder else ():
                write(Path(folder, f"{name}.rows"), data)
        except Exception as error:  # the server says which client it is, and goes on without it
            is_plain = isinstance(error, ConfigurationError)
            said = one_line(error) if is_plain else f"{type(error).__name__}: {one_line(error)}"
            print(said if is_plain else report(error), file=sys.stderr)
            parts = {"error": said.encode()}
        return Message(content_of(parts), reply_to=message)

    return app


def _client(context: Any) -> Any:
    """Return name or number of the client that a SuperNode is: ``client`` of its node-config, or of the simulation."""
    return context.node_config.get("client", context.node_config.get("partition-id", "nobody"))
