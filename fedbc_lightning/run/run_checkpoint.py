"""What a run's checkpoints contain, and the hyper-parameters among it that a resumed run compares."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import lightning
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedbc_lightning.core.private_lightning import hparams_name
from fedbc_lightning.core.storable import find_unreadable, plain_copy, plain_values
from fedbc_lightning.federation.checkpoint_content import module_state_of, set_by_hooks, state_of
from fedbc_lightning.module.monitors import logged_only
from fedbc_lightning.run.run import Run
from fedbc_lightning.state import checkpoint


def run_checkpoint(
    run: Run, hyper_parameters: dict[str, Any], states: dict[str, Any], num_rows: dict[str, int], *, is_last: bool
) -> dict[str, Any]:
    """Return the content of a checkpoint that resumes a run, see :meth:`Recorder.checkpoint`.

    ``last.ckpt`` holds hashes in place of the large frozen parameters; other checkpoints hold the whole model.
    """
    # A frozen language model would be written again in every checkpoint of a run that trains an adapter of a thousandth
    # of its size; the same weights are loaded again when the run resumes, and the hashes prove that they are the same.
    frozen = run.federation.layout.frozen.hashes() if is_last else {}
    ours: dict[str, Any] = {
        **states,
        checkpoint.KEY: {
            "format": checkpoint.FORMAT,
            "round": run.progress.finished_round,
            "max_rounds": run.settings.max_rounds,
            "should_stop": run.progress.should_stop,
            # Times differ from run to run; a resumed run's checkpoint is to equal that of one that never stopped.
            "callback_metrics": {
                name: float(v)
                for name, v in logged_only(run.progress.callback_metrics).items()
                if not name.startswith("time/")
            },
            "settings": hyper_parameters,
            "rows": num_rows,
            "federation": state_of(run.federation, is_last=is_last) | states[checkpoint.KEY],
            **({"frozen": frozen} if frozen else {}),
        },
    }
    content = lightning_checkpoint(run, module_state_of(run.federation, with_frozen=not is_last), ours)
    run.hooks.call_callbacks("on_save_checkpoint", content)
    return plain_copy(content)  # the entries of module and callbacks may hold NumPy's numbers


def states_of_users(run: Run) -> dict[str, Any]:
    """What callbacks and the user's data module want to keep, under Lightning's keys, and what hooks have set.

    Callbacks stand by ``state_key`` under ``callbacks``, the data module under the name of its class; only those that
    have any state.
    """
    callbacks = {callback.state_key: callback.state_dict() for callback in run.hooks.callbacks}
    data = run.datamodule.users_module
    states = {"callbacks": {key: state for key, state in callbacks.items() if state}}
    states |= {type(data).__qualname__: state for state in (data.state_dict(),) if state}
    states[checkpoint.KEY] = {"set_by_hooks": set_by_hooks(run.federation)} if run.federation.bench.has_hooks else {}
    return {key: plain_copy(state, is_snapshot=True) for key, state in states.items()}


def lightning_checkpoint(run: Run, state: dict[str, Tensor], ours: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint that ``MyModule.load_from_checkpoint`` reads.

    Args:
        run: Run whose round and module are written.
        state: State dict of the module.
        ours: Additional entries, which Lightning ignores.
    """
    module = run.user.module
    content: dict[str, Any] = {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": run.progress.finished_round,
        "global_step": run.progress.finished_round,
        "state_dict": state,
        **ours,
    }
    if module.hparams:
        content[module.CHECKPOINT_HYPER_PARAMS_NAME] = hparams_name(module)
        content[module.CHECKPOINT_HYPER_PARAMS_KEY] = kept_hparams(module.hparams)
    module.on_save_checkpoint(content)
    return plain_copy(content)


def hyper_parameters(run: Run) -> dict[str, Any]:
    """Return the hyper-parameters of a run under dotted names, to compare them on resume."""
    described = {
        **_flat("trainer", run.settings.compared()),
        "trainer.engine": run.federation.engine_kind,  # the choice of ``auto``, which a resumed run keeps
        "seed": run.seed,
        "data.batch_size": run.datamodule.batch_size,
        **_flat("algorithm", vars(run.federation.algorithm)),
        **_flat("model", kept_hparams(run.user.module.hparams_initial)),  # hooks of rounds may change the others
    }
    return plain_values(described)


def class_names(run: Run) -> dict[str, Any]:
    """Return the names of a run's classes: method, model and data."""
    parts = {"algorithm": run.federation.algorithm, "model": run.user.module, "data": run.datamodule.users_module}
    return {name: type(part).__name__ for name, part in parts.items()}


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
