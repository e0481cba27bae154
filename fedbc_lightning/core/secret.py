"""The secret of a private run: settings say where it is read, so that no file of the run can hold it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbc_lightning.core.errors import ConfigurationError

NAME = "trainer.privacy.secret"
HOW = "give env:NAME, an environment variable, or file:PATH, a file, that holds a long random text"


def check_source(source: str) -> None:
    """Refuse a secret that is given as text, and do not repeat it.

    Raises:
        ConfigurationError: It is not ``env:NAME`` or ``file:PATH``, or nothing for no secret.
    """
    if source and not source.startswith(("env:", "file:")):
        raise ConfigurationError(f"{NAME}: a secret given as text would be written into the run's files; {HOW}.")


def check_settings(settings: Any, key: str = "") -> None:
    """Refuse settings of a run or of a study, at any depth, that hold a run's secret as text; others' are their own.

    Args:
        settings: The settings, or a value among them.
        key: Key of ``settings``, with a dot between each two parts.

    Raises:
        ConfigurationError: They hold one; the message does not repeat it.

    Example:
        >>> check_settings({"model.secret": "mine", "overrides": {"trainer.privacy": {"secret": "env:SECRET"}}})
        >>> check_settings({"variants": {"a": {"trainer.sampler": {"init_args": {"secret": "correct horse"}}}}})
        Traceback (most recent call last):
        fedbc_lightning.core.errors.ConfigurationError: trainer.privacy.secret: a secret given as text would be ...
    """
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            check_settings(value, f"{key}.{name}")
    elif isinstance(settings, (list, tuple)):
        for value in settings:
            check_settings(value, key)
    elif isinstance(settings, str) and re.search(r"\btrainer\.(privacy|sampler)(\.init_args)?\.secret$", key):
        check_source(settings)


def read_secret(source: str) -> bytes:
    """Read the secret. That is done at each use, so that there is no object from which something could print it.

    Args:
        source: ``env:NAME`` or ``file:PATH``, or nothing for no secret.

    Raises:
        ConfigurationError: It is neither, or nothing can be read there.
    """
    check_source(source)
    kind, _, name = source.partition(":")
    if not source:
        return b""
    try:
        found = (os.environ.get(name, "").encode() if kind == "env" else Path(name).expanduser().read_bytes()).strip()
    except OSError as error:
        raise ConfigurationError(f"{NAME}: '{name}' cannot be read ({error.strerror}).") from None
    if not found:
        raise ConfigurationError(f"{NAME}: {source} is empty, or is not there in every process of the run; {HOW}.")
    return found


def hash_of_secret(source: str) -> str:
    """Return a hash by which a resumed run knows its secret; 50 ms and 16 MiB make guesses of a short one dear."""
    found = read_secret(source)
    return hashlib.scrypt(found, salt=NAME.encode(), n=2**14, r=8, p=1, dklen=8).hex() if found else ""
