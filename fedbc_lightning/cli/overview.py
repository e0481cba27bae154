"""The help text of ``fedbc-cli`` itself; imports nothing heavy, so that it is shown at once."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from fedbc_lightning import __version__
from fedbc_lightning.cli.command_arguments import COMMANDS, OVERLAYS, PROG, STUDIES, shipped_configs

_OVERVIEW = """\
{version}: federated learning beyond consensus, on PyTorch Lightning

usage: {prog} COMMAND [--config FILE]... [--SECTION.KEY VALUE]...

commands:
{commands}

shipped configs (a file of the same name here wins; several --config are layered):
{configs}

shipped studies, for {prog} compare and plan:
{studies}

shipped algorithms, each to be layered over a config as --config algorithms/NAME.yaml:
{overlays}

examples:
  {prog} fit --config digits.yaml                           real data, no download, about a minute
  {prog} fit --config synthetic.yaml --config algorithms/fedprox.yaml --trainer.max_rounds 50
  {prog} fit --config digits.yaml --ckpt_path last          resume the newest run of this name
  {prog} test --ckpt_path runs/digits/FedBC-0               evaluate a finished run
  {prog} export --ckpt_path runs/digits/FedBC-0 --client 3   the model of client 3, for Lightning
  {prog} plan --config digits.yaml                          the cost of a run, or of a study, in advance
  {prog} compare --config studies/digits.yaml               four methods, two settings, three seeds
  {prog} report runs/digits                                 one HTML page about a run, or about a study
  {prog} fit --model my_module.MyModel --data DigitsDataModule --algorithm FedBC --algorithm.dual_lr 0.01

more:
  {prog} fit --help                                         every option
  {prog} fit --algorithm.help                               all algorithms; --model.help and --data.help, too
  {prog} fit --algorithm.help FedBC                         what one does, keeps and sends, and its options
  {prog} fit --algorithm.help FedAvg --algorithm.robust_rule.help   rules that can replace its mean
  {prog} fit --config digits.yaml --print_config            the whole config, ready to be saved and edited"""


def version() -> str:
    """Return name and version of the program, e.g. ``fedbc-cli 0.1.0``."""
    return f"{PROG} {__version__}"


def overview() -> str:
    """Return the text of ``fedbc-cli --help``: commands, shipped configs, examples."""
    shipped = shipped_configs()
    first_lines = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in shipped.items()}
    titles = {name: line.lstrip("# ") for name, line in first_lines.items() if not name.startswith(OVERLAYS)}
    overlays = ", ".join(Path(name).stem for name in shipped if name.startswith(OVERLAYS))
    return _OVERVIEW.format(
        version=version(),
        prog=PROG,
        commands=columns(COMMANDS),
        configs=columns({name: title for name, title in titles.items() if not name.startswith(STUDIES)}),
        studies=columns({name: title for name, title in titles.items() if name.startswith(STUDIES)}),
        overlays=textwrap.fill(overlays, 100, initial_indent="  ", subsequent_indent="  "),
    )


def columns(rows: Mapping[str, str]) -> str:
    """Return a line for each name and its text, the texts one below the other."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())
