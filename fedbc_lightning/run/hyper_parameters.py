"""The hyper-parameters of a module, as checkpoints and tables hold them: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.core.storable import find_unreadable, plain_copy, plain_values


def kept_hparams(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as checkpoints hold them: plain values; what cannot be read is left out."""
    plain = plain_copy(dict(hparams))
    # To try whether torch reads a value takes time, so plain ones are not tried.
    return {name: value for name, value in plain.items() if plain_values({name: value}) or not find_unreadable(value)}


def say_what_is_left_out(module: LightningModule) -> None:
    """Print which hyper-parameters checkpoints lack or hold as another value, so that a loaded model has another."""
    kept = kept_hparams(module.hparams)
    lacking = [name for name in module.hparams if name not in kept]
    other = [name for name, value in kept.items() if not _is_same(value, module.hparams[name])]
    for names, what in ((lacking, "leave out"), (other, "hold as plain numbers, strings, tensors or dicts")):
        if names:
            rank_zero_info(
                f"model: checkpoints {what} the hyper-parameters {', '.join(names)}, because torch reads them without "
                f"running code. Where __init__ needs the objects: load_from_checkpoint(path, {names[0]}=...)."
            )


def _is_same(plain: Any, value: Any) -> bool:
    with suppress(Exception):  # several elements of arrays
        return bool(plain == value)
    return isinstance(value, Tensor)


def flat(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested objects, lists and dicts into dotted names; an object also gives the name of its class."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if name.startswith("_"):
            continue
        if isinstance(value, (list, tuple)) and any(map(_has_parts, value)):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict) and any(map(_has_parts, value.values())):
            found |= flat(key, value)
        elif _has_parts(value):
            found |= {key: type(value).__name__, **flat(key, vars(value))}
        else:
            found[key] = value
    return found


def _has_parts(value: Any) -> bool:
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor)
