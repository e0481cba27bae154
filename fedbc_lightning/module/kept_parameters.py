"""The parameters that stay with each client: names from the patterns of ``trainer.local_parameters``."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from fedbc_lightning.core.errors import ConfigurationError, nearest
from fedbc_lightning.core.private_torch import BatchNorm
from fedbc_lightning.core.text import shorten
from fedbc_lightning.state.declaration import BufferPolicy

# Word among the patterns that stands for the parameters of all BatchNorm layers
BATCH_NORM = "batch_norm"


def kept_names(module: nn.Module, patterns: Sequence[str], buffers: BufferPolicy) -> list[str]:
    """Return the names of the trainable parameters that stay with their client, in the module's order.

    Args:
        module: The user's module.
        patterns: Patterns of names as :mod:`fnmatch` reads them, or :data:`BATCH_NORM`.
        buffers: Policy for buffers; BatchNorm's statistics must stay with the client where its parameters do.

    Raises:
        ConfigurationError: A pattern fits no trainable parameter, nothing is left to share, or BatchNorm's statistics
            would not stay.
    """
    named = {name: p for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    layers = {name: child for name, child in module.named_modules() if isinstance(child, BatchNorm)}
    norms = {f"{prefix}.{name}".lstrip(".") for prefix, child in layers.items() for name, _ in child.named_parameters()}
    # Parameters, not names: a tied parameter has several names, and stays with the client if one of them fits.
    kept = set()
    for pattern in patterns:
        names = [name for name in named if (name in norms if pattern == BATCH_NORM else fnmatchcase(name, pattern))]
        if not names:
            near = nearest(pattern.replace("*", ""), named)
            hint = f"did you mean '{near}'?" if near else f"give names, patterns such as 'head.*', or {BATCH_NORM}."
            shown = shorten([*named], 12)
            raise ConfigurationError(
                f"trainer.local_parameters: '{pattern}' fits no trainable parameter; {hint} The parameters: {shown}."
            )
        kept |= {named[name] for name in names}
    if BATCH_NORM in patterns and buffers != "local" and any(child.track_running_stats for child in layers.values()):
        raise ConfigurationError(
            f"trainer.local_parameters: {BATCH_NORM} keeps BatchNorm's weights with each client, so its running mean "
            f"and variance must stay, too; set trainer.buffers: local (it is {buffers})."
        )
    if kept and len(kept) == len(set(named.values())):
        raise ConfigurationError(
            f"trainer.local_parameters: {', '.join(patterns)} fits all {len(kept)} parameters, so nothing would be "
            "shared; leave out those that the clients share, or take the algorithm Local."
        )
    return [name for name, p in module.named_parameters() if p in kept]
