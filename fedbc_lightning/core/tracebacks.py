"""Where in a run an exception came up: its place as a note, and its traceback without the frames of frameworks."""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple, ParamSpec, TypeVar

from fedbc_lightning.core.errors import ConfigurationError, NotVectorizableError

SHOWS_ALL = "FEDBC_TRACEBACK"
"""Environment variable; with the value ``full``, tracebacks keep all frames."""
FRAMEWORKS = ("fedbc_lightning", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "jsonargparse")
"""Packages whose frames are left out of a traceback; a user cannot change them."""
SHIPPED = ("fedbc_lightning.models", "fedbc_lightning.datamodules")
"""Packages whose frames are kept: their files are read like a user's own."""
TYPED = ("<stdin>", "<string>", "<python-input", "<ipython-input", "<doctest")
"""How the names of code without a file begin that a user has typed; others are of what Python or torch generates."""

_FRAME = re.compile(r'^(\s*)File "(.+?)", line \d+')
_PLACES = ("client ", "clients ", "round ", "data of ")
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Frame(NamedTuple):
    """A line of the user's code.

    Attributes:
        function: Name of the function, with its class where Python tells it.
        file: Path of the file.
        line: Number of the line.
    """

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}, line {self.line})"


def add_note(error: BaseException, note: str) -> None:
    """Add a note that a traceback prints below the exception's message.

    Python 3.10 keeps the note in ``__notes__`` as later versions do, but only the command line prints it there.

    Example:
        >>> error = ValueError("boom")
        >>> add_note(error, "client 3, round 1")
        >>> error.__notes__
        ['client 3, round 1']
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*notes_of(error), note]


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an exception."""
    return list(getattr(error, "__notes__", ()))


def locate(error: BaseException, place: str) -> None:
    """Note the place in the run at which an exception came up, unless a closer one is noted already.

    Args:
        error: The exception.
        place: The place, such as ``client 3, round 1, batch 0``.
    """
    is_of_engine = isinstance(error, NotVectorizableError)  # whoever is trained
    if not is_of_engine and not any(note.startswith(_PLACES) for note in notes_of(error)):
        add_note(error, place)


def one_line(error: BaseException) -> str:
    """Return an exception's message with its notes in brackets.

    Example:
        >>> error = ValueError("boom")
        >>> locate(error, "client 3, round 1")
        >>> one_line(error)
        'boom (client 3, round 1)'
    """
    notes = notes_of(error)
    return f"{error} ({'; '.join(notes)})" if notes else str(error)


def is_users(file: str) -> bool:
    """Return whether a file holds code of the user's, and not of Python, torch, Lightning or this package."""
    if file.startswith(TYPED):
        return True
    if file.startswith("<") or os.path.basename(file) == "fedbc-cli":  # the console script
        return False
    path = os.path.abspath(file)
    if any(path.startswith(folder) for folder in _folders(SHIPPED)):
        return True
    if any(path.startswith(folder) for folder in _folders(FRAMEWORKS)):
        return False
    python = _folders(("os",))  # other people's packages lie below it, and are kept: an image reader tells its trouble
    return not any(path.startswith(folder) for folder in python) or "-packages" in path


def _folders(packages: tuple[str, ...]) -> list[str]:
    """Return the folders of the packages that have been imported; for a module, the folder that it lies in."""
    files = [getattr(sys.modules.get(package), "__file__", None) for package in packages]
    return [os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in files if file]


def users_frame(error: BaseException) -> Frame | None:
    """Return the innermost line of the user's code at which an exception came up, or None if there is none."""
    steps = _users_steps(error.__traceback__)
    return _frame(steps[-1].tb_frame, steps[-1].tb_lineno) if steps else None


def _users_steps(step: TracebackType | None) -> list[TracebackType]:
    """Return the steps of a traceback that are in the user's code, the outermost first."""
    steps = []
    while step is not None:
        if is_users(step.tb_frame.f_code.co_filename):
            steps.append(step)
        step = step.tb_next
    return steps


def _frame(frame: FrameType, line: int) -> Frame:
    code = frame.f_code
    return Frame(getattr(code, "co_qualname", code.co_name), code.co_filename, line)


def with_users_frames(verb: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Let the exceptions of a public method leave it without the frames of frameworks, for a script or a notebook.

    The line that raises them again is all that a reader sees of this package, so it says how to see the rest.
    """

    @functools.wraps(verb)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        handled = sys.exc_info()[1]  # by the caller, whose exception is not ours to change
        try:
            return verb(*args, **kwargs)
        except Exception as error:
            raise short(error, handled, unless="FEDBC_TRACEBACK=full")  # noqa: B904

    return call


def short(error: Exception, handled: BaseException | None = None, unless: str = f"{SHOWS_ALL}=full") -> Exception:
    """Take the frames of frameworks from an exception and from those that led to it, and return it.

    The text of a traceback inside a message, which another process has sent, is folded, too. An exception in which no
    code of the user's has a part keeps its frames, unless it is a mistake that the user can correct.

    Args:
        error: The exception.
        handled: Exception that was being handled before; it and those that led to it stay as they are.
        unless: Environment variable and value with which nothing is left out.
    """
    variable, _, value = unless.partition("=")
    if os.environ.get(variable) == value:
        return error
    chain = list(_chain(error, handled))
    if isinstance(error, ConfigurationError) or any(users_frame(each) or _has_users_frame(each) for each in chain):
        for each in chain:
            each.with_traceback(_joined(_users_steps(each.__traceback__)))
            if _has_users_frame(each):
                each.args = (type(each.args[0])(folded(each.args[0])),)
    return error


def _chain(error: BaseException, end: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that are printed above it, up to one that is not yielded."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each is not end and not any(each is other for other in seen):
        yield each
        seen.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _has_users_frame(error: BaseException) -> bool:
    """Return whether an exception's message is text with a frame of the user's in it."""
    is_text = len(error.args) == 1 and isinstance(error.args[0], str)
    return is_text and any(is_users(frame[2]) for frame in map(_FRAME.match, error.args[0].splitlines()) if frame)


def _joined(steps: list[TracebackType]) -> TracebackType | None:
    """Return a traceback with these steps alone; None if there are none."""
    kept: TracebackType | None = None
    for step in reversed(steps):
        kept = TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept


def report(error: BaseException) -> str:
    """Return the traceback of an exception as the command line prints it: without frames of frameworks.

    All frames are kept if :data:`SHOWS_ALL` says so, or if no code of the user's has a part in the exception.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if sys.version_info < (3, 11):
        text += "".join(f"{note}\n" for note in notes_of(error))
    return folded(text)


def folded(text: str) -> str:
    """Return the text of a traceback without the frames of frameworks, and say how to see them.

    Args:
        text: What Python prints, or what a process or worker has sent; it may hold several tracebacks.
    """
    kept, is_any_kept, is_any_left_out = [], False, False
    indent: str | None = None  # of the frame that is being left out
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame:
            is_kept = is_users(frame[2])
            is_any_kept, is_any_left_out = is_any_kept or is_kept, is_any_left_out or not is_kept
            indent = None if is_kept else frame[1]
        elif indent is not None and not line.startswith(f"{indent}  "):
            indent = None
        if indent is None:
            kept.append(line)
    if not is_any_kept or not is_any_left_out or os.environ.get(SHOWS_ALL) == "full":
        return text
    hint = f"(frames of fedbc_lightning, torch, Lightning and Python are left out; {SHOWS_ALL}=full shows them)"
    return "\n".join([*kept, hint, ""])
