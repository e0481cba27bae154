"""``clients.bin``: the rows of all clients in a sparse file, shared by the ranks."""

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

NAME = "clients.bin"
"""Of the file, beside ``last.ckpt``."""

MAGIC = b"fedbcrw2"
MAGIC_WITHOUT_CHECKSUMS = b"fedbcrow"
"""Of files whose checkpoints hold no checksums of rows; no version released wrote them."""

PAGE = 4096
NUM_SLOTS = 3
"""Places of one row: the one that ``last.ckpt`` names, the one committed since, the one staged in this round."""

_HEADER = struct.Struct("<8sqqq")  # magic, generation, newest generation, length of the JSON that follows
_synchronise = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


@dataclass(frozen=True)
class RowLayout:
    """Where each row lies: after one header, slot after slot of one vector, then the next vector.

    Attributes:
        num_clients: N.
        vectors: Name -> number of values and name of their dtype.
    """

    num_clients: int
    vectors: dict[str, list[Any]]

    def row_bytes(self, name: str) -> int:
        """Bytes of one row."""
        length, dtype = self.vectors[name]
        return length * getattr(torch, dtype).itemsize

    def offsets(self) -> dict[tuple[str, int], int]:
        """(name, slot from 1) -> where its rows begin; under ``("", 0)`` the size of the file."""
        keys = [(name, slot) for name in self.vectors for slot in range(1, NUM_SLOTS + 1)]
        sizes = [_whole_pages(self.num_clients * self.row_bytes(name)) for name, _ in keys]
        begins = accumulate(sizes, initial=_whole_pages(_HEADER.size + len(json.dumps(asdict(self))) + 100))
        return dict(zip([*keys, ("", 0)], begins, strict=True))


class RowFile:
    """An open ``clients.bin``: rows by ``pread`` and ``pwrite``, never mapped (mapped pages count as resident memory).

    Args:
        path: It exists.
        layout: What it must hold.
        is_writable: Whether rows are written, too.

    Attributes:
        id: Drawn when the file was made.

    Raises:
        ConfigurationError: No such file, not one of ours, cut off, or of other rows.
    """

    def __init__(self, path: Path, layout: RowLayout, *, is_writable: bool = False) -> None:
        self.path, self.layout, self._is_writable = path.resolve(), layout, is_writable
        self._offsets = layout.offsets()
        self._close: weakref.finalize | None = None
        self.reopen()
        self.id = self._check()

    @staticmethod
    def create(path: Path, layout: RowLayout) -> None:
        """Make the file: all of it is a hole, but for the header."""
        header = json.dumps({"id": secrets.token_hex(8), **asdict(layout)}).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        size = layout.offsets()["", 0]
        try:
            with path.open("wb") as file:
                file.write(_HEADER.pack(MAGIC, 0, 0, len(header)) + header)
                file.truncate(size)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigurationError(
                f"trainer.default_root_dir: cannot make '{path}', a sparse file of {bytes_said(size)} "
                f"({error.strerror}); choose a folder on a file system that takes it."
            ) from error

    def reopen(self) -> None:
        """Open the file (again: over NFS, what other nodes wrote before that is then seen)."""
        try:
            self._descriptor = os.open(self.path, os.O_RDWR if self._is_writable else os.O_RDONLY)
        except OSError as error:
            raise ConfigurationError(f"ckpt_path: cannot open '{self.path}' ({error.strerror}).") from error
        if self._close is not None:
            self._close()
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def read(self, name: str, slot: int, client: int) -> Tensor:
        """One row, in the file's dtype."""
        length, dtype = self.layout.vectors[name]
        row = torch.empty(length, dtype=getattr(torch, dtype))
        view, begin = _bytes_of(row), self._place(name, slot, client)
        done = 0
        while done < len(view):
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
        """The oldest and the newest ``last.ckpt`` whose rows are here, as numbers of commits; see :class:`FileRows`."""
        _, oldest, newest, _ = _HEADER.unpack(os.pread(self._descriptor, _HEADER.size, 0))
        return oldest, newest

    def set_oldest(self, generation: int) -> None:
        """Say that rows of earlier generations are written over from now on."""
        os.pwrite(self._descriptor, struct.pack("<q", generation), len(MAGIC))

    def set_newest(self, generation: int) -> None:
        """Say that the rows of a generation are written."""
        os.pwrite(self._descriptor, struct.pack("<q", generation), len(MAGIC) + 8)

    def sync(self) -> None:
        """Wait until the rows, whichever process of this machine wrote them, are on the disk."""
        _synchronise(self._descriptor)

    def _place(self, name: str, slot: int, client: int) -> int:
        return self._offsets[name, slot] + client * self.layout.row_bytes(name)

    def _check(self) -> str:
        start = os.pread(self._descriptor, _HEADER.size, 0)
        if start.startswith(MAGIC_WITHOUT_CHECKSUMS):
            raise ConfigurationError(
                f"ckpt_path: '{self.path}' was written by an earlier version, without checksums of its rows, and is "
                "not read by this one; finish the run with that version, or start it anew."
            )
        if len(start) < _HEADER.size or not start.startswith(MAGIC):
            raise ConfigurationError(f"ckpt_path: '{self.path}' is damaged: it has no header of ours.")
        try:
            found = json.loads(os.pread(self._descriptor, _HEADER.unpack(start)[3], _HEADER.size))
            file_id, described = str(found.pop("id")), _describe(found)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, OverflowError, MemoryError) as error:
            raise ConfigurationError(f"ckpt_path: '{self.path}' is damaged: its header cannot be read.") from error
        if found != asdict(self.layout):
            raise ConfigurationError(
                f"ckpt_path: '{self.path}' holds {described}; here are {_describe(asdict(self.layout))}. Give "
                "the model, data, algorithm and trainer.client_dtype it was made with."
            )
        size, expected = os.fstat(self._descriptor).st_size, self._offsets["", 0]
        if size != expected:
            raise ConfigurationError(
                f"ckpt_path: '{self.path}' is damaged: {size:,} bytes instead of {expected:,}; was it cut off?"
            )
        return file_id

    def __getstate__(self) -> dict[str, Any]:
        """Without the descriptor."""
        return {"path": self.path, "layout": self.layout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open it again, to read."""
        RowFile.__init__(self, state["path"], state["layout"])


def checksum(row: Tensor) -> int:
    """CRC-32 of a row in the file's dtype: 7 GB/s."""
    return zlib.crc32(_bytes_of(row.contiguous()))


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _bytes_of(row: Tensor) -> memoryview:
    return row.view(torch.uint8).numpy().data


def _describe(layout: dict[str, Any]) -> str:
    vectors = (f"{name} ({length:,} x {dtype})" for name, (length, dtype) in layout["vectors"].items())
    return f"{layout['num_clients']:,} clients with {', '.join(vectors)}"
