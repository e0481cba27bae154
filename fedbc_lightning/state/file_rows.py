"""Storage of the clients' rows in the sparse file ``clients.bin``, which all ranks share and ``last.ckpt`` commits."""

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

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import descriptor, make_folder, open_file, pread, pwrite, refuse_link, replacing, told
from fedbc_lightning.core.units import bytes_said
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.state.client_rows import RowStorage

# Name of the file; it lies beside ``last.ckpt``
NAME = "clients.bin"

# First bytes of a file of rows
MAGIC = b"fedbcrw3"

# Multiple of bytes at which the header and each slot end, the usual block size of file systems
PAGE = 4096

# Number of slots of a row: one may be named by ``last.ckpt``, one committed since, one staged in this round
NUM_SLOTS = 3

# Bytes that a disk writes at once
SECTOR = 512

_HEADER = struct.Struct("<8sqqq")  # magic, generation, newest generation, length of the JSON that follows
_synchronise = getattr(os, "fdatasync", os.fsync)  # macOS and Windows have no fdatasync


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

    The file is not memory-mapped, because mapped pages count as resident memory of the process.

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
        refuse_link(path)
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
        make_folder(path.parent)
        size = layout.offsets()["", 0]
        takes = f"It is a sparse file of {bytes_said(size)}; choose a folder on a file system that takes it."
        with told(path, takes), replacing(path) as partial, open_file(partial, "wb") as file:
            file.write(_HEADER.pack(MAGIC, 0, 0, len(header)) + header)
            # A hole: the file takes space only for clients who have trained.
            file.truncate(size)
            file.flush()
            os.fsync(file.fileno())

    def reopen(self) -> None:
        """Open the file, or open it again; over NFS only a new opening shows what other nodes have written."""
        try:
            self._descriptor = descriptor(self.path, os.O_RDWR if self._is_writable else os.O_RDONLY)
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
            count = pread(self._descriptor, view[done:], begin + done)
            if not count:
                raise ConfigurationError(f"'{self.path}' was cut off while it was in use; restore it and last.ckpt.")
            done += count
        return row

    def write(self, name: str, slot: int, client: int, row: Tensor) -> None:
        """Write one row, given in the file's dtype on the CPU."""
        view, begin = _bytes_of(row.contiguous()), self._place(name, slot, client)
        done = 0
        with told(self.path, "The round before is kept."):
            while done < len(view):
                done += pwrite(self._descriptor, view[done:], begin + done)

    def sync(self) -> None:
        """Wait until the rows are on the disk, also those that other processes of this machine wrote."""
        _synchronise(self._descriptor)

    def _place(self, name: str, slot: int, client: int) -> int:
        return self._offsets[name, slot] + client * self.layout.row_bytes(name)

    def _bytes(self, length: int, begin: int) -> bytearray:
        found = bytearray(length)
        pread(self._descriptor, memoryview(found), begin)
        return found

    def _check(self) -> str:
        start = self._bytes(_HEADER.size, 0)
        try:
            magic, _, _, length = _HEADER.unpack(start)
            found = json.loads(self._bytes(length, _HEADER.size))
            file_id, is_ours = str(found.pop("id")), magic == MAGIC
        except Exception:  # a flipped bit may give any of them
            is_ours = False
        if not is_ours:
            raise ConfigurationError(
                f"ckpt_path: '{self.path}' is damaged, or of another version: it does not begin with a valid header."
            )
        if found != asdict(self.layout):
            raise ConfigurationError(
                f"ckpt_path: '{self.path}' holds other rows than this run has. Give the model, data, algorithm and "
                "trainer.client_dtype that the file was made with."
            )
        if os.fstat(self._descriptor).st_size != self._offsets["", 0]:
            raise ConfigurationError(f"ckpt_path: '{self.path}' is damaged: it was cut off, or is too long.")
        return file_id

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the file descriptor, which is valid in this process only."""
        return {"path": self.path, "layout": self.layout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the file again, for reading only."""
        RowFile.__init__(self, state["path"], state["layout"])


class FileRows(RowStorage):
    """Keeps rows of equal length in a sparse file that all ranks share.

    Each row has three places in the file, its slots 1 to 3. Memory holds six bytes per row: the slot of the committed
    row (0 for a client without a row of its own), the slot that the last checkpoint names, and a checksum.

    Staging writes a row at once, into a slot that neither ``last.ckpt`` nor the committed state uses. So a commit
    changes memory only, a rollback changes nothing in the file, and a run that was killed finds the rows of
    ``last.ckpt`` unchanged. All ranks choose the same slots; therefore each rank writes the rows of its own clients and
    sends the others only the clients' indices and the checksums. A row that is written more than once between two
    checkpoints uses all three slots, any other row two.

    The checksums tell whether file and checkpoint belong together: a run compares all of them before it goes on, and
    every row when it is read.

    Args:
        starts: Name -> 1-D row that is read for a client without a row of its own. Rows are read in its dtype.
        dtypes: Name -> dtype in which rows are kept.
        num_clients: Number of clients, N.

    Attributes:
        checksum_bytes: Bytes that the checksums of one client's rows take in a checkpoint.
    """

    def __init__(self, starts: dict[str, Tensor], dtypes: dict[str, torch.dtype], num_clients: int) -> None:
        super().__init__(starts, dtypes)
        vectors = {name: [len(row), str(dtypes[name]).removeprefix("torch.")] for name, row in starts.items()}
        self._layout = RowLayout(num_clients, vectors)
        self._file: RowFile | None = None
        self._live = {name: np.zeros(num_clients, dtype=[("slot", "u1"), ("checksum", "u4")]) for name in starts}
        self.mark_saved()  # no slot holds a row yet
        self.checksum_bytes = 4 * len(starts)
        self._has_several_nodes = False
        self._lacking: str | None = None

    @property
    def path(self) -> Path | None:
        """Path of the file; None before it exists."""
        return None if self._file is None else self._file.path

    def read(self, name: str, client: int, *, staged: bool = False) -> Tensor:
        """Read one client's row, committed or staged, and compare its checksum.

        Raises:
            ConfigurationError: The file lacks the rows, is another copy than the checkpoint's, or is damaged.
        """
        self.require()
        start = self.starts[name]
        slot, expected = self.stamp(name, client) if staged else self._live[name][client].item()
        if not slot:
            return start.clone()
        assert self._file is not None
        row = self._file.read(name, slot, client)
        if checksum(row) != expected:  # also where another process goes on with the run and has overwritten the row
            raise ConfigurationError(
                f"ckpt_path: the row '{name}' of client {client} in '{self._file.path}' is not the one that the "
                f"checkpoint was written with: {NAME} is damaged, or a copy of another time; restore it and last.ckpt "
                "from one copy, made while no run wrote to them."
            )
        return row.to(start.dtype)

    def stamp(self, name: str, client: int) -> Any:
        """Return the slot and the checksum of the staged row."""
        return self._staged[name].get(client) or self._live[name][client].item()

    def stage(self, name: str, clients: list[int], rows: Tensor) -> None:
        """Write the rows (K, ...) of K clients into free slots of the file."""
        assert self._file is not None
        for client, row in zip(clients, rows.detach().to("cpu", self._dtypes[name]), strict=True):
            # Neither the slot of the last checkpoint nor the committed one: a kill at any moment leaves both readable.
            slot = self._free_slot(name, client)
            self._file.write(name, slot, client, row)
            self._staged[name][client] = slot, checksum(row)

    def export_staged(self) -> dict[str, Any]:
        """Return the indices of the clients whose rows this rank wrote, with the rows' checksums."""
        # NFS shows rows to other nodes only after they are flushed here and the file is opened again there.
        if self._has_several_nodes and self._file is not None:
            self._file.sync()
        return {name: [(client, v) for client, (_, v) in staged.items()] for name, staged in self._staged.items()}

    def import_staged(self, staged: dict[str, Any]) -> None:
        """Note which rows another rank wrote into the file, and their checksums."""
        if self._has_several_nodes and self._file is not None:
            self._file.reopen()
        for name, clients in staged.items():
            self._staged[name] |= {client: (self._free_slot(name, client), value) for client, value in clients}

    def commit(self) -> None:
        """Make the staged rows the current ones: their slots become the live ones."""
        self._live = {name: rows.copy() for name, rows in self._live.items()}
        for name, staged in self._staged.items():
            self._live[name][list(staged)] = list(staged.values())
        self.rollback()

    def sync(self) -> None:
        """Flush the committed rows to the disk before a checkpoint; other nodes flush theirs during the round."""
        if self._file is not None:
            self._file.sync()

    def mark_saved(self) -> None:
        """Protect the slots of the checkpoint just written; all ranks call this before any of them writes again."""
        # Only now may the slots of the checkpoint before be overwritten.
        self._saved = {name: rows["slot"].copy() for name, rows in self._live.items()}

    def open(self, path: Path, fabric: Fabric) -> None:
        """Open the run's file for training, and create it if the rows come from another run's file or from none.

        Args:
            path: The path of the run's file.
            fabric: The Fabric whose ranks share the file.

        Raises:
            ConfigurationError: The checkpoint has no rows, or the nodes do not share the folder.
        """
        self.require()
        refuse_link(path)
        source, path = self._file, path.resolve()
        own = [(name, client) for name, rows in self._live.items() for client in np.flatnonzero(rows["slot"]).tolist()]
        if fabric.is_global_zero:
            for name, client in own:
                self.read(name, client)  # the checksum shows a damage, or a copy of another time, before it spreads
        if source is None or source.path != path:
            if fabric.is_global_zero:
                RowFile.create(path, self._layout)
                target = RowFile(path, self._layout, is_writable=True)
                for name, client in own:
                    target.write(name, 1, client, self.read(name, client).to(self._dtypes[name]))
            for rows in self._live.values():
                rows["slot"][rows["slot"] > 0] = 1
        fabric.barrier()
        try:
            self._file, problem = RowFile(path, self._layout, is_writable=True), ""
        except ConfigurationError as error:
            problem = str(error)
        seen = gather_objects(fabric, (problem, "" if problem else self._file and self._file.id))
        for rank, (problem, file_id) in enumerate(seen):
            if problem or file_id != seen[0][1]:
                raise ConfigurationError(
                    f"trainer.default_root_dir: all processes share '{path}', but process {rank} does not see the file "
                    f"of process 0 ({problem or 'there is another file of that name'}); choose a folder that all nodes "
                    "share."
                )
        self._has_several_nodes = getattr(fabric.strategy, "num_nodes", 1) > 1
        self.mark_saved()

    def require(self) -> None:
        """Raise if the checkpoint that was loaded has no rows.

        Raises:
            ConfigurationError: The checkpoint is not ``last.ckpt``.
        """
        if self._lacking is not None:
            raise ConfigurationError(
                f"ckpt_path: '{self._lacking}' holds the global model and the scalars only; the clients' rows "
                f"({', '.join(self.starts)}) lie in {NAME} beside the last.ckpt of the run folder: give that one."
            )

    def state_dict(self, *, with_slots: bool = True) -> dict[str, Any]:
        """Return what locates the rows in the file, for a checkpoint.

        Args:
            with_slots: True for ``last.ckpt``; a checkpoint that is kept longer omits the slots, since later rounds
                overwrite them.
        """
        state: dict[str, Any] = {"initial": dict(self.starts)}
        if with_slots and self._lacking is None:
            state["id"] = None if self._file is None else self._file.id
            state["slots"] = {name: torch.from_numpy(rows["slot"].copy()) for name, rows in self._live.items()}
            # Only clients with a row have one. Saved as int32, because torch supports few operations on uint32.
            state["checksums"] = {
                name: torch.from_numpy(rows["checksum"][rows["slot"] > 0].view(np.int32))
                for name, rows in self._live.items()
            }
        return state

    def load_state_dict(self, state: dict[str, Any], checkpoint: Any, path: Path | None) -> None:
        """Restore what :meth:`state_dict` returned; the rows themselves stay in the file until they are read.

        Args:
            state: A dictionary that :meth:`state_dict` returned.
            checkpoint: The path of the checkpoint that held it, for error messages.
            path: The path of the file; None if no client has a row of its own.

        Raises:
            ConfigurationError: The file does not exist, is damaged, or does not belong to the checkpoint.
        """
        self.starts |= state["initial"]
        if "slots" not in state:
            self._lacking = str(checkpoint)
            return
        for name, rows in self._live.items():
            rows["slot"] = state["slots"][name].numpy()
            rows["checksum"][rows["slot"] > 0] = state["checksums"][name].numpy().view(np.uint32)
        if state["id"] is None or path is None:
            return
        if not path.is_file():
            raise ConfigurationError(
                f"ckpt_path: the clients' rows of '{checkpoint}' lie in '{path}', which is not there; copy "
                f"{NAME} along with last.ckpt (cp --sparse=always), or give the one in the run folder."
            )
        self._file = RowFile(path, self._layout)

    def _free_slot(self, name: str, client: int) -> int:
        taken = (self._live[name]["slot"][client], self._saved[name][client])
        return next(slot for slot in range(1, NUM_SLOTS + 1) if slot not in taken)


def checksum(row: Tensor) -> int:
    """Return a checksum of a row in the file's dtype: the CRC-32 of the sums of its sectors.

    A disk writes, loses and mixes up whole sectors. Their sums take a quarter of the time of a CRC-32 of all bytes, and
    miss only changes within a sector that cancel each other.
    """
    data = _bytes_of(row.contiguous())
    words = np.frombuffer(data, np.uint64, len(data) // 8)
    sums = np.add.reduceat(words, np.arange(0, len(words), SECTOR // 8)) if len(words) else words
    return zlib.crc32(data[words.nbytes :], zlib.crc32(sums.data))


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _bytes_of(row: Tensor) -> memoryview:
    return row.view(torch.uint8).numpy().data
