"""What a run's checkpoints contain."""

from __future__ import annotations

from typing import Any

import lightning
from torch import Tensor

from fedbc_lightning.core.private_lightning import hparams_name
from fedbc_lightning.core.storable import plain_copy
from fedbc_lightning.federation.checkpoint_content import module_state_of, set_by_hooks, state_of
from fedbc_lightning.module.monitors import logged_only
from fedbc_lightning.run.hyper_parameters import kept_hparams
from fedbc_lightning.run.run import Run
from fedbc_lightning.state import checkpoint


def run_checkpoint(run: Run, states: dict[str, Any], num_rows: dict[str, int], *, is_last: bool) -> dict[str, Any]:
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
            "settings": run.compared,
            "identity": run.identity.content(),
            "rows": num_rows,
            "federation": state_of(run.federation, is_last=is_last) | states[checkpoint.KEY],
            **({"frozen": frozen} if frozen else {}),
        },
    }
    content = lightning_checkpoint(run, module_state_of(run.federation, with_frozen=not is_last), ours)
    run.hooks.call_callbacks("on_save_checkpoint", content)
    return content


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
    return content
