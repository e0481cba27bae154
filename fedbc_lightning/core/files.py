"""The one door to files and folders of runs and studies; what is wrong with their disk is said in one line.

No link in the place of a file is followed, so that a foreign folder cannot name files of its reader. A file is replaced
at once: a reader finds the old one or the new one, even if the process is killed while writing.

A place may be the URL of an object store, such as ``s3://bucket/best.ckpt``, where one file is written or read as a
whole. Folders of runs and studies are on a disk: they are locked, and their tables are appended to.

Windows lacks parts of POSIX, and has a weaker form of them here: a link that somebody puts in the place of a file
between the look at it and its opening is followed, and a crash of the machine may forget that a file was replaced.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from unittest import mock

from fedbc_lightning.core.checks import check_types
from fedbc_lightning.core.errors import ConfigurationError, in_one_line
from fedbc_lightning.core.machine import memory_of_machine
from fedbc_lightning.core.units import bytes_said

AnyPath = str | os.PathLike

CHECKPOINTS = "checkpoints"
"""Folder in a run folder; it is no link either."""

IDENTITY = "run.json"
"""File in a run folder that says what the run is."""

# Reported by writes into an open file, which name no file.
_NAMELESS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def url_of(path: AnyPath) -> str | None:
    """Return the URL of an object store that a path is, even if ``Path`` took a slash of it; None if it is of a disk.

    Example:
        >>> url_of(Path("s3://bucket/best.ckpt")), url_of("runs/best.ckpt")
        ('s3://bucket/best.ckpt', None)
    """
    found = re.fullmatch(r"([a-z][a-z0-9+.-]+):/+(.*)", str(path).replace(os.sep, "/"))
    return found and f"{found[1]}://{'/' if found[1] == 'file' else ''}{found[2]}"


@contextmanager
def _store(url: str, verb: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of an object store, and the name there; what is wrong becomes one line."""
    from fsspec.core import url_to_fs  # here, because most runs are on disks alone

    with in_one_line(f"'{url}' cannot be {verb} (", ")."):  # the library of each store has errors of its own
        yield url_to_fs(url, **{"auto_mkdir": True} if url.startswith("file:") else {})  # others have no folders


def is_there(path: Path) -> bool:
    """Return whether there is such a file, also in an object store."""
    if (url := url_of(path)) is None:
        return path.exists()
    with _store(url, "found and read") as (store, name):
        return store.exists(name)


@contextmanager
def on_disk(path: Path) -> Iterator[Path]:
    """Yield a file, or a copy of it that is removed afterwards if it lies in an object store."""
    if (url := url_of(path)) is None:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        with _store(url, "found and read") as (store, name):
            store.get_file(name, str(copy))
        yield copy


def refuse_url(path: AnyPath, setting: str = "") -> None:
    """Raise if a path that must be on a disk is in an object store.

    Raises:
        ConfigurationError: It is.
    """
    if (url := url_of(path)) is not None:
        raise ConfigurationError(
            f"{setting}'{url}' is in an object store, where a run or study cannot lock its folder or append to tables; "
            "give a folder on a disk. Checkpoints (RoundCheckpoint's dirpath) and reports can be written there."
        )


def refuse_link(path: Path) -> None:
    """Raise if a link stands in the place of a file, or of a folder inside of that of a run or study.

    Raises:
        ConfigurationError: It does, or the place is in an object store.
    """
    refuse_url(path)
    for place in (path.parent, path) if path.parent.name == CHECKPOINTS else (path,):
        if place.is_symlink():
            raise ConfigurationError(
                f"'{place}' is a link to '{os.readlink(place)}', and links inside of the folder of a run or study are "
                "not followed: remove it, or put what it names in its place."
            )


def descriptor(path: Path, flags: int) -> int:
    """Open a file as ``os.open`` does, but no link."""
    refuse_link(path)
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)


