"""Numbers in YAML as jsonargparse reads them: 1e-3 is one, as in YAML 1.2, which PyYAML takes for a text."""

from __future__ import annotations

import re

import yaml

_FLOAT = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


class NumbersLoader(yaml.SafeLoader):
    """A safe loader that reads 1e-3 as a number."""


for _of_exponents in (NumbersLoader, yaml.SafeDumper):  # the dumper writes a text that looks like a number in quotes
    _of_exponents.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))
