"""The hyper-parameters of a run, which its checkpoints hold, so that a resumed run can compare them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.run.run import Run


def hyper_parameters(run: Run) -> dict[str, Any]:
    """Return the hyper-parameters of a run under dotted names, to compare them on resume."""
    described = {
        **_flat("trainer", run.settings.compared()),
        "trainer.engine": run.federation.engine_kind,  # the choice of ``auto``, which a resumed run keeps
        "seed": run.seed,
        "data.batch_size": run.datamodule.batch_size,
        **_flat("algorithm", vars(run.federation.algorithm)),
        **_flat("model", dict(run.user.module.hparams)),
    }
    return plain_values(described, tensors=False)


def class_names(run: Run) -> dict[str, Any]:
    """Return the names of a run's classes: method, model and data."""
    parts = {"algorithm": run.federation.algorithm, "model": run.user.module, "data": run.datamodule.users_module}
    return {name: type(part).__name__ for name, part in parts.items()}


def refuse_other_seed(saved: dict[str, Any], seed: int, path: Path | None) -> None:
    """Raise if a run would resume with another seed than that with which it began.

    Raises:
        ConfigurationError: The seeds differ.
    """
    if saved.get("seed", seed) != seed:
        raise ConfigurationError(
            f"seed: '{path}' was trained with {saved['seed']}, {seed} is given now, so that the run would not go on as "
            f"if never stopped; give seed {saved['seed']} (seed_everything), or say other_seed: true."
        )


def warn_of_other_settings(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Warn of every hyper-parameter that differs between a checkpoint and the run that resumes from it."""
    for name in sorted({*saved, *current}):
        # Another version of this package may lack an option of the trainer, or call it by another name.
        is_known = not name.startswith("trainer.") or (name in saved and name in current)
        if is_known and saved.get(name) != current.get(name):
            warnings.warn(
                f"{name} was {saved.get(name)} when the checkpoint was written and is {current.get(name)} now; "
                "the run goes on with the new value.",
                stacklevel=2,
            )


def plain_values(values: dict[str, Any], *, tensors: bool = True) -> dict[str, Any]:
    """Keep the entries that a checkpoint may hold: numbers, strings, tensors (if wanted), and containers of these."""

    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(map(is_plain, value.values()))
        if isinstance(value, (list, tuple)):
            return all(map(is_plain, value))
        return value is None or type(value) in (bool, int, float, str) or (tensors and type(value) is Tensor)

    return {name: value for name, value in values.items() if is_plain(value)}


def _flat(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested objects, lists and dicts into dotted names; an object also gives the name of its class."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}.{name}"
        if name.startswith("_"):
            continue
        if isinstance(value, (list, tuple)) and any(map(_has_parts, value)):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict) and any(map(_has_parts, value.values())):
            flat |= _flat(key, value)
        elif _has_parts(value):
            flat |= {key: type(value).__name__, **_flat(key, vars(value))}
        else:
            flat[key] = value
    return flat


def _has_parts(value: Any) -> bool:
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor)
