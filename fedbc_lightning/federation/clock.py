"""The simulated clock of a run: how long each client takes, and who is there at a time."""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.seeding import numpy_generator
from fedbc_lightning.data import FederatedDataModule
from fedbc_lightning.federation.availability import Availability
from fedbc_lightning.federation.device_files import DeviceFile
from fedbc_lightning.federation.system import Diurnal, Lognormal, System

FEDSCALE_PASSES = 3.0
"""Forward and backward pass of a sample, in passes of inference: what FedScale multiplies its latencies with."""
BYTES_PER_KILOBIT = 125.0
ROUNDING = 1e-9
"""Share of a deadline by which a client may be late, as three steps of 0.1 seconds are more than 0.3 in floats."""


class Clock:
    """Tells how many seconds clients take, and who is there; nothing in it changes during a run.

    Args:
        system: Its settings.
        datamodule: The clients' data, after its set-up.
        batches_per_step: Number of batches whose gradients make one step.
        seed: The run's seed.

    Attributes:
        system: Its settings.
        step: Seconds of a local step of each client, (N,).
        up: Bytes per second from each client to the server, (N,); infinite if sending takes no time.
        down: Bytes per second from the server to each client, (N,), likewise.
        latest: Seconds after which a client is late, the deadline but for rounding; infinite without a deadline.

    Raises:
        ConfigurationError: A file is not as it should be, or says nothing of a client that trains; or a drawn number is
            zero or infinite.
    """

    def __init__(self, system: System, datamodule: FederatedDataModule, batches_per_step: int, seed: int) -> None:
        self.latest = np.inf if system.deadline is None else system.deadline * (1 + ROUNDING)
        self.system, self._seed, self._clients = system, seed, datamodule.training_clients
        self._num_clients, self._names = datamodule.num_clients, datamodule.client_names
        per_sample = FEDSCALE_PASSES * datamodule.batch_size * batches_per_step / 1000
        self.step = self._numbers("compute", {"compute": 1.0, "computation": per_sample})
        self.up, self.down = (
            self._numbers(name, {name: 1.0, "communication": BYTES_PER_KILOBIT})
            for name in ("bandwidth_up", "bandwidth_down")
        )
        self._availability = self._intervals()

    def _numbers(self, name: str, factors: dict[str, float]) -> np.ndarray:
        given, where = getattr(self.system, name), f"trainer.system.{name}"
        if isinstance(given, str):
            numbers = DeviceFile(where, given, self._num_clients, self._names).column(factors, self._seed)
            unknown = [client for client in self._clients.tolist() if np.isnan(numbers[client])]
            if unknown:
                who = self._names[unknown[0]] if self._names else unknown[0]
                raise ConfigurationError(
                    f"{where}: '{given}' has no row of client {who} (of {len(unknown)} clients in all); add one, or "
                    "leave out the column client: each client then gets a row that is drawn."
                )
            return numbers
        if isinstance(given, Lognormal):
            draws = numpy_generator(self._seed, name).standard_normal(self._num_clients)
            with np.errstate(over="ignore"):
                numbers = given.median * np.exp(given.sigma * draws)
            wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers > 0)))
            if len(wrong):
                raise ConfigurationError(
                    f"{where}.sigma: got {given.sigma:g}, with which client {wrong[0]} drew {numbers[wrong[0]]:g}; "
                    "give a smaller one."
                )
            return numbers
        return np.full(self._num_clients, np.inf if given is None else float(given))

    def _intervals(self) -> Availability | None:
        given, n = self.system.availability, self._num_clients
        if given is None:
            return None
        if isinstance(given, Diurnal):
            starts = given.period * given.spread * numpy_generator(self._seed, "availability").random(n)
            return Availability(np.arange(n), starts, starts + given.share * given.period, given.period, n)
        clients, starts, ends = DeviceFile("trainer.system.availability", given, n, self._names).intervals()
        if not np.isin(self._clients, clients).any():
            raise ConfigurationError(f"trainer.system.availability: '{given}' has no row of a client that trains.")
        return Availability(clients, starts, ends, float(ends.max()), n)

    def seconds(self, client: int, steps: int, down: int, up: int) -> float:
        """Return the seconds in which a client receives `down` bytes, takes `steps` steps, and sends `up` bytes."""
        return float(down / self.down[client] + steps * self.step[client] + up / self.up[client])

    def here(self, time: float, clients: np.ndarray) -> np.ndarray:
        """Return those of the clients, in their order, who are there at a time."""
        return clients if self._availability is None else clients[self._availability.at(time)[clients]]

    @property
    def period(self) -> float:
        """Seconds after which availability repeats; infinite if all clients are always there."""
        return np.inf if self._availability is None else self._availability.period

    def next_start(self, time: float, clients: np.ndarray) -> float:
        """Return when the first of the clients comes after a time; infinity if none ever does."""
        return np.inf if self._availability is None else self._availability.next_start(time, clients)

    def describe(self, steps: list[int]) -> str:
        """Return the settings with a hash of all numbers, also of the clients' local steps."""
        numbers = [self.step, self.up, self.down, *(vars(self._availability).values() if self._availability else ())]
        numbers.append(np.array(steps))
        hashed = sha256(b"".join(np.asarray(some).tobytes() for some in numbers)).hexdigest()[:8]
        return f"{self.system}, numbers {hashed}"
