"""The program ``fedbc-cli``, which turns the words of a command line into an exit status.

This module itself imports neither torch nor Lightning, so that ``--help``, ``--version`` and most mistakes are
answered at once.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from importlib import import_module

from fedbc_lightning.cli.command_arguments import PROG, STUDY_COMMANDS, SUBCOMMANDS, TOOLS, is_study, prepare_arguments
from fedbc_lightning.cli.overview import configs, overview, usual_help, version
from fedbc_lightning.core.errors import ConfigurationError, UsageError, one_line, report
from fedbc_lightning.core.text import PrintableRecord, printable

# Exit status when nobody reads what is printed: 128 and the number of SIGPIPE, as other programs end before head
UNREAD = 141


def program() -> int:
    """Run the command line of this process and return its exit status; the console script ``fedbc-cli`` calls this."""
    if sys.excepthook is sys.__excepthook__:  # torch's hook for process groups calls it, and puts the rank before lines
        sys.excepthook = lambda kind, error, trace: sys.stderr.write(report(error))  # with the user's code alone
    try:
        status = main()
    except SystemExit as stop:
        if not (stop.code is None or isinstance(stop.code, int)):
            raise
        is_unread = isinstance(stop.__context__, BrokenPipeError)  # rich ends so with 1
        status = UNREAD if is_unread else stop.code or 0
    except BrokenPipeError:
        if _is_read():  # the pipe of something else, such as a logger's service
            raise
        status = UNREAD
    if status == UNREAD:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
    return status


def _is_read() -> bool:
    """Return whether somebody still reads the standard output, to which an empty line is written to find out."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return False
    return True


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line; the process goes on after it.

    Args:
        args: The words after the program's name; by default those of ``sys.argv``.

    Returns:
        The exit status: 0; 1 where a setting cannot be honoured; 2 where the command line is wrong; 130 after Ctrl-C,
        and 128 plus its number after another signal, such as 143 after SIGTERM.

    Raises:
        SystemExit: From the parser, with status 0 after ``--help`` and ``--print_config``, 2 for a wrong option.

    Example:
        >>> main(["fti", "--config", "digits.yaml"])
        2
    """
    started = time.perf_counter()
    words = list(sys.argv[1:] if args is None else args)
    if args is None and not any(word.startswith("--print_config") for word in words):
        _escape_what_cannot_be_shown()
    if words in (["--version"], ["version"]):
        print(version())
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else 2
    if words[0] == "configs":
        print(configs())
        return 0
    if words[0] in SUBCOMMANDS and words[-1] in ("-h", "--help"):
        print(usual_help(words[0]))
        return 0
    if words[-2:] == ["--help", "all"]:
        words.pop()
    typed = words
    try:
        is_of_studies = words[0] in STUDY_COMMANDS or (words[0] == "plan" and is_study(words))
        words = words if is_of_studies or words[0] in TOOLS else prepare_arguments(words)
    except UsageError as error:
        return _fail(error, status=2)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not see the user's own modules
    if args is None:
        raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # as it does unless it is ignored
        if raises:
            signal.signal(signal.SIGINT, _end_before_the_run)
        _load(typed)
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return _run(words, is_of_studies=is_of_studies, started=started)


def _escape_what_cannot_be_shown() -> None:
    r"""Print ``\u03bb`` for a λ that standard output's encoding lacks, as on standard error, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _end_before_the_run(*_: object) -> None:
    """End at once: a ``KeyboardInterrupt`` may be lost in what is imported, or change the status at the end."""
    os.write(2, f"\n{PROG}: interrupted before the run began\n".encode())
    os._exit(130)


def _load(words: list[str]) -> None:
    """Import torch and Lightning, with a line that says so to a person who waits."""
    asks_for_text = words[0] in TOOLS or any("help" in word or word.startswith("--print_config") for word in words)
    if sys.stdout.isatty() and not asks_for_text and os.environ.get("LOCAL_RANK", "0") == "0":
        print("Loading PyTorch ...", flush=True)
    # The import makes 750,000 objects that live to the end. Going through them again and again took 14 % of the time of
    # `fit --help`, and two seconds when the process ends.
    gc.disable()
    import fedbc_lightning.cli.federated  # noqa: F401 (for what it imports)

    gc.freeze()
    gc.enable()


def _show_warning(message: Warning | str, category: type[Warning], *place: object) -> None:
    """Print a warning in one line, without its place in the source."""
    if str(message).strip():
        print(f"{PROG}: warning: {printable(message)}", file=sys.stderr)


def _run(words: list[str], *, is_of_studies: bool, started: float) -> int:
    from fedbc_lightning.cli.federated import FederatedCLI, resume_hint
    from fedbc_lightning.distributed.heartbeat import LostProcessError
    from fedbc_lightning.distributed.interrupts import StoppedError

    warnings.showwarning = _show_warning  # type: ignore[assignment]
    logging.setLogRecordFactory(PrintableRecord)
    try:
        if words[0] in TOOLS:
            return getattr(import_module(f"fedbc_lightning.commands.{words[0]}"), words[0])(words[1:])
        if is_of_studies:
            return getattr(import_module("fedbc_lightning.commands.studies"), f"{words[0]}_command")(words[1:])
        FederatedCLI(args=words, started=started, parser_kwargs={"prog": PROG})
    except UsageError as error:
        return _fail(error, status=2)
    except (ConfigurationError, LostProcessError) as error:
        return _fail(error, status=1)
    except ModuleNotFoundError as error:
        if error.name is not None:  # a broken import keeps its traceback; a missing extra has only its sentence
            raise
        return _fail(ConfigurationError(str(error)), status=1)
    except (KeyboardInterrupt, StoppedError) as stop:
        of_study = "stopped; the same command goes on, and `fedbc-cli report` of its folder shows what has finished"
        hint = of_study if is_of_studies else resume_hint()
        if hint is not None:
            print(f"\n{PROG}: {hint}", file=sys.stderr)
        return 128 + stop.number if isinstance(stop, StoppedError) else 130
    return 0


def _fail(error: Exception, status: int) -> int:
    rank = os.environ.get("LOCAL_RANK", "0")
    prefix = PROG if rank == "0" else f"{PROG} [local rank {rank}]"
    print(f"{prefix}: error: {one_line(error)}", file=sys.stderr)
    return status
