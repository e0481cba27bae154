"""q-FedAvg (Li et al. 2020)."""

from __future__ import annotations

from typing import Literal

import torch

from fedbc_lightning.algorithms.base import FederatedAlgorithm
from fedbc_lightning.core.checks import NotNegative, Positive
from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.local import Engine
from fedbc_lightning.server import FairStep, ServerCallback, WeightedAverage
from fedbc_lightning.state import Cohort, ServerState


class QFedAvg(FederatedAlgorithm):
    """q-FedAvg: clients with a high loss count more, so that accuracies are more even.

    Problem:
        min_w Σ p_i f_i(w)^{q+1} / (q + 1).

    Update::

        client    F_i = f_i(z) on its training data;  w_i ← E epochs from z;  Δw_i = L (z − w_i),  L = 1/η
                  Δ_i = F_i^q Δw_i,    h_i = q F_i^{q−1} ‖Δw_i‖² + L F_i^q
        server    z ← z − Σ Δ_i / Σ h_i

    State:
        The method keeps no state.
    Communication:
        The server sends z; each client sends Δ_i and h_i, and in the public style also n_i.
    Partial work:
        The partial work of stragglers is used.
    Local model:
        A client's own model is its last w_i.
    Degenerate cases:
        q = 0 is FedAvg with uniform weights (in the public style, with the weights n_i) if all clients have the same η,
        or ``lipschitz`` is given.
    Departures:
        F_i is computed in evaluation mode (no dropout), and 1e-10 is added to it. With a scheduler, η is the mean of
        the step sizes. The FedBC authors' code weights both sums by n_i and has ‖z − w_i‖² in h_i, without L²: that is
        ``style="public"``. Its z moves much faster for large q and many local steps. Buffers are averaged uniformly.

    References:
        Li et al. 2020, "Fair Resource Allocation in Federated Learning", Algorithm 2.

    Args:
        q: Fairness parameter q ≥ 0. The paper's grid is 0.001 to 15, the FedBC paper's 0.001 to 5.
        lipschitz: Lipschitz constant L; None takes 1/η of the user's optimizer. After many local steps K,
            ‖L (z − w_i)‖² then dominates h_i and z hardly moves unless q is tiny; give an L of about 1 / (η K).
        style: ``"paper"``, or ``"public"`` for the step of the FedBC authors' code, see the departures.

    Raises:
        ConfigurationError: A value is out of range, there are several parameter groups without ``lipschitz``, or a loss
            is negative.
    """

    def __init__(
        self, q: NotNegative = 1.0, lipschitz: Positive | None = None, style: Literal["paper", "public"] = "paper"
    ) -> None:
        self.q, self.lipschitz, self.style = q, lipschitz, style
        self.scalars_up = 2 if style == "public" else 1  # h_i, and n_i

    def check(self, engine: Engine) -> None:
        """Raise a ConfigurationError without losses, or without ``lipschitz`` for several parameter groups."""
        engine.check_losses("q-FedAvg")
        if self.lipschitz is None and len(engine.layout.group_parts) > 1:
            raise ConfigurationError(
                "algorithm.lipschitz: the model's optimizer has several parameter groups, so 1/η is not one number; "
                "give it."
            )

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Compute the loss at z, then train from z by default local training.

        Raises:
            ConfigurationError: A loss is negative and q > 0.
        """
        # F_k(z)^q weighs the client by its loss before training, over all of its data: one more pass.
        loss = engine.train_loss(cohort, server.model)
        if self.q and bool((loss < 0).any()):
            client = cohort.ids[int(loss.argmin())]
            raise ConfigurationError(
                f"algorithm.q: client {client} has the loss {loss.min():.3g} at z, and q-FedAvg takes powers of "
                "losses; use one that is never negative."
            )
        cohort.messages["loss_at_z"] = loss
        engine.solve(cohort, start=server.model)
        # behind the training, which marks the clients whose results are not finite
        cohort.valid &= torch.isfinite(loss)

    def server_callbacks(self, engine: Engine) -> list[ServerCallback]:
        """Return the mean, of which the buffers are kept, and the fair step."""
        return [WeightedAverage(by="uniform"), FairStep(self.q, self.lipschitz, self.style)]
