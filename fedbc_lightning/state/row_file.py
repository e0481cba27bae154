"""The file ``clients.bin``, a sparse file with the rows of all clients that the ranks share."""

from __future__ import annotations

import json
import os
import secrets
import struct
import weakref
import zlib
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.units import bytes_said

# Name of the file; it lies beside ``last.ckpt``
NAME = "clients.bin"

# First bytes of a file of rows
MAGIC = b"fedbcrw2"

# Multiple of bytes at which the header and each slot end, the usual block size of file systems
PAGE = 4096

# Number of slots of a row: one may be named by ``last.ckpt``, one committed since, one staged in this round
NUM_SLOTS = 3

_HEADER = struct.Struct("<8sqqq")  # magic, generation, newest generation, length of the JSON that follows
_synchronise = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


@dataclass(frozen=True)
class RowLayout:
    """Says where each row lies: one header, then the slots of the first vector, then those of the next vector.

    Attributes:
        num_clients: Number of clients, N.
        vectors: Name -> number of values in a row, and name of their dtype.
    """

    num_clients: int
    vectors: dict[str, list[Any]]

    def row_bytes(self, name: str) -> int:
        """Return the number of bytes of one row."""
        length, dtype = self.vectors[name]
        return length * getattr(torch, dtype).itemsize

    def offsets(self) -> dict[tuple[str, int], int]:
        """Return the byte at which the rows of each (name, slot from 1) begin; ``("", 0)`` is the size of the file."""
        keys = [(name, slot) for name in self.vectors for slot in range(1, NUM_SLOTS + 1)]
        sizes = [_whole_pages(self.num_clients * self.row_bytes(name)) for name, _ in keys]
        begins = accumulate(sizes, initial=_whole_pages(_HEADER.size + len(json.dumps(asdict(self))) + 100))
        return dict(zip([*keys, ("", 0)], begins, strict=True))


