"""The help of ``fedbc-cli`` and of its commands on one run; imports nothing heavy, so that it is shown at once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from fedbc_lightning.cli.command_arguments import OWN_OPTIONS, PROG, SUBCOMMANDS, shipped_configs

_OVERVIEW = """\
{version}: federated learning beyond consensus, on PyTorch Lightning
usage: {prog} COMMAND [--config FILE]... [--SECTION.KEY VALUE]...

  fit                 train a model over the clients
  validate, test      evaluate a checkpoint on validation or test data
  predict, export     write a checkpoint's predictions, or one of its models
  partition, plan     who has which data, and what a run costs, before it starts
  compare, reproduce  many runs: methods × variants × seeds, or a paper's
  report              write one HTML page about a run or a study
  configs, adopt      list the shipped configs; take over one of LightningCLI
  deploy, verify      run on clients of Flower; work a client's round out again
  completion          complete command lines in bash or zsh

  {prog} fit --config digits.yaml               real data, about a minute
  {prog} test --ckpt_path runs/digits/FedBC-0   evaluate that run
  {prog} compare --config studies/digits.yaml   four methods, three seeds
  {prog} fit --model mine.MyModel --data DigitsDataModule --algorithm FedAvg

Every command has --help; {prog} fit --algorithm.help lists the methods."""

_OWN = """\
  --ckpt_path RUN                folder or checkpoint of a run; last: the newest of these settings
  --client CLIENT                name or number of the client whose own model is taken
  --round ROUND                  round that is worked out again
  --out PATH                     where to write: a file for export, a folder otherwise
  --force                        write over what is there"""

_USUAL = """\
  --config FILE                  a config, yours or of fedbc-cli configs; several are layered
  --algorithm NAME               the method; --algorithm.help lists all, with a name explains one
  --model NAME                   a shipped model (--model.help) or yours, my_module.MyModel
  --data NAME                    shipped data (--data.help) or yours, my_module.MyData
  --trainer.accelerator KIND     cpu, gpu or auto; trainer.devices says how many processes
  --trainer.name NAME            runs are written to runs/NAME
  --seed_everything SEED         seed of everything random
  --print_config                 print the whole config, with every default, and end"""

_OF_TRAINING = """\
  --trainer.max_rounds T         rounds in all
  --trainer.clients_per_round S  clients sampled in a round, such as 10, or a share, such as 0.1
  --trainer.local_epochs E       passes over a client's data in a round (or local_steps)
  --trainer.engine ENGINE        sequential, vectorized (many small clients at once), or auto
"""


def version() -> str:
    """Return name and version of the program, e.g. ``fedbc-cli 0.1.0``."""
    return f"{PROG} {metadata.version('fedbc_lightning')}"


def overview() -> str:
    """Return the text of ``fedbc-cli --help``: the commands, and four examples."""
    return _OVERVIEW.format(version=version(), prog=PROG)


def usage(command: str) -> str:
    """Return how a command on one run is given."""
    own = f"{OWN_OPTIONS[command]} " if command in OWN_OPTIONS else ""
    return f"{PROG} {command} {own}[--config FILE]... [--SECTION.KEY VALUE]..."


def usual_help(command: str) -> str:
    """Return the help of a command on one run, with those of the usual options that do something there."""
    called = usage(command)
    return "\n".join([
        f"usage: {called}\n\n{SUBCOMMANDS[command]}\n\nThe usual options; in a config file they are keys, such as "
        "name in the section trainer:",
        *(line for line in _OWN.splitlines() if line[:33].strip() in called),
        (_OF_TRAINING if command in ("fit", "plan") else "") + _USUAL,
        f"\nAll options, with their defaults: {PROG} {command} --help all",
    ])  # fmt: skip


def configs() -> str:
    """Return the text of ``fedbc-cli configs``: the shipped configs, studies and overlays, each with its first line."""
    found = shipped_configs().items()
    lines = {name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, path in found}
    return f"A file of the same name here wins; several --config are layered in turn.\n\n{columns(lines)}"


def columns(rows: Mapping[str, str]) -> str:
    """Return a line for each name and its text, the texts one below the other."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())
