"""FedNova (Wang et al. 2020)."""

from __future__ import annotations

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.local import Engine
from fedbc_lightning.server import NormalizedAverage, ServerCallback
from fedbc_lightning.server.aggregation import Weighting


class FedNova(FederatedAlgorithm):
    """FedNova: the server takes the mean of updates per step, so clients that take more steps weigh no more.

    Problem:
        min_w Σ (n_i / n) f_i(w), without FedAvg's bias to clients with many steps.

    Update::

        client    w_i ← E epochs, K_i steps, of the user's SGD from z
        server    z ← z − τ Σ p_i (z − w_i) / a_i,    τ = Σ p_i a_i,    p_i = n_i / Σ_{j ∈ S_t} n_j
                  a_i = K_i,    with momentum ρ:  a_i = (K_i − ρ (1 − ρ^K_i) / (1 − ρ)) / (1 − ρ)

    State:
        The method keeps no state.
    Communication:
        The server sends z; each client sends w_i, n_i and K_i.
    Partial work:
        The partial work of stragglers is used, for K_i is what they have done; a client without any step has no part.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        Where all K_i are equal it is FedAvg.
    Departures:
        p_i are the shares of the sampled clients that took a step. τ is the paper's default; the server's momentum
        (slow momentum) is left out. Schedulers, clipping, Nesterov's momentum and other optimizers are refused, for
        which a_i is another, and layers that are frozen in some of a client's steps, which have an a_i of their own.

    References:
        Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
        Algorithm 1, equations 8 and 9.

    Args:
        weighting: Weights p_i: ``"samples"`` takes n_i / Σ n_j, ``"uniform"`` takes 1 / S.

    Raises:
        ConfigurationError: The weighting is unknown, or the clients' optimizer is another than SGD.
    """

    def __init__(self, weighting: Weighting = "samples") -> None:
        self.weighting: Weighting = weighting
        self.scalars_up = 1 + int(weighting == "samples")  # K_i, n_i

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean of normalised updates."""
        # d_i = (z − w_i) / K_i and τ_eff = Σ p_i K_i are formed by the server, which knows every K_i from the rows of
        # the round.
        return [NormalizedAverage(by=self.weighting)]
