"""The guard of a script without which a process that it starts would run all of it again."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys

from fedbc_lightning.core.errors import ConfigurationError


def check_main_guard(what: str, start_method: str) -> None:
    """Raise if processes are about to be started that would train, too, because they import the running script.

    Python's own error comes from such a process alone, after it has imported torch and read the data; the process that
    waits for it reports that a worker was lost.

    Args:
        what: The setting that starts processes, with which the message begins.
        start_method: How they are started: spawn, forkserver, fork or popen.

    Raises:
        ConfigurationError: The script has reached this call outside of ``if __name__ == "__main__":``.
    """
    main = vars(sys.modules["__main__"])
    # With popen all processes run all of the script, and meet in each fit.
    if start_method in ("fork", "popen") or "__file__" not in main:
        return
    frame = inspect.currentframe()
    while frame is not None and (frame.f_globals is not main or frame.f_code.co_name != "<module>"):
        frame = frame.f_back
    if frame is None:  # called from a thread
        return
    tree = ast.parse("".join(linecache.getlines(main["__file__"])))
    guards = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    if not any(node.lineno <= frame.f_lineno <= (node.end_lineno or 0) for node in guards):
        raise ConfigurationError(
            f"{what}: each process that it starts would run {main['__file__']} from its beginning, and train, too; put "
            f'what the script does, line {frame.f_lineno} included, below `if __name__ == "__main__":`'
        )
