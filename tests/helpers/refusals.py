"""What tests expect of a refusal."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedbc_lightning.core.errors import ConfigurationError


@contextmanager
def refused(match: str | None = None) -> Iterator[pytest.ExceptionInfo]:
    """Expect a ConfigurationError of one line, in which the pattern is found."""
    with pytest.raises(ConfigurationError, match=match) as error:
        yield error
    assert "\n" not in str(error.value)
