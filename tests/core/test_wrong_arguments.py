"""What a user may give wrong to a class that a config can name: one line of the check of arguments says so."""

import inspect
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, get_args, get_origin

import pytest
import torch
from helpers.refusals import refused
from lightning.pytorch import LightningModule
from torch.utils.data import TensorDataset

from fedbc_lightning import FedBC, FederatedTrainer, Privacy, System
from fedbc_lightning.cli.classes import choices
from fedbc_lightning.cli.parser import CLASS_KEYS
from fedbc_lightning.core.checks import Bound, hints_of
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.origin import is_ours
from fedbc_lightning.distributed.backend import Backend
from fedbc_lightning.federation.coding import Codecs
from fedbc_lightning.federation.participation import ClientSampler, Stragglers
from fedbc_lightning.local.penalties import Penalty
from fedbc_lightning.partition import Partitioner
from fedbc_lightning.run.settings import RunSettings
from fedbc_lightning.server.codecs import Codec
from fedbc_lightning.server.robust import RobustRule
from fedbc_lightning.studies.study import Study

BASES = *CLASS_KEYS.values(), Partitioner, ClientSampler, RobustRule, Codec, Penalty, Backend
OTHERS = {FederatedTrainer, Privacy, System, Codecs, Stragglers, Study}
CLASSES = sorted(OTHERS.union(*(filter(is_ours, choices(base)) for base in BASES)), key=str)
VERBS = [(trainer := FederatedTrainer()).fit, trainer.predict, trainer.export]
# What these take beside the argument in question
GIVEN = {"data": TensorDataset(torch.zeros(4, 2)), "train": [TensorDataset(torch.zeros(4, 2))], "partitioner": None}


class Wrong:
    """Something that no argument of a known type takes."""


def wrong_values(hint: Any) -> Iterator[Any]:
    """Yield an object of another type, where there is a type, and numbers outside of the bounds."""
    if hint is not Any:
        yield Wrong()
    if get_origin(hint) is Annotated:
        bounds = [bound for bound in get_args(hint) if isinstance(bound, Bound)]
        yield from [number for number in (-7, 1e9, math.inf) if not all(bound.allows(number) for bound in bounds)]


def arguments_of(cls: type) -> dict[str, inspect.Parameter]:
    found = inspect.signature(cls).parameters
    return {name: each for name, each in found.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def mistakes() -> Iterator[Any]:
    for cls in CLASSES:
        hints = hints_of(RunSettings if cls is FederatedTrainer else cls)
        for name in sorted(arguments_of(cls).keys() & hints):
            for value in wrong_values(hints[name]):
                yield pytest.param(cls, name, value, id=f"{cls.__name__}-{name}-{type(value).__name__}")


@pytest.mark.parametrize(("cls", "name", "value"), [*mistakes()])
def test_a_wrong_argument_is_named_with_what_to_give(cls, name, value):
    needed = {name: GIVEN.get(name, Wrong()) for name, each in arguments_of(cls).items() if each.default is each.empty}
    with refused() as error:
        cls(**{**needed, name: value})
    assert f"{name}: got " in str(error.value)


@pytest.mark.parametrize("cls", CLASSES)
def test_what_a_part_refuses_is_named_as_the_user_gave_it(cls):
    for name in arguments_of(cls):
        with suppress(TypeError):  # another argument is missing
            try:
                cls(**{"dual_lr": 1.0, name: -7} if issubclass(cls, FedBC) else {name: -7})
            except ConfigurationError as error:
                is_told = f"{name}: " in str(error) or "pip install" in str(error)  # of an extra that is not there
                assert is_told or name == "devices"


# Models leave an unknown name to Python: a wrapped __init__ would hide its arguments from save_hyperparameters
@pytest.mark.parametrize("call", [*(cls for cls in CLASSES if not issubclass(cls, LightningModule)), *VERBS])
def test_an_unknown_argument_is_told_with_the_one_that_was_meant(call):
    for name in arguments_of(call):
        with pytest.raises((TypeError, ConfigurationError), match=rf"\b{name}s\b.* did you mean '{name}'"):
            call(**{f"{name}s": 1})
