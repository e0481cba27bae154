"""Settings of what clients can do: a simulated clock, and stragglers, which train less than they were asked to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fedbc_lightning.core.checks import FINITE, SHARE, above, at_least, check_arguments, within
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.seeding import numpy_generator


@dataclass(frozen=True)
class Lognormal:
    """A number for each client, drawn once: median · exp(sigma · ξ) with ξ from the standard normal distribution.

    Attributes:
        median: Median > 0 of the numbers.
        sigma: Standard deviation σ ≥ 0 of their logarithm; with 1.0 a tenth of the clients lies above 3.6 medians.
    """

    median: Annotated[float, above(0), FINITE]
    sigma: Annotated[float, at_least(0), FINITE] = 1.0


@dataclass(frozen=True)
class Diurnal:
    """Each client is there for one interval of every period, such as the hours in which a phone charges.

    Attributes:
        share: Fraction of the period, in (0, 1], for which a client is there.
        period: Seconds of a period.
        spread: Fraction of the period, in [0, 1], over which the clients' intervals begin, uniformly. With 1.0 about
            equally many clients are there at all times; with less, their number rises and falls.
    """

    share: Annotated[float, above(0), within(0, 1)] = 0.5
    period: Annotated[float, above(0), FINITE] = 86400.0
    spread: Annotated[float, within(0, 1)] = 1.0


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
    compute: Annotated[float, above(0), FINITE] | Lognormal | str | Path = 1.0
    bandwidth_up: Annotated[float, above(0), FINITE] | Lognormal | str | Path | None = None
    bandwidth_down: Annotated[float, above(0), FINITE] | Lognormal | str | Path | None = None
    availability: Diurnal | str | Path | None = None
    deadline: Annotated[float | None, above(0), FINITE] = None
    late: Literal["dropped", "partial"] = "dropped"

    def __post_init__(self) -> None:
        """Check the values, also those of the parts, since the command line takes their errors for those of a type."""
        for name, value in vars(self).items():
            if isinstance(value, Path):
                object.__setattr__(self, name, str(value))  # frozen; checkpoints and messages hold text
            elif isinstance(value, (Lognormal, Diurnal)):
                check_arguments(type(value), vars(value), f"trainer.system.{name}")
        check_arguments(System, vars(self), "trainer.system")


@dataclass(frozen=True)
class Stragglers:
    """Lets a fraction of the sampled clients do less work in every round, and another fraction not answer at all.

    The choice is a function of (seed, round). There are round(fraction x S) stragglers and round(dropout x S) absent
    clients; halves are rounded up, and stragglers are drawn first.

    Attributes:
        fraction: Fraction of the sampled clients, in [0, 1), that are stragglers. Each trains a number of epochs drawn
            from 1..E-1, or a number of steps if E = 1 or training is counted in steps. FedProx takes 0.5, Fed+ 0.9.
        dropout: Fraction of the sampled clients, in [0, 1), that vanish after they were sampled. They receive z, send
            nothing and keep their state (``status=absent`` in ``clients.csv``).
        partial_work: Treatment of a straggler's work. ``"method"`` leaves it to the method (FedAvg drops it, as in the
            FedProx paper; the others use it); ``"used"`` and ``"dropped"`` (``status=straggler``) hold for any method.

    Raises:
        ConfigurationError: A fraction is not in [0, 1), or both together take more than all clients.

    References:
        Li et al. 2020, "Federated Optimization in Heterogeneous Networks", section 5.2.
    """

    fraction: Annotated[float, SHARE] = 0.0
    dropout: Annotated[float, SHARE] = 0.0
    partial_work: Literal["method", "used", "dropped"] = "method"

    def __post_init__(self) -> None:
        """Check the values."""
        check_arguments(Stragglers, vars(self), "trainer.stragglers")
        if self.fraction + self.dropout > 1:
            raise ConfigurationError(
                f"trainer.stragglers: fraction {self.fraction:g} + dropout {self.dropout:g} is more than all clients."
            )

    def draw(self, ids: list[int], seed: int, round: int) -> tuple[set[int], set[int]]:
        """Return the stragglers and the absent clients among the sampled clients.

        Example:
            >>> late, absent = Stragglers(fraction=0.5, dropout=0.25).draw([3, 1, 4, 5], seed=0, round=1)
            >>> len(late), len(absent), late & absent
            (2, 1, set())
        """
        order = numpy_generator(seed, "stragglers", round).permutation(sorted(ids)).tolist()
        num_late, num_absent = (int(part * len(ids) + 0.5) for part in (self.fraction, self.dropout))
        return set(order[:num_late]), set(order[num_late : num_late + num_absent])
