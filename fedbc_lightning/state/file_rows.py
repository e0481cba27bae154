"""The clients' rows in ``clients.bin``, committed by ``last.ckpt``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.distributed.fabric import gather_objects
from fedbc_lightning.state.client_rows import RowStorage
from fedbc_lightning.state.row_file import NAME, NUM_SLOTS, RowFile, RowLayout, checksum

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class FileRows(RowStorage):
    """Rows of one size in a sparse file; in memory is one byte per row: its live slot, 0 for a row never touched.

    A row is written, when it is staged, into a slot that neither ``last.ckpt`` names nor the committed state does. So
    a commit changes bytes in memory only, a rollback nothing, and a killed run finds the rows of ``last.ckpt`` as they
    were. All ranks choose the same slots, so each writes the rows of its own clients and tells the others their
    numbers. Where a row is written twice between two checkpoints it takes a third slot, else two.

    The file's generations are the numbers of commits at its last checkpoint and at its last commit. A checkpoint of
    fewer than the one is an older copy, whose slots have been written over since; one of more than the other stands
    beside an older copy of the file. Besides, a checkpoint holds a checksum of every row, compared when it is read.

    Args:
        starts: See :class:`~fedbc_lightning.state.client_rows.RowStorage`.
        dtypes: Name -> dtype in which rows are kept.
        num_clients: N.
    """

    def __init__(self, starts: dict[str, Tensor], dtypes: dict[str, torch.dtype], num_clients: int) -> None:
        super().__init__(starts)
        vectors = {name: [len(row), str(dtypes[name]).removeprefix("torch.")] for name, row in starts.items()}
        self._layout, self._dtypes = RowLayout(num_clients, vectors), dtypes
        self._file: RowFile | None = None
        self._live = {name: np.zeros(num_clients, dtype=np.uint8) for name in starts}
        self._checksums = {name: np.zeros(num_clients, dtype=np.uint32) for name in starts}
        self._saved = {name: slots.copy() for name, slots in self._live.items()}
        self._generation = 0
        self._is_read_only = self._has_several_nodes = False
        self._lacking: str | None = None

    @property
    def checksum_bytes(self) -> int:
        """What one client's checksums take in a checkpoint."""
        return sum(checksums.itemsize for checksums in self._checksums.values())

    @property
    def path(self) -> Path | None:
        """Of the file; None: there is none yet."""
        return None if self._file is None else self._file.path

    def read(self, name: str, client: int, *, staged: bool = False) -> Tensor:
        """See :class:`RowStorage`."""
        self.require()
        start = self.starts[name]
        slot, expected = self._staged[name].get(client, (0, 0)) if staged else (0, 0)
        if not slot:
            slot, expected = int(self._live[name][client]), int(self._checksums[name][client])
        if not slot:
            return start.clone()
        assert self._file is not None
        row = self._file.read(name, slot, client)
        if self._is_read_only:
            self._check_generations("the checkpoint")  # the run may go on in another process
        if checksum(row) != expected:
            raise ConfigurationError(
                f"ckpt_path: the row '{name}' of client {client} in '{self._file.path}' is not the one that the "
                f"checkpoint was written with: {NAME} is damaged, or a copy of another time; restore it and last.ckpt "
                "from one copy, made while no run wrote to them."
            )
        return row.to(start.dtype)

    def stage(self, name: str, clients: list[int], rows: Tensor) -> None:
        """See :class:`RowStorage`."""
        assert self._file is not None
        for client, row in zip(clients, rows.detach().to("cpu", self._dtypes[name]), strict=True):
            slot = self._free_slot(name, client)
            self._file.write(name, slot, client, row)
            self._staged[name][client] = slot, checksum(row)

    def export_staged(self) -> dict[str, Any]:
        """The numbers of the clients whose rows were written here, and the checksums."""
        if self._has_several_nodes and self._file is not None:
            self._file.sync()
        return {
            name: [(client, value) for client, (_, value) in staged.items()] for name, staged in self._staged.items()
        }

    def import_staged(self, staged: dict[str, Any]) -> None:
        """Take note of the rows that another rank wrote."""
        if self._has_several_nodes and self._file is not None:
            self._file.reopen()
        for name, clients in staged.items():
            self._staged[name] |= {client: (self._free_slot(name, client), value) for client, value in clients}

    def commit(self) -> None:
        """See :class:`RowStorage`."""
        for name, staged in self._staged.items():
            if staged:
                slots, checksums = zip(*staged.values(), strict=True)
                self._live[name][list(staged)], self._checksums[name][list(staged)] = slots, checksums
        self._generation += 1
        if self._file is not None:
            with suppress(OSError):  # a commit is done or not; :meth:`sync` tries again
                self._file.set_newest(self._generation)
        self.rollback()

    def sync(self) -> None:
        """Before a checkpoint: the committed rows on the disk. Other nodes have seen to theirs in the round."""
        if self._file is not None:
            self._file.set_newest(self._generation)
            self._file.sync()

    def mark_saved(self, *, is_writer: bool) -> None:
        """After a checkpoint, on all ranks before any writes again: its slots are now those to keep."""
        self._saved = {name: slots.copy() for name, slots in self._live.items()}
        if is_writer and self._file is not None:
            self._file.set_oldest(self._generation)

    def open(self, path: Path, fabric: Fabric) -> None:
        """Open a run's file to train: made anew, with the rows of the checkpoint if that is another run's.

        Raises:
            ConfigurationError: The checkpoint has no rows, or nodes do not share the folder.
        """
        self.require()
        source, path = self._file, path.resolve()
        if source is None or source.path != path:
            if fabric.is_global_zero:
                RowFile.create(path, self._layout)
                if source is not None:
                    self._copy(source, RowFile(path, self._layout, is_writable=True))
            for slots in self._live.values():
                slots[slots > 0] = 1
        fabric.barrier()
        known = fabric.broadcast(RowFile(path, self._layout).id if fabric.is_global_zero else None)
        try:
            self._file, problem = RowFile(path, self._layout, is_writable=True), ""
        except ConfigurationError as error:
            problem = str(error)
        if not problem and self._file is not None and self._file.id != known:
            problem = "there is another file of that name"
        for rank, found in enumerate(gather_objects(fabric, problem)):
            if found:
                raise ConfigurationError(
                    f"trainer.default_root_dir: all processes share '{path}', but process {rank} does not see the "
                    f"file of process 0 ({found}); choose a folder that all nodes share."
                )
        self._is_read_only, self._has_several_nodes = False, getattr(fabric.strategy, "num_nodes", 1) > 1
        if self._file is not None:
            self._file.set_newest(self._generation)
        self.mark_saved(is_writer=fabric.is_global_zero)

    def require(self) -> None:
        """Raise where a checkpoint without rows was loaded."""
        if self._lacking is not None:
            raise ConfigurationError(
                f"ckpt_path: '{self._lacking}' holds the global model and the scalars only; the clients' rows "
                f"({', '.join(self.starts)}) lie in {NAME} and belong to last.ckpt: give that one."
            )

    def state_dict(self, *, with_slots: bool = True) -> dict[str, Any]:
        """What finds the rows again, for ``last.ckpt``; without the slots for a checkpoint that is kept longer."""
        state: dict[str, Any] = {"initial": dict(self.starts)}
        if with_slots and self._lacking is None:
            state["id"] = None if self._file is None else self._file.id
            state["generation"] = self._generation
            state["slots"] = {name: torch.from_numpy(slots.copy()) for name, slots in self._live.items()}
            state["checksums"] = {  # of clients with a row; torch knows more of int32 than of uint32
                name: torch.from_numpy(self._checksums[name][slots > 0].view(np.int32))
                for name, slots in self._live.items()
            }
        return state

    def load_state_dict(self, state: dict[str, Any], checkpoint: Any, path: Path | None) -> None:
        """Restore; the rows are read where they lie.

        Args:
            state: Of :meth:`state_dict`.
            checkpoint: Its path, for messages.
            path: Of the file; None: no row was touched.

        Raises:
            ConfigurationError: No such file, a damaged one, or not that of the checkpoint.
        """
        self.starts |= state["initial"]
        if "slots" not in state:
            self._lacking = str(checkpoint)
            return
        self._generation = state["generation"]
        self._live = {name: slots.numpy().copy() for name, slots in state["slots"].items()}
        for name, checksums in state.get("checksums", {}).items():  # a file without them is refused when it is opened
            self._checksums[name][self._live[name] > 0] = checksums.numpy().view(np.uint32)
        if state["id"] is None or path is None:
            return
        if not path.is_file():
            raise ConfigurationError(
                f"ckpt_path: the clients' rows of '{checkpoint}' lie in '{path}', which is not there; copy "
                f"{NAME} along with last.ckpt (cp --sparse=always), or give the one in the run folder."
            )
        self._file, self._is_read_only = RowFile(path, self._layout), True
        if self._file.id != state["id"]:
            raise ConfigurationError(f"ckpt_path: '{path}' is of another run than '{checkpoint}'; keep them together.")
        self._check_generations(f"'{checkpoint}'")

    def _check_generations(self, checkpoint: str) -> None:
        assert self._file is not None
        oldest, newest = self._file.generations
        if newest < self._generation:
            raise ConfigurationError(
                f"ckpt_path: '{self._file.path}' is an older copy than {checkpoint}: it ends {newest} rounds into the "
                f"run, the checkpoint {self._generation}; copy both at one time, while no run writes to them."
            )
        if oldest > self._generation:
            raise ConfigurationError(
                f"ckpt_path: {checkpoint} is an older copy: since then the run went on, and wrote over its rows in "
                f"'{self._file.path}'; give the last.ckpt that lies beside it."
            )

    def _free_slot(self, name: str, client: int) -> int:
        taken = (self._live[name][client], self._saved[name][client])
        return next(slot for slot in range(1, NUM_SLOTS + 1) if slot not in taken)

    def _copy(self, source: RowFile, target: RowFile) -> None:
        for name, slots in self._live.items():
            for client in np.flatnonzero(slots).tolist():
                target.write(name, 1, client, source.read(name, int(slots[client]), client))
