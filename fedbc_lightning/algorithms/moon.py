"""MOON (Li et al. 2021)."""

from __future__ import annotations

from typing import Any

from fedbc_lightning.algorithms.fedavg import FedAvg
from fedbc_lightning.core.checks import NotNegative, Positive
from fedbc_lightning.local import Engine, ModelContrast
from fedbc_lightning.state import Cohort, ServerState, StateDeclaration


class MOON(FedAvg):
    """MOON: FedAvg whose clients keep their features near those of z, and away from those of their own last model.

    Problem:
        min_w Σ (n_i / n) f_i(w), under less drift of the features that the clients learn.

    Update::

        client    w_i ← E epochs of the user's optimizer from z, on each batch's loss plus the mean over its samples of
                  μ l_con,    l_con = −log( exp(s(h, h_z) / τ) / (exp(s(h, h_z) / τ) + exp(s(h, h_i) / τ)) )
                  h, h_z, h_i: features of a sample by w, by z and by x_i; s: cosine similarity;  then  x_i ← w_i
        server    z ← Σ p_i w_i,    p_i = n_i / Σ_{j ∈ S_t} n_j

    State:
        Each client keeps x_i ``local_model`` (N, d + b), its last w_i.
    Communication:
        The server sends z; each client sends w_i and n_i.
    Partial work:
        The partial work of stragglers is dropped, as in FedAvg.
    Local model:
        A client's own model is x_i.
    Degenerate cases:
        μ = 0 is FedAvg.
    Departures:
        x_i of a client that has not trained yet is z⁰. In round 1 the term is then constant, as it is in the authors'
        code, which has no x_i there; a client that comes later is pushed from z⁰, in the authors' code from random
        weights of its own. z and x_i give features in evaluation mode, as there. ``training_step`` runs three times per
        batch, twice of them only up to the layer of the features. The vectorized engine refuses the method.

    References:
        Li et al. 2021, "Model-Contrastive Federated Learning", equations 3 and 4, Algorithm 1.

    Args:
        features: Name of the layer whose output is the features, as in ``model.named_modules()``: the paper's is a
            projection head before the last layer. ``training_step`` calls it once; outputs are flattened to (n, ...).
        mu: Weight μ ≥ 0 of the term. The paper's grid is 0.1, 1, 5, 10.
        temperature: Temperature τ > 0.
        **fedavg: The other arguments of FedAvg.

    Raises:
        ConfigurationError: A value is out of range, or the model has no such layer.
    """

    has_local_model = True

    def __init__(self, features: str, mu: NotNegative = 1.0, temperature: Positive = 0.5, **fedavg: Any) -> None:
        super().__init__(**fedavg)
        self.features, self.mu, self.temperature = features, mu, temperature

    def check(self, engine: Engine) -> None:
        """Raise a ConfigurationError if the model has no such layer, or the engine cannot read its output."""
        engine.check_layer("MOON", self.features)

    def declare_state(self, state: StateDeclaration) -> None:
        """Declare x_i."""
        state.client_model("local_model")

    def client_update(self, engine: Engine, cohort: Cohort, server: ServerState) -> None:
        """Train from z with the contrastive term, and keep the result as x_i."""
        # The negative pair is the client's model of its last round, z⁰ if it had none, as in Algorithm 1.
        contrast = ModelContrast(self.mu, self.temperature, self.features, cohort["local_model"])
        engine.solve(cohort, start=server.model, contrast=contrast)
        cohort.stage("local_model", cohort.model)