class RowFile:
    """An open ``clients.bin``.

    Rows are read and written with ``preadv`` and ``pwrite``. The file is not memory-mapped, because mapped pages count
    as resident memory of the process.

    Args:
        path: Path of an existing file.
        layout: The layout that the file must have.
        is_writable: Whether rows are written, too.

    Attributes:
        id: Random identifier, drawn when the file was made.

    Raises:
        ConfigurationError: The file does not exist, was not made by :meth:`create`, is cut off, or has another layout.
    """

    def __init__(self, path: Path, layout: RowLayout, *, is_writable: bool = False) -> None:
        self.path, self.layout, self._is_writable = path.resolve(), layout, is_writable
        self._offsets = layout.offsets()
        self._close: weakref.finalize | None = None
        self.reopen()
        self.id = self._check()

    @staticmethod
    def create(path: Path, layout: RowLayout) -> None:
        """Create the file; everything after the header is a hole that takes no space on the disk.

        Raises:
            ConfigurationError: The file system cannot hold a file of this size, or the folder is not writable.
        """
        header = json.dumps({"id": secrets.token_hex(8), **asdict(layout)}).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        size = layout.offsets()["", 0]
        try:
            with path.open("wb") as file:
                file.write(_HEADER.pack(MAGIC, 0, 0, len(header)) + header)
                # A hole: the file takes space only for clients who have trained.
                file.truncate(size)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigurationError(
                f"trainer.default_root_dir: cannot make '{path}', a sparse file of {bytes_said(size)} "
                f"({error.strerror}); choose a folder on a file system that takes it."
            ) from error

    def reopen(self) -> None:
        """Open the file, or open it again; over NFS only a new opening shows what other nodes have written."""
        try:
            self._descriptor = os.open(self.path, os.O_RDWR if self._is_writable else os.O_RDONLY)
        except OSError as error:
            raise ConfigurationError(f"ckpt_path: cannot open '{self.path}' ({error.strerror}).") from error
        if self._close is not None:
            self._close()
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def read(self, name: str, slot: int, client: int) -> Tensor:
        """Return one row, in the file's dtype."""
        length, dtype = self.layout.vectors[name]
        row = torch.empty(length, dtype=getattr(torch, dtype))
        view, begin = _bytes_of(row), self._place(name, slot, client)
        done = 0
        while done < len(view):
            # A read may return fewer bytes than asked for, e.g. over NFS or when a signal arrives.
            count = os.preadv(self._descriptor, [view[done:]], begin + done)
            if not count:
                raise ConfigurationError(f"'{self.path}' was cut off while it was in use; restore it and last.ckpt.")
            done += count
        return row

    def write(self, name: str, slot: int, client: int, row: Tensor) -> None:
        """Write one row, given in the file's dtype on the CPU."""
        view, begin = _bytes_of(row.contiguous()), self._place(name, slot, client)
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], begin + done)
        except OSError as error:
            raise ConfigurationError(
                f"trainer.default_root_dir: cannot write to '{self.path}' ({error.strerror}); the round before is kept."
            ) from error

    @property
    def generations(self) -> tuple[int, int]:
        """Counts of commits of the oldest and the newest ``last.ckpt`` whose rows the file still holds.

        :class:`~fedbc_lightning.state.file_rows.FileRows` explains how they are used.
        """
        _, oldest, newest, _ = _HEADER.unpack(os.pread(self._descriptor, _HEADER.size, 0))
        return oldest, newest

    def set_oldest(self, generation: int) -> None:
        """Write into the header that rows of earlier generations are overwritten from now on."""
        os.pwrite(self._descriptor, struct.pack("<q", generation), len(MAGIC))

    def set_newest(self, generation: int) -> None:
        """Write into the header that the rows of this generation are complete."""
        os.pwrite(self._descriptor, struct.pack("<q", generation), len(MAGIC) + 8)

    def sync(self) -> None:
        """Wait until the rows are on the disk, also those that other processes of this machine wrote."""
        _synchronise(self._descriptor)

    def _place(self, name: str, slot: int, client: int) -> int:
        return self._offsets[name, slot] + client * self.layout.row_bytes(name)

    def _check(self) -> str:
        start = os.pread(self._descriptor, _HEADER.size, 0)
        try:
            if len(start) < _HEADER.size or not start.startswith(MAGIC):
                raise ValueError
            found = json.loads(os.pread(self._descriptor, _HEADER.unpack(start)[3], _HEADER.size))
            file_id, described = str(found.pop("id")), _describe(found)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, OverflowError, MemoryError) as error:
            problem = "it does not begin with a valid header"
            raise ConfigurationError(f"ckpt_path: '{self.path}' is damaged: {problem}.") from error
        if found != asdict(self.layout):
            raise ConfigurationError(
                f"ckpt_path: '{self.path}' holds {described}, but this run has {_describe(asdict(self.layout))}. Give "
                "the model, data, algorithm and trainer.client_dtype that the file was made with."
            )
        size, expected = os.fstat(self._descriptor).st_size, self._offsets["", 0]
        if size != expected:
            raise ConfigurationError(
                f"ckpt_path: '{self.path}' is damaged: {size:,} bytes instead of {expected:,}; was it cut off?"
            )
        return file_id

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the file descriptor, which is valid in this process only."""
        return {"path": self.path, "layout": self.layout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the file again, for reading only."""
        RowFile.__init__(self, state["path"], state["layout"])


def checksum(row: Tensor) -> int:
    """Return the CRC-32 of a row in the file's dtype; it is computed at 7 GB/s."""
    return zlib.crc32(_bytes_of(row.contiguous()))


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _bytes_of(row: Tensor) -> memoryview:
    return row.view(torch.uint8).numpy().data


def _describe(layout: dict[str, Any]) -> str:
    vectors = (f"{name} ({length:,} x {dtype})" for name, (length, dtype) in layout["vectors"].items())
    return f"{layout['num_clients']:,} clients with {', '.join(vectors)}"
