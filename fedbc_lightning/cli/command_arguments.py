"""Prepares the words of a command line before they are parsed; imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from fedbc_lightning.core.errors import UsageError, did_you_mean, nearest
from fedbc_lightning.core.files import url_of
from fedbc_lightning.run.folder import last_checkpoint
from fedbc_lightning.run.trust import check_trusted

PROG = "fedbc-cli"

# The commands on one run, each with a description
SUBCOMMANDS = {
    "fit": "Train a model over the clients.",
    "validate": "Evaluate a checkpoint on the clients' validation data.",
    "test": "Evaluate a checkpoint on the clients' test data.",
    "predict": "Write what predict_step gives on the data module's predict data, or on each client's test data,\n"
    "with the client's own model where the method has such. torch.load reads the files.",
    "partition": "Show how the data is split over the clients.",
    "plan": "Tell time, memory, disk and bytes of a run, or of a study, before it starts.\n"
    "It takes a few steps of the run's own clients, and writes nothing; times are rough.",
    "export": "Write a checkpoint's global model, or a client's own, for load_from_checkpoint.\n"
    "Data, method and model are those of the run's own config.yaml, unless options say otherwise.",
    "verify": "Work a client's round out again from its kept messages, and compare.",
}

# The options that only some of these commands have, as they are given; without brackets they are needed
OWN_OPTIONS = {
    "fit": "[--ckpt_path RUN]",
    "validate": "[--ckpt_path RUN]",
    "test": "[--ckpt_path RUN]",
    "predict": "--ckpt_path RUN [--client CLIENT] [--out PATH] [--force]",
    "partition": "[--out PATH]",
    "export": "--ckpt_path RUN [--client CLIENT] [--out PATH] [--force]",
    "verify": "--ckpt_path RUN --client CLIENT --round ROUND",
}

# The commands on runs that are made or read as a whole
STUDY_COMMANDS = ("compare", "reproduce", "report")

# The commands that read and make no runs
TOOLS = ("adopt", "completion", "deploy")

COMMANDS = (*SUBCOMMANDS, *STUDY_COMMANDS, *TOOLS, "configs")

CONFIG_OPTIONS = ("--config", "-c")

# Folder of the shipped configs that hold an algorithm and nothing else
OVERLAYS = "algorithms/"


def prepare_arguments(words: list[str]) -> list[str]:
    """Check the command, find the config files, and add the config of a checkpoint's run if none is given.

    Args:
        words: A command line without the program's name, e.g. ``["fit", "--config", "cifar.yaml"]``.

    Returns:
        The command line with the names of shipped configs replaced by their paths.

    Raises:
        UsageError: The command is missing or unknown, a config file or checkpoint does not exist, or the config beside
            the checkpoint is not trusted.
    """
    words = list(words)
    check_subcommand(words)
    own = OWN_OPTIONS.get(words[0], "")
    configs = list(option_values(words, CONFIG_OPTIONS))
    if is_study(words):
        raise UsageError(f"{words[0]} takes no study: {PROG} compare --config {configs[-1][1]}")
    for position, value in configs:
        words[position] = words[position].removesuffix(value) + str(find_config(value))
    if any(word.startswith("--trainer.backend.") for word in words):  # options are those of the class
        for position, value in option_values(words, ("--trainer.backend",)):
            words[position] = words[position].removesuffix(value) + {"ray": "Ray"}.get(value, value)
    checkpoints = list(option_values(words, ("--ckpt_path",)))
    if checkpoints:
        position, value = checkpoints[-1]
        checkpoint = find_checkpoint(value)
        del words[position - (words[position] == value) : position + 1]
        words += ["--ckpt_path", checkpoint]  # at the end: a config, too, has the key, with null, and the last one wins
        config = None if configs else find_run_config(checkpoint, words)
        if config is not None:
            check_trusted(config)
            words[1:1] = ["--config", str(config)]
    elif own.startswith("--ckpt_path") and not configs and not any("help" in word for word in words):
        raise UsageError(f"which run? {PROG} {words[0]} {own}")
    return words


def is_study(words: list[str]) -> bool:
    """Return whether one of the given configs is that of a study.

    Raises:
        UsageError: A config file does not exist.
    """
    found = [find_config(value) for _, value in option_values(words, CONFIG_OPTIONS)]
    texts = [config.read_text(encoding="utf-8") if isinstance(config, Path) else config for config in found]
    return any(re.search(r"^algorithms:|^{.*\balgorithms:", text, re.MULTILINE) for text in texts)


def check_subcommand(words: list[str]) -> None:
    """Raise :class:`UsageError` unless the first word is a command; the message suggests the nearest one."""
    first = words[0]
    if first in COMMANDS:
        return
    if first.startswith("-"):
        later = next((word for word in words if word in COMMANDS), "fit")
        raise UsageError(f"the command goes first: {PROG} {later} {first} ... (one of {', '.join(COMMANDS)})")
    meant = did_you_mean(first, COMMANDS, f"choose from {', '.join(COMMANDS)}")
    raise UsageError(f"unknown command '{first}': {meant}")


def shipped_configs() -> dict[str, Path]:
    """Map the names of the shipped configs, as ``--config`` takes them, to paths; those in subfolders come last."""
    folder = Path(str(resources.files("fedbc_lightning.configs")))
    paths = sorted(folder.rglob("*.yaml"), key=lambda path: (path.parent != folder, path))
    return {path.relative_to(folder).as_posix(): path for path in paths}


def find_config(name: str) -> Path | str:
    """Find the file for ``--config name``: a local one, else a shipped one of that name, with or without ``.yaml``.

    A text that is YAML rather than a name (it has a brace, a line break or ``": "``) is returned unchanged.

    Raises:
        UsageError: There is neither; the message lists the shipped ones.
    """
    if any(mark in name for mark in ("{", "\n", ": ")):
        return name
    if Path(name).is_dir():
        raise UsageError(f"--config {name} is a folder: give a YAML file in it")
    if Path(name).is_file():
        check_syntax(Path(name))
        return Path(name)
    shipped = shipped_configs()
    for candidate in (name, f"{name}.yaml"):
        if candidate in shipped:
            return shipped[candidate]
    # Without the ending, which is so long that it makes any two names similar
    names = {key.removesuffix(".yaml").removeprefix(OVERLAYS): key for key in shipped}
    near = nearest(name.removesuffix(".yaml").removeprefix(OVERLAYS), names)
    meant = f"did you mean '{names[near]}'?" if near else f"{PROG} configs lists these"
    raise UsageError(f"no config file '{name}' here or among the shipped ones; {meant}")


def check_syntax(path: Path) -> None:
    """Raise :class:`UsageError` with file and line unless a file is YAML with sections, and no key is there twice."""
    import yaml

    def refuse(other: yaml.Node, key: yaml.Node, why: str) -> None:
        one, two = sorted((other.start_mark.line + 1, key.start_mark.line + 1))
        raise UsageError(f"{path}, lines {one} and {two}: '{key.value}' {why}")

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = dict[str, tuple[yaml.Node, yaml.Node]]()
            for key, value in node.value:
                name = str(key.value)
                if name in seen:
                    refuse(seen[name][0], key, "is there twice; the last would replace the first")
                seen[name] = key, value
            for name, (key, _) in seen.items():
                first, *others = name.split(".")
                is_key = others and name.replace(".", "").isidentifier()  # and no name of a variant, such as γ = 0.01
                if is_key and first in seen and isinstance(seen[first][1], yaml.MappingNode):
                    refuse(seen[first][0], key, "stands beside its section, of which one would be lost; put it inside")
            return super().construct_mapping(node, deep)

    try:
        with path.open(encoding="utf-8") as file:
            content = yaml.load(file, Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:  # says line and column, in several lines
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path}: no sections in it (trainer:, algorithm:, model:, data:, ...)")


def find_checkpoint(path: str) -> str:
    """Find the checkpoint for ``--ckpt_path path``: a file, or the last one of a run folder; ``last`` stays as it is.

    Raises:
        UsageError: There is no such checkpoint.
    """
    if path in ("last", "null", "None") or url_of(path) is not None:
        return path
    for file in (Path(path), Path(path, "checkpoints", "last.ckpt"), Path(path, "last.ckpt")):
        if file.is_file():
            return str(file)
    raise UsageError(f"no checkpoint at --ckpt_path {path}: give a .ckpt file, a run folder that has one, or 'last'")


def find_run_config(checkpoint: str, words: list[str]) -> Path | None:
    """Find the ``config.yaml`` of the run that wrote a checkpoint, ``<run>/checkpoints/<any>.ckpt``.

    Args:
        checkpoint: Path of the checkpoint; ``last``: the checkpoint of the newest run under the given (or default)
            folder and name.
        words: Words of the command line.

    Returns:
        The file; None if ``fit`` gets its model on the command line and there is no run yet to resume.

    Raises:
        UsageError: There is no such file.
    """
    if checkpoint in ("last", "null", "None"):
        root, name = (_last_value(words, f"--trainer.{key}") for key in ("default_root_dir", "name"))
        folder = Path(root or "runs", name or "default")
        last = last_checkpoint(folder) if checkpoint == "last" else None
        if last is not None:
            return find_run_config(str(last), words)
        if words[0] == "fit" and _last_value(words, "--model") is not None:
            return None
        raise UsageError(
            f"--ckpt_path {checkpoint}: there is no last.ckpt under {folder}; give the run's --config, or "
            "--trainer.default_root_dir and --trainer.name"
        )
    for folder in Path(checkpoint).absolute().parents[:2]:
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise UsageError(f"no config.yaml beside the run of --ckpt_path {checkpoint}: give the run's --config too")


def _last_value(words: list[str], option: str) -> str | None:
    return ([None, *(value for _, value in option_values(words, (option,)))])[-1]


def option_values(words: list[str], options: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield positions and values of options that are given as ``--option value`` or ``--option=value``."""
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and name in options:
            yield position, value
        elif word in options and position + 1 < len(words):
            yield position + 1, words[position + 1]
