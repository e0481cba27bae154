"""FedBuff (Nguyen et al. 2022)."""

from __future__ import annotations

from fedbc_lightning.algorithms.base import FederatedAlgorithm, PartialWork
from fedbc_lightning.core.checks import Count, FiniteNotNegative, Positive
from fedbc_lightning.local import Engine
from fedbc_lightning.server import BufferedUpdates, ServerCallback, Staleness
from fedbc_lightning.server.arrived_updates import StalenessKind


class FedBuff(FederatedAlgorithm):
    """FedBuff: clients train asynchronously, and the server takes a step for every K updates that have arrived.

    Problem:
        min_w Σ f_i(w) / N: one model for all clients, without waiting for slow ones.

    Update::

        client    starts from the present z as soon as one of the S places is free,  w_i ← E epochs from z,
                  and sends Δ_i = w_i − z when its time on the simulated clock is over
        server    for every K updates that arrive:  z ← z + η_s / K Σ s(τ_i) Δ_i
                  τ_i: updates of z since client i started,    s(τ) = (1 + τ)^−a,  a = 1/2

    State:
        Each client keeps the update that it has on its way, and the version of z from which it started. A round is one
        update of z. S is the trainer's ``clients_per_round``, the number of clients in training at a time;
        ``trainer.system`` says how long each takes, and without it every local step takes one second.
    Communication:
        The server sends z to a client that starts; a client that arrives sends Δ_i.
    Partial work:
        There is none: nobody waits, so deadlines and stragglers are refused; slow clients are those of
        ``trainer.system``.
    Local model:
        A client's own model is its last w_i, from its start on.
    Degenerate cases:
        With equal speeds, K = S and η_s = 1, every update is fresh, and it is FedAvg with uniform weights.
    Departures:
        A client starts at most once from one version of z, and arrivals at the same time count before anybody starts.
        The paper's clients train for a number of steps, and may be in flight more than once. A client whose weights
        become NaN or infinite arrives with nothing, and the mean is that of the others. Buffers such as BatchNorm's are
        not stepped but mixed, so that a variance stays one.

    References:
        Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", Algorithm 1.

    Args:
        buffer_size: Number K ≥ 1 of updates that the server waits for; the paper takes 10.
        server_lr: Step size η_s > 0 of the server.
        staleness: Weight of an update by its staleness: ``"polynomial"`` (1 + τ)^−a, which is the paper's with a = 0.5,
            ``"constant"`` 1, or ``"hinge"``, see :class:`~fedbc_lightning.server.Staleness`.
        staleness_a: Exponent or slope a ≥ 0.
        staleness_b: Staleness b ≥ 0 from which on a hinge falls.

    Raises:
        ConfigurationError: A value is out of range.
    """

    scalars_up = 0
    partial_work: PartialWork = "refused"

    def __init__(
        self,
        buffer_size: Count = 10,
        server_lr: Positive = 1.0,
        staleness: StalenessKind = "polynomial",
        staleness_a: FiniteNotNegative = 0.5,
        staleness_b: FiniteNotNegative = 4.0,
    ) -> None:
        self.buffer_size, self.server_lr = buffer_size, server_lr
        # s(τ) = (1 + τ)^(−1/2), a polynomial with a = 0.5, is the weight of the paper.
        self.staleness = Staleness(staleness, staleness_a, staleness_b)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean of the updates that arrive."""
        return [BufferedUpdates(self.server_lr, self.staleness)]