def pread(file: int, view: memoryview, begin: int) -> int:
    """Fill a view from an open file, from a byte on; return how many bytes were read, which may be fewer."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [view], begin)
    os.lseek(file, begin, os.SEEK_SET)
    found = os.read(file, len(view))
    view[: len(found)] = found
    return len(found)


def pwrite(file: int, view: memoryview, begin: int) -> int:
    """Write a view into an open file, from a byte on; return how many bytes were written, which may be fewer."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, view, begin)
    os.lseek(file, begin, os.SEEK_SET)
    return os.write(file, view)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk; without it a crash may forget that a file was replaced."""
    if hasattr(os, "O_DIRECTORY") and url_of(folder) is None:  # Windows opens no folder, and stores have none
        opened = descriptor(folder.resolve(), os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def open_file(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
    """Open a file as ``open`` does, in UTF-8, but no link."""
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=lambda _, flags: descriptor(path, flags), **options)


def read(path: Path) -> bytes:
    """Read a file, but no link."""
    with open_file(path, "rb") as file:
        return file.read()


def read_mapping(path: Path, types: Mapping[str, Any], parse: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    """Read a file that holds a mapping, which is empty if there is no file.

    Args:
        path: The file, but no link.
        types: Annotations of the values by name; any of these may be missing.
        parse: Returns the content of the file.

    Raises:
        ConfigurationError: It cannot be read, or a value has another type.
    """
    with in_one_line(f"'{path}' cannot be read: ", "."):
        content = parse(read(path)) if path.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError("it is no mapping")
        check_types(types, content, f"'{path}'")
        return content


@contextmanager
def replacing(path: Path, *, is_new: bool = False) -> Iterator[Path]:
    """Yield a private temporary file; on success it atomically replaces ``path``, on an error it is removed.

    With ``is_new`` it replaces nothing: if there is such a file, or the disk has no hard links, that is an ``OSError``.
    """
    if (url := url_of(path)) is not None:
        with tempfile.TemporaryDirectory() as folder:
            yield (partial := Path(folder, path.name))
            with _store(url, "written") as (store, name), store.transaction, store.open(name, "wb") as target:
                target.write(partial.read_bytes())  # complete before the transaction shows it
        return
    refuse_link(path)
    # POSIX replaces a name in one step, on one disk alone: so the temporary file lies in the same folder.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        os.close(descriptor(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        yield partial
        (os.link if is_new else os.replace)(partial, path)
    except OSError as error:
        if error.filename == str(partial):
            error.filename = str(path)  # the name that the user knows
        raise
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # if the disk is full, the space is needed


def write(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8; the old content stays until the new one is complete."""
    with replacing(path) as partial, open_file(partial, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_folder(path: Path, *, is_private: bool = False, exist_ok: bool = True) -> None:
    """Make a folder, and those above it that are missing.

    A new folder has the mode of the one it lies in, whatever the umask: who shares ``runs/`` shares what is in it.

    Args:
        path: The folder.
        is_private: True for the first folder of this package in a place of the user's: nobody else may enter it.
        exist_ok: Whether the folder may be there.
    """
    if url_of(path) is not None:  # a store makes them with their files
        return
    if not path.parent.exists():
        make_folder(path.parent, is_private=is_private)
    try:
        path.mkdir(0o700)
    except FileExistsError:
        if not exist_ok or not path.is_dir():
            raise
        return
    mode = stat.S_IMODE(path.parent.stat().st_mode)
    # A sticky folder such as /tmp belongs to everybody, and says nothing about who may enter those in it.
    path.chmod(0o700 if is_private or mode & stat.S_ISVTX else mode)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    refuse_link(path)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Remove the temporary files that killed writers, and breakers of dead locks, have left in a run folder."""
    for path in (*folder.glob(".*.tmp"), *folder.glob(".*.break.*"), *(folder / CHECKPOINTS).glob(".*.tmp")):
        path.unlink(missing_ok=True)


def check_unpacked(path: str | Path, most: int | None = None) -> None:
    """Check a zip file, before anything of it is used: how much it unpacks to, and its checksums; other files pass.

    The checksums take 1 s for 1 to 7 GB.

    Args:
        path: Path of the file.
        most: Largest size in bytes; by default the memory of the machine. An array of equal numbers shrinks a thousand
            times, so that no ratio tells it from a file that is made to fill the memory.

    Raises:
        ValueError: It is more, or a checksum is wrong.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            size = sum(part.file_size for part in file.infolist())
            most = memory_of_machine() if most is None else most
            if size > most:
                raise ValueError(f"it unpacks to {bytes_said(size)}, more than the {bytes_said(most)} that it may")
            if (damaged := file.testzip()) is not None:
                raise ValueError(f"the checksum of its part '{damaged}' is wrong")


@contextmanager
def told(folder: Path, go_on: str = "", setting: str = "trainer.default_root_dir") -> Iterator[None]:
    """Explain in one line why a file in a folder could not be written.

    Args:
        folder: The folder, or the file; errors about files elsewhere are raised unchanged.
        go_on: Sentence on what to do afterwards, appended to the message.
        setting: What names the folder, at the beginning of the message.

    Raises:
        ConfigurationError: The file system reported an error; torch's writer may have raised another one from it.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        if (cause := os_error(error)) is None:
            raise
        # os.replace names two files: the temporary one, and the one that the user knows
        name = cause.filename2 or cause.filename
        place = Path(str(name or folder))
        # One that names no file, and is none of a disk, is such as that of a logger's server
        if (name is None and cause.errno not in _NAMELESS) or not place.absolute().is_relative_to(folder.absolute()):
            raise
        free = ""
        with suppress(OSError):  # there is no such folder any more
            free = f"; {bytes_said(shutil.disk_usage(folder).free)} are free on its disk"
        raise ConfigurationError(
            f"{setting}: '{place}' cannot be written ({cause.strerror}{free}). {go_on}".rstrip()
        ) from error


def os_error(error: BaseException | None) -> OSError | None:
    """Return the operating system's error in an exception's chain of causes, or None if there is none."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def quiet_event_writers() -> AbstractContextManager[Any]:
    """Keep TensorBoard's writer thread from printing a traceback; the next flush raises the same error."""
    previous = threading.excepthook

    def hook(args: Any) -> None:
        if type(args.thread).__name__ != "_AsyncWriterThread":
            previous(args)

    return mock.patch.object(threading, "excepthook", hook)
