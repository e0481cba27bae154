"""The command line of one run: experiments from YAML files, checked before they start.

:class:`FederatedCLI` is Lightning's CLI with our sections. It is imported when it is first asked for: its parts that
read the words of a command line import neither torch nor Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbc_lightning.cli.federated import FederatedCLI

__all__ = ["FederatedCLI"]


def __getattr__(name: str) -> Any:
    if name == "FederatedCLI":
        from fedbc_lightning.cli.federated import FederatedCLI

        return FederatedCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
