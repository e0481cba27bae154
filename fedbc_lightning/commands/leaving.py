"""The end of a process that was nothing but ``fedbc-cli``: at once, when all that others rely on is done."""

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
"""Functions above the program, innermost first: of a console script, and of ``python -m``.

More than these are a profiler, debugger or test that goes on after the program has ended.
"""


def is_outermost() -> bool:
    """Return whether nobody goes on after the function that calls this one has returned."""
    names = []
    frame = sys._getframe(1).f_back
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names in CALLERS and not (sys.flags.inspect or os.environ.get("PYTHONINSPECT"))


def leave(status: int) -> NoReturn:
    """End the process as Python does, but without taking apart what was imported.

    Python goes through three quarters of a million objects of torch and Lightning, several times: two seconds in which
    nothing happens that anybody sees. Before that it waits for threads and calls the exit handlers, which end child
    processes and close loggers; that happens here, too. Objects that nobody holds are deleted, and files that are open
    for writing are closed. Other objects that live to the end are not deleted, which Python does not promise either.

    Args:
        status: The exit status.
    """
    atexit.unregister(gc.unfreeze)
    fabric = sys.modules.get("fedbc_lightning.distributed.fabric")
    if status and fabric is not None:  # to leave a process group in good order is to wait for processes that are lost
        atexit.unregister(fabric.leave_process_group)
    with suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    _close_files()
    os._exit(status)


def _close_files() -> None:
    """Write out what is still in buffers, Python's and those of the C library."""
    standard = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    for stream in standard:
        with suppress(OSError, ValueError):  # whoever read it is gone, or it is closed
            stream.flush()
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase) and thing not in standard:
            with suppress(Exception):
                if thing.writable():  # another thread may be waiting for what it reads
                    thing.close()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
