"""Ends a process of ``fedbc-cli`` fast: the exit handlers run, but the imported objects are not taken apart."""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

CALLERS = (["<module>"], ["<module>", "_run_code", "_run_module_as_main"])
"""Names of the stack frames above the program, innermost first, for a console script and for ``python -m``.

Further frames belong to a profiler, debugger or test, which goes on after the program has ended.
"""


def is_outermost() -> bool:
    """Return whether the process ends when the function that calls this one has returned."""
    names = []
    frame = sys._getframe(1).f_back
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names in CALLERS and not (sys.flags.inspect or os.environ.get("PYTHONINSPECT"))


def leave(status: int) -> NoReturn:
    """End the process as Python does, but without taking apart what was imported.

    At its end Python goes several times through the 750,000 objects of torch and Lightning, which takes two seconds.
    Before that it waits for threads and calls the exit handlers, which end child processes and close loggers; this
    function does so, too. It also deletes objects that nobody references, and closes files that are open for writing.
    Other objects that live to the end are not deleted; Python does not promise that either.

    Args:
        status: Exit status of the process.
    """
    atexit.unregister(gc.unfreeze)
    fabric = sys.modules.get("fedbc_lightning.distributed.fabric")
    if status and fabric is not None:  # to leave the process group would wait for processes that may be lost
        atexit.unregister(fabric.leave_process_group)
    with suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    _close_files()
    os._exit(status)


def _close_files() -> None:
    """Write out the buffers of Python's files and of the C library."""
    standard = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    for stream in standard:
        with suppress(OSError, ValueError):  # the reader of the pipe is gone, or the stream is closed
            stream.flush()
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase) and thing not in standard:
            with suppress(Exception):
                if thing.writable():  # to close a file that another thread is reading could wait for ever
                    thing.close()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
