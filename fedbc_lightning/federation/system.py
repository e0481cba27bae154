"""Devices of clients on the simulated clock: how long each takes, and when it is there, by settings or by CSV files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from fedbc_lightning.core.checks import FinitePositive, Share, UnitInterval, check_arguments, checked, within
from fedbc_lightning.core.clients import find_clients
from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.core.seeding import numpy_generator
from fedbc_lightning.data import FederatedDataModule


@dataclass(frozen=True)
class Lognormal:
    """A number for each client, drawn once: median · exp(sigma · ξ) with ξ from the standard normal distribution.

    Attributes:
        median: Median > 0 of the numbers.
        sigma: Standard deviation of their logarithm, in [0, 10]; with 1.0 a tenth of clients lies above 3.6 medians.
    """

    median: FinitePositive
    sigma: Annotated[float, within(0, 10)] = 1.0


@dataclass(frozen=True)
class Diurnal:
    """Each client is there for one interval of every period, such as the hours in which a phone charges.

    Attributes:
        share: Fraction of the period, in (0, 1], for which a client is there.
        period: Seconds of a period.
        spread: Fraction of the period, in [0, 1], over which the clients' intervals begin, uniformly. With 1.0 about
            equally many clients are there at all times; with less, their number rises and falls.
    """

    share: Share = 0.5
    period: FinitePositive = 86400.0
    spread: UnitInterval = 1.0


@checked("trainer.system")
@dataclass(frozen=True)
class System:
    """Gives a run a simulated clock, which decides how long rounds take, and who is there and in time.

    A client of a round receives the model, takes its local steps, and sends; a round takes as long as the slowest
    client whose work is used, or until the deadline. Evaluation and the server take no time. All of it is a function of
    these settings and the seed, and no real time is measured.

    Attributes:
        compute: Seconds of a local step: a number for all clients, a :class:`Lognormal`, or the path of a CSV file with
            the column ``compute``, or in FedScale's form ``computation``, in milliseconds of inference per sample; a
            step then takes three times that for each sample of a batch, as in FedScale.
        bandwidth_up: Bytes per second from a client to the server: a number, a :class:`Lognormal`, or a CSV file with
            the column ``bandwidth_up``, or FedScale's ``communication`` in kilobits per second. None: sending takes no
            time.
        bandwidth_down: Bytes per second from the server to a client, likewise.
        availability: When clients are there: a :class:`Diurnal`, or a CSV file with a row ``client,start,end`` for each
            interval, in seconds, which repeats after its last end. A round samples among those who are there when it
            starts, and they stay until it ends; if nobody is there, time moves on until somebody is. None: always.
        deadline: Seconds after which a round ends, and whoever is late has no part in it; None: it waits for all whose
            work is used.
        late: What happens to a client that cannot be in time: ``"dropped"``, its work is lost (``status=straggler`` in
            ``clients.csv``), or ``"partial"``, it takes as many steps as fit.

    Raises:
        ConfigurationError: A value is out of range.

    References:
        Lai et al. 2022, "FedScale: Benchmarking Model and System Performance of Federated Learning at Scale".
    """

    # Path makes jsonargparse leave a path as it is: where only str stands beside a dataclass, it reads the file as a
    # config of the dataclass, and gives its content in place of the path.
    compute: FinitePositive | Lognormal | str | Path = 1.0
    bandwidth_up: FinitePositive | Lognormal | str | Path | None = None
    bandwidth_down: FinitePositive | Lognormal | str | Path | None = None
    availability: Diurnal | str | Path | None = None
    deadline: FinitePositive | None = None
    late: Literal["dropped", "partial"] = "dropped"

    def __post_init__(self) -> None:
        """Check the values, also those of the parts, since the command line takes their errors for those of a type."""
        for name, value in vars(self).items():
            if isinstance(value, Path):
                object.__setattr__(self, name, str(value))  # frozen; checkpoints and messages hold text
            elif isinstance(value, (Lognormal, Diurnal)):
                check_arguments(type(value), vars(value), f"trainer.system.{name}")


# Forward and backward pass of a sample, in passes of inference: what FedScale multiplies its latencies with
FEDSCALE_PASSES = 3.0
BYTES_PER_KILOBIT = 125.0
# Share of a deadline by which a client may be late, as three steps of 0.1 seconds are more than 0.3 in floats
ROUNDING = 1e-9
# Columns of FedScale's device traces, which may have others beside them
FEDSCALE = ("computation", "communication")
SPEEDS = ("client", "compute", "bandwidth_up", "bandwidth_down", *FEDSCALE)
INTERVALS = ("client", "start", "end")


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
        ConfigurationError: A file is not as it should be, or says nothing of a client that trains.
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
            return given.median * np.exp(given.sigma * draws)
        return np.full(self._num_clients, np.inf if given is None else float(given))

    def _intervals(self) -> Availability | None:
        given, n = self.system.availability, self._num_clients
        if given is None:
            return None
        if isinstance(given, Diurnal):
            starts = given.period * given.spread * numpy_generator(self._seed, "availability").random(n)
            return Availability(np.arange(n), starts, starts + given.share * given.period, given.period, n)
        clients, starts, ends = DeviceFile("trainer.system.availability", str(given), n, self._names).intervals()
        if not np.isin(self._clients, clients).any():
            raise ConfigurationError(f"trainer.system.availability: '{given}' has no row of a client that trains.")
        return Availability(clients, starts, ends, float(ends.max()), n)

    def seconds(self, client: int, steps: int, down: int, up: int) -> float:
        """Return the seconds in which a client receives `down` bytes, takes `steps` steps, and sends `up` bytes."""
        # Nothing overlaps: the client computes when it has all of z, and sends when it has taken all steps.
        return float(down / self.down[client] + steps * self.step[client] + up / self.up[client])

    def here(self, time: float, clients: np.ndarray) -> np.ndarray:
        """Return the clients that are available at a time, in their order."""
        return clients if self._availability is None else clients[self._availability.at(time)[clients]]

    def next_start(self, time: float, clients: np.ndarray) -> float:
        """Return when the first of the clients comes after a time; infinity if none ever does."""
        return np.inf if self._availability is None else self._availability.next_start(time, clients)


class Availability:
    """Tells who is there at a time, and when somebody comes next.

    Times are compared as k · period + start, never by a remainder, and the start belongs to an interval however short
    it is beside the time, so that a client is there at the very time that :meth:`next_start` has named.

    Args:
        clients: Client of each interval.
        starts: Start of each interval, in seconds, in [0, period).
        ends: End of each interval, at most one period after its start.
        period: Seconds after which all intervals repeat.
        num_clients: Number of clients N.

    Attributes:
        period: Seconds after which all intervals repeat.
    """

    def __init__(
        self, clients: np.ndarray, starts: np.ndarray, ends: np.ndarray, period: float, num_clients: int
    ) -> None:
        self._clients, self._starts, self._ends = clients, starts, ends
        self.period, self._num_clients = period, num_clients

    def at(self, time: float) -> np.ndarray:
        """Return who is there at a time, (N,) bool."""
        here = np.zeros(self._num_clients, dtype=bool)
        for k in self._periods(time):
            starts, ends = k * self.period + self._starts, k * self.period + self._ends
            is_in = (starts == time) | ((starts < time) & (time < ends))
            here[self._clients[is_in]] = True
        return here

    def next_start(self, time: float, clients: np.ndarray) -> float:
        """Return when the first of some clients comes after a time; infinity if they have no interval."""
        starts = self._starts[np.isin(self._clients, clients)]
        later = [
            float(s.min()) for k in self._periods(time) if len(s := (after := k * self.period + starts)[after > time])
        ]
        return min(later, default=np.inf)

    def _periods(self, time: float) -> range:
        """Numbers of the periods whose intervals may hold the time or come next, with one to spare for rounding."""
        # Times are compared as k · period + start; a remainder in floats could be a whole period off.
        k = int(time // self.period)
        return range(k - 1, k + 3)


class DeviceFile:
    """The rows of a CSV file about clients, or about devices that clients may have.

    A column that nobody reads is refused, since a misspelt ``client`` would otherwise deal the rows to any client.
    Files in FedScale's form may have others.

    Args:
        where: Setting that names the file, for messages.
        path: The file.
        num_clients: Number of clients N of the data.
        names: Names of the clients, which may stand in the column ``client`` in place of their numbers.

    Raises:
        ConfigurationError: The file cannot be read, or has no rows.
    """

    def __init__(self, where: str, path: str, num_clients: int, names: Sequence[str] | None) -> None:
        import pandas  # here: a run without such files must not wait for it

        self._where, self._path, self._num_clients, self._names = where, path, num_clients, names
        try:
            # As text, which Python turns into numbers: pandas' own parser rounds the last digit of some.
            self._rows = pandas.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{where}: '{path}' cannot be read as a CSV file ({getattr(error, 'strerror', None) or error}); give "
                "the path of a file, or numbers."
            ) from error
        # A row with more cells than the header would make pandas take the first column for an index.
        if self._rows.empty or not isinstance(self._rows.index, pandas.RangeIndex):
            raise ConfigurationError(f"{where}: '{path}' has no rows, or one with more cells than there are columns.")

    def column(self, factors: Mapping[str, float], seed: int) -> np.ndarray:
        """Return a number > 0 for each of the N clients; NaN where the file says nothing of a client.

        Without a column ``client`` the rows are devices, one of which is drawn for each client from the seed; equal
        files give a client the same device for all settings.

        Args:
            factors: Map from the columns that may hold the numbers, the first wins, to the factors of their units.
            seed: Seed of the run.

        Raises:
            ConfigurationError: No such column is there, a column is unknown, or a cell is no positive number or
                client.
        """
        name = next((name for name in factors if name in self._rows), " or ".join(factors))
        self._check_columns(SPEEDS, name)
        values = factors[name] * self._numbers(name, is_speed=True)
        if "client" not in self._rows:
            # A seed of its own: equal files of speeds and bandwidths describe the same device for a client.
            return values[numpy_generator(seed, "devices").integers(len(values), size=self._num_clients)]
        clients = self._clients()
        found = np.full(self._num_clients, np.nan)
        for row, client in enumerate(clients):
            if not np.isnan(found[client]):
                raise self._wrong(row, f"client {self._rows['client'][row]} is there twice")
            found[client] = values[row]
        return found

    def intervals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return client, start and end of each row, with 0 ≤ start < end.

        Raises:
            ConfigurationError: A column is missing or unknown, or a cell is no such number or client.
        """
        for name in INTERVALS:
            self._check_columns(INTERVALS, name)
        clients, starts, ends = self._clients(), self._numbers("start"), self._numbers("end")
        if (ends <= starts).any():
            raise self._wrong(int((ends <= starts).argmax()), "the end is not after the start")
        return clients, starts, ends

    def _check_columns(self, known: Sequence[str], needed: str) -> None:
        if needed not in self._rows:
            there = ", ".join(self._rows)
            raise ConfigurationError(f"{self._where}: '{self._path}' has no column {needed}, but {there}.")
        unknown = [name for name in self._rows if name not in known]
        if unknown and not any(name in FEDSCALE for name in self._rows):
            meant = did_you_mean(unknown[0].strip(), known, f"there may be {', '.join(known)}")
            raise ConfigurationError(f"{self._where}: '{self._path}' has an unknown column '{unknown[0]}'; {meant}")

    def _numbers(self, name: str, *, is_speed: bool = False) -> np.ndarray:
        numbers = np.array([_number(text) for text in self._rows[name]])
        is_wrong = ~np.isfinite(numbers) | ((numbers <= 0) if is_speed else (numbers < 0))
        if is_wrong.any():
            row = int(is_wrong.argmax())
            least = "> 0" if is_speed else ">= 0"
            raise self._wrong(row, f"{name} is {self._rows[name][row]!r}; give a number {least}")
        return numbers

    def _clients(self) -> np.ndarray:
        where = f"{self._where}: '{self._path}'"
        return np.array(find_clients(self._rows["client"], self._num_clients, self._names, where))

    def _wrong(self, row: int, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self._where}: '{self._path}', line {row + 2}: {problem}.")


def _number(text: str) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan
