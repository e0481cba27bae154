"""Tables of settings, hashes and cost that the pages of studies and runs share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedbc_lightning.studies.run import as_word


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield key and value of every setting of a config, with full keys as the command line takes them.

    Example:
        >>> list(flat({"model": {"class_path": "m.M", "init_args": {"lr": 0.1}}, "seed": 1}))
        [('model', 'm.M'), ('model.lr', '0.1'), ('seed', '1')]
    """
    for key, value in content.items():
        full = f"{prefix}{key}"
        if isinstance(value, Mapping) and "class_path" in value:
            yield full, str(value["class_path"])
            yield from flat(value.get("init_args") or {}, f"{full}.")
        elif isinstance(value, Mapping) and value:
            yield from flat(value, f"{full}.")
        else:
            yield full, as_word(value)


def megabytes(size: float) -> str:
    """Format bytes in MB.

    Example:
        >>> megabytes(4888000)
        '4.89'
    """
    return f"{size / 1e6:,.2f}"
