"""What a federation is made from: the schedulers of rounds, the engine's kind, and the declared state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_info

from fedbc_lightning.algorithms import FederatedAlgorithm
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.engines import choice
from fedbc_lightning.engines.base import BaseEngine, no_kept_parameters
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.federation.participation import Participation
from fedbc_lightning.module.adapter import UserModule
from fedbc_lightning.module.schedulers import RoundSchedulers, check_schedules, configure
from fedbc_lightning.server import ServerCallback
from fedbc_lightning.server.arrived_updates import ArrivedUpdates
from fedbc_lightning.state import ParameterLayout, StateDeclaration

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def round_schedulers(user: UserModule, local: LocalTraining, participation: Participation) -> RoundSchedulers:
    """Return the user's schedulers that step once per round, and check those that step inside clients.

    Args:
        user: The user's module, moved and converted.
        local: The local training that every client is asked for.
        participation: Draws the participants of rounds.

    Raises:
        ConfigurationError: The optimizer is not one that can be used, or schedulers cannot go on in later rounds.
    """
    first = configure(user)
    schedule = RoundSchedulers(first.optimizer, first.round_schedulers)
    if local.schedule_rounds is not None:
        limits = local.limits(participation.most_batches)
        check_schedules(user, limits["max_epochs"], limits["estimated_stepping_batches"])
    return schedule


def show_largest_client(user: UserModule, local: LocalTraining, participation: Participation) -> None:
    """Show the module the largest client's counts: outside of clients, ``self.trainer`` has these.

    ``configure_optimizers`` sees them, too, when it is called to learn its form.
    """
    num_batches = participation.most_batches
    limits = local.limits(num_batches)
    if local.schedule_rounds is None:
        limits["max_epochs"] = local.epochs or 1
    user.shim.set(**limits, num_training_batches=num_batches, current_client=None, training=False)


def check_kept_parameters(algorithm: FederatedAlgorithm, layout: ParameterLayout, num_heldout: int) -> None:
    """Say which parameters stay with each client, and by what such a run is judged.

    Raises:
        ConfigurationError: The method cannot leave a part of the model with each client.
    """
    if not algorithm.takes_local_parameters:
        raise no_kept_parameters(str(algorithm))
    if num_heldout:
        raise ConfigurationError(
            "data.heldout_clients: a client that never trains has no part of its own, so z cannot be measured on it; "
            "leave out heldout_clients or trainer.local_parameters."
        )
    names = [entry.name for entry in layout.kept_entries]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    rank_zero_info(
        f"trainer.local_parameters: {layout.num_kept:,} of {layout.num_parameters + layout.num_kept:,} parameters stay "
        f"with each client ({shown}). No model is everyone's then, so there is no accuracy/global: judge by "
        "accuracy/local."
    )


def choose_engine(
    fabric: Fabric, bench: Workbench, algorithm: FederatedAlgorithm, participation: Participation
) -> choice.Kind:
    """Choose an engine by the number of clients that a process is expected to train in a round."""
    # Not by a sample: a Poisson sampler's first round has a random number of clients, which depends on the seed.
    return choice.choose(bench, algorithm, participation.num_sampled // fabric.world_size)


def declare_state(
    algorithm: FederatedAlgorithm, parts: Sequence[ServerCallback], engine: BaseEngine, num_sampled: int
) -> StateDeclaration:
    """Let the method and its server parts declare what they keep, and check that the parts go together.

    Raises:
        ConfigurationError: A part refuses the engine or the method, no part forms z, or one reads what nobody keeps.
    """
    declaration = StateDeclaration()
    for part in parts:
        part.declare_state(declaration)
        part.check(engine, num_sampled)
    # After the parts: a composed method checks that its terms find what the parts declare.
    algorithm.declare_state(declaration)
    if not any(part.forms_z for part in parts):
        raise ConfigurationError(
            f"algorithm: {type(algorithm).__name__}.server_callbacks has no part that forms z; add e.g. "
            "WeightedAverage (a part of your own sets forms_z = True)."
        )
    waiting = [part for part in parts if isinstance(part, ArrivedUpdates)]
    if waiting and algorithm.buffer_size is None:
        raise ConfigurationError(
            f"algorithm: {type(waiting[0]).__name__} takes updates that arrive from clients in training, but rounds "
            f"of {type(algorithm).__name__} wait for their clients; take FedBuff or FedAsync, or set buffer_size in a "
            "class of your own."
        )
    declared = {**declaration.client_scalars, **declaration.client_vectors}
    for part in parts:
        missing = [name for name in part.reads if name not in declared]
        if missing:
            raise ConfigurationError(
                f"algorithm: {type(part).__name__} reads the client state '{missing[0]}', which nothing "
                f"declares; there is: {', '.join(declared) or 'none'}."
            )
    return declaration
