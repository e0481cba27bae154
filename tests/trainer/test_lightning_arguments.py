"""The table of lightning.Trainer's arguments: none is missing, and what it advises exists."""

import inspect
import re
from dataclasses import fields

import pytest
from lightning.pytorch import Trainer

from fedbc_lightning import FederatedTrainer
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.lightning_arguments import LIGHTNING_ARGUMENTS, advice
from fedbc_lightning.run.settings import RunSettings

OURS = {field.name for field in fields(RunSettings)}
GONE = [name for name, place in LIGHTNING_ARGUMENTS.items() if place.use is not None]


def test_every_argument_has_a_place():
    assert LIGHTNING_ARGUMENTS.keys() == inspect.signature(Trainer).parameters.keys()
    assert LIGHTNING_ARGUMENTS.keys() & OURS == LIGHTNING_ARGUMENTS.keys() - {*GONE}


@pytest.mark.parametrize("name", GONE)
def test_an_argument_that_is_not_here_says_what_to_use(name):
    with pytest.raises(ConfigurationError, match=re.escape(advice(name).rstrip("."))):
        FederatedTrainer(**{name: 1})
    advised = set(re.findall(r"(?<![.\w])[a-z]+(?:_[a-z]+)+", LIGHTNING_ARGUMENTS[name].use))
    assert advised <= OURS
