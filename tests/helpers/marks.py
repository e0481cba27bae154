"""Marks that repeat a test, one case after another."""

from typing import Any

import pytest

each_engine = pytest.mark.parametrize("engine", ["sequential", "vectorized"])


def of_each(settings: list[Any]) -> pytest.MarkDecorator:
    """Repeat a test for each of these settings, by their names."""
    return pytest.mark.parametrize("setting", settings, ids=lambda setting: setting.name)
