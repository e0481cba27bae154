"""Numbers in YAML as jsonargparse reads them: 1e-3 is one, as in YAML 1.2, which PyYAML takes for a text."""

from __future__ import annotations

import re
from typing import Any

import yaml

_FLOAT = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Dumper(yaml.SafeDumper):
    """A safe dumper that writes a text such as 1e-3 in quotes."""


_Dumper.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))


def dump(value: Any, **options: Any) -> str:
    r"""Return a value as YAML, in which texts that look like numbers are quoted.

    Args:
        value: Plain values, lists and mappings.
        **options: Options of ``yaml.dump``.

    Example:
        >>> dump(["1e-3", 0.001], default_flow_style=True)
        "['1e-3', 0.001]\n"
    """
    return str(yaml.dump(value, Dumper=_Dumper, **options))
