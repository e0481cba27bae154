"""The types, choices and bounds of arguments, which their annotations state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from fedbc_lightning.algorithms import FedAvg
from fedbc_lightning.core.checks import FINITE, POSITIVE_SHARE, SHARE, above, at_least, check_arguments, within
from fedbc_lightning.core.errors import ConfigurationError

Count = Annotated[int, at_least(1)]


class Part:
    pass


class TopPart(Part):
    pass


@dataclass
class Settings:
    count: Count = 1
    clients: Count | Annotated[float, POSITIVE_SHARE] | Literal["all"] = 1.0
    share: Annotated[float, SHARE] = 0.0
    scale: Annotated[float, FINITE] = 1.0
    rate: Annotated[float, above(0), within(-1, 2)] = 1.0
    mode: bool | Literal["auto"] = "auto"
    patterns: list[str] | None = None
    part: Part | None = None
    anything: Any = None

    def __post_init__(self) -> None:
        check_arguments(Settings, vars(self), "trainer")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"count": 0}, "trainer.count: got 0; give a whole number >= 1."),
        ({"count": "a" * 70 + "\n" * 99 + "b" * 24}, f"count: got '{'a' * 69} ... {'b' * 24}'; give a whole"),
        ({"count": True}, "trainer.count: got True; give a whole number >= 1."),
        ({"clients": 1.5}, "got 1.5; give a whole number >= 1, a number in (0, 1] or all."),
        ({"scale": float("inf")}, "trainer.scale: got inf; give a number that is finite."),
        ({"rate": 3}, "trainer.rate: got 3; give a number > 0 and in [-1, 2]."),
        ({"mode": 1}, "trainer.mode: got 1; give true, false or auto."),
        ({"patterns": "head"}, "trainer.patterns: got 'head'; give a list, each item a text or null."),
        ({"part": Part}, "part: got the class Part, not an object such as Part(...); give an object of Part or null."),
        ({"part": "top"}, "trainer.part: got 'top'; give an object of Part or null; did you mean TopPart(...)?"),
        ({"count": 0, "share": 2}, "give a whole number >= 1. trainer.share: got 2;"),
    ],
)
def test_values_that_are_not(values, said):
    with pytest.raises(ConfigurationError) as error:
        Settings(**values)
    assert said in str(error.value)


class Mine(FedAvg):
    """A user's own."""

    def __init__(self, mu=1.0, **fedavg):
        super().__init__(**fedavg)


def test_an_unknown_argument_is_refused_in_the_name_of_the_class_that_is_made():
    with pytest.raises(TypeError, match=r"^Mine\(\) got .* 'lam'; it takes mu, weighting"):
        Mine(lam=0.5)
