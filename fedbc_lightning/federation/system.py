"""Settings of a simulated clock: how fast clients compute and send, when they are there, and how long a round waits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedbc_lightning.core.checks import check_at_least, check_choice, check_finite, check_share
from fedbc_lightning.core.errors import ConfigurationError


@dataclass(frozen=True)
class Lognormal:
    """A number for each client, drawn once: median · exp(sigma · ξ) with ξ from the standard normal distribution.

    Attributes:
        median: Median > 0 of the numbers.
        sigma: Standard deviation σ ≥ 0 of their logarithm; with 1.0 a tenth of the clients lies above 3.6 medians.
    """

    median: float
    sigma: float = 1.0


@dataclass(frozen=True)
class Diurnal:
    """Each client is there for one interval of every period, such as the hours in which a phone charges.

    Attributes:
        share: Fraction of the period, in (0, 1], for which a client is there.
        period: Seconds of a period.
        spread: Fraction of the period, in [0, 1], over which the clients' intervals begin, uniformly. With 1.0 about
            equally many clients are there at all times; with less, their number rises and falls.
    """

    share: float = 0.5
    period: float = 86400.0
    spread: float = 1.0


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
    compute: float | Lognormal | str | Path = 1.0
    bandwidth_up: float | Lognormal | str | Path | None = None
    bandwidth_down: float | Lognormal | str | Path | None = None
    availability: Diurnal | str | Path | None = None
    deadline: float | None = None
    late: Literal["dropped", "partial"] = "dropped"

    def __post_init__(self) -> None:
        """Check the values, also those of the parts, since the command line takes their errors for those of a type."""
        for name in ("compute", "bandwidth_up", "bandwidth_down", "availability"):
            if isinstance(path := getattr(self, name), Path):
                object.__setattr__(self, name, str(path))  # frozen; checkpoints and messages hold text
        for name in ("compute", "bandwidth_up", "bandwidth_down"):
            value, where = getattr(self, name), f"trainer.system.{name}"
            if isinstance(value, Lognormal):
                _check_positive(f"{where}.median", value.median)
                check_at_least(f"{where}.sigma", value.sigma, 0)
                check_finite(f"{where}.sigma", value.sigma)
            elif not isinstance(value, str) and (value is not None or name == "compute"):
                _check_positive(where, value)
        given, where = self.availability, "trainer.system.availability"
        if isinstance(given, Diurnal):
            check_at_least(f"{where}.share", given.share, 0, strict=True)
            check_share(f"{where}.share", given.share, closed=True)
            _check_positive(f"{where}.period", given.period)
            check_share(f"{where}.spread", given.spread, closed=True)
        elif given is not None and not isinstance(given, str):
            raise ConfigurationError(
                f"{where}: got {given!r}; give the path of a CSV file, or {{share: ..., period: ..., spread: ...}}."
            )
        if self.deadline is not None:
            _check_positive("trainer.system.deadline", self.deadline)
        check_choice("trainer.system.late", self.late, ("dropped", "partial"))


def _check_positive(where: str, value: float) -> None:
    check_at_least(where, value, 0, strict=True)
    check_finite(where, value)
