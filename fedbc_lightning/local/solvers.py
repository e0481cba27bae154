"""Solvers: local training whose steps a method defines itself, with gradients of the user's ``training_step``.

A solver works on K clients at once: ``client.w`` and gradients are (K, d), numbers per client are (K, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedbc_lightning.core.devices import upload
from fedbc_lightning.core.local_training import LocalTraining
from fedbc_lightning.local.terms import Term


class Client(Protocol):
    """One client, or K clients with equally many steps, in the steps of a :class:`~fedbc_lightning.local.Solver`.

    Attributes:
        client: Index of the client.
        local: The local training that the trainer asks for.
        w: (K, d) iterate, which a solver writes; K = 1 unless the solver can train several clients at once.
        num_steps: Number of steps taken so far.
        num_batches: Number of batches per epoch.
    """

    client: int
    local: LocalTraining
    w: Tensor
    num_steps: int
    num_batches: int

    @property
    def rates(self) -> Tensor:
        """The user's current learning rates: (1, 1), or (1, d) if they differ between parameters."""

    @property
    def num_components(self) -> int:
        """Number m of fixed batches into which the client's data is cut."""

    def next_batch(self) -> Any:
        """Return the next batch of the client's shuffled data; a new epoch starts whenever one ends."""

    def gradient(self, w: Tensor, batch: Any) -> Tensor:
        """Return the mini-batch gradient g_i(w; batch), (K, d), including the terms."""

    def loss_and_gradient(self, w: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss at w and its gradient (K, d), both including the terms."""

    def same_draws(self) -> None:
        """Reset the random generators to this step's seed: call it before each of several comparable evaluations."""

    def trial_loss(self, w: Tensor, batch: Any) -> Tensor:
        """Return the loss at w including the terms, with the draws of :meth:`same_draws`; buffers are restored."""

    def component_gradient(self, w: Tensor, index: int) -> Tensor:
        r"""Return ∇f_ij(w), (1, d), of the fixed batch j = `index`; the plain mean over all j is ∇f_i(w)."""

    def full_gradient(self, w: Tensor) -> Tensor:
        """Return ∇f_i(w), (1, d), over all of the client's data."""

    def rng(self, purpose: str, *, of_client: bool = True) -> np.random.Generator:
        """Return a generator that depends on (seed, purpose, round), and on the client if ``of_client`` is True."""


class Solver:
    """Base class of solvers.

    One object may train several clients in turn, so set what lasts over one client's steps in :meth:`begin`.

    Attributes:
        takes_terms: Whether the solver may be combined with gradient terms.
        uses_lr: Whether the user's learning rate is the size of its steps.
        batches_per_step: Largest number of batches that one :meth:`step` draws.
        one_by_one: The reason why the solver cannot train several clients at once; empty if it can.
    """

    uses_lr = False

    takes_terms = True

    batches_per_step = 1

    one_by_one = ""

    def num_steps(self, client: Client) -> int:
        """Return how often :meth:`step` is called; by default, the number of steps of default local training."""
        return client.local.num_steps(client.num_batches)

    def begin(self, client: Client) -> None:
        """Prepare for a client before its first step; ``client.w`` is the start point."""

    def step(self, client: Client) -> None:
        """Take one step: draw batches with ``client.next_batch()``, compute gradients and write ``client.w``."""
        raise NotImplementedError

    def end(self, client: Client) -> None:
        """Finish a client after its last step; ``client.w`` at the end of this call is w_i."""


class ModelAgnostic(Solver):
    """Takes steps of model-agnostic meta-learning, which seek a w whose loss is low after a few steps of size α.

    Each step is::

        w' ← w;  J times  w' ← w' − α (g_i(w'; b_j) + inner terms at w')
        w ← w − β g_i(w'; b_{J+1})                                                     (first order)
        w ← w − β [v − α (g_i(w + εv; b_{J+2}) − g_i(w − εv; b_{J+2})) / (2ε)],  v = g_i(w'; b_{J+1})   (Hessian-free)

    with ε = 1e-3 / max(1, ‖v‖). Every b_k is the next batch of the client's epochs.

    Args:
        inner_lr: Step size α of the inner steps.
        outer_lr: Step size β of the outer step.
        num_inner_steps: Number of inner steps J.
        hessian_free: Whether to take the Hessian-free form; for J = 1 it is the exact gradient up to O(ε²).
        inner_terms: Terms that are added to the inner gradients only.

    References:
        Fallah et al. 2020, "Personalized Federated Learning: A Meta-Learning Approach", Algorithm 1.
    """

    EPSILON = 1e-3

    def __init__(
        self,
        inner_lr: float,
        outer_lr: float,
        num_inner_steps: int = 1,
        hessian_free: bool = False,
        inner_terms: Sequence[Term] = (),
    ) -> None:
        self.inner_lr, self.outer_lr, self.num_inner_steps = inner_lr, outer_lr, num_inner_steps
        self.hessian_free, self.inner_terms = hessian_free, inner_terms
        self.batches_per_step = num_inner_steps + 1 + hessian_free

    def step(self, client: Client) -> None:
        """Take J inner steps and one outer step."""
        w = client.w
        inner = w.clone()
        for _ in range(self.num_inner_steps):
            gradient = client.gradient(inner, client.next_batch())
            for term in self.inner_terms:
                term.add_gradient(gradient, inner)
            inner -= self.inner_lr * gradient
        outer = client.gradient(inner, client.next_batch())
        if self.hessian_free:
            epsilon = self.EPSILON / outer.norm(dim=1, keepdim=True).clamp(min=1.0)
            batch = client.next_batch()
            # Both gradients need the same dropout masks, since any other difference is divided by 2ε, too.
            client.same_draws()
            above = client.gradient(w + epsilon * outer, batch)
            client.same_draws()
            below = client.gradient(w - epsilon * outer, batch)
            # (I − α ∇²f) v by central differences: the error is O(ε²), and no autograd of second order is needed.
            outer = outer - self.inner_lr * (above - below) / (2 * epsilon)
        w -= self.outer_lr * outer


class MoreauEnvelope(Solver):
    """Takes the steps of pFedMe, in which θ descends on f_i + λ/2 ‖θ − w‖² and w moves towards θ.

    Each step, on one batch b, is::

        K times  θ ← θ − η_θ (g_i(θ; b) + λ (θ − w))
        w ← w − η λ (w − θ)

    θ starts at w in each round. η is the user's learning rate.

    Args:
        penalty: Strength λ of the pull towards w.
        personal_lr: Step size η_θ of θ.
        num_inner_steps: Number K of steps of θ per batch.

    Attributes:
        theta: (K, d) latest θ.
    """

    uses_lr = True

    def __init__(self, penalty: float, personal_lr: float, num_inner_steps: int) -> None:
        self.penalty, self.personal_lr, self.num_inner_steps = penalty, personal_lr, num_inner_steps
        self.theta = torch.empty(0)

    def begin(self, client: Client) -> None:
        """Set θ = w."""
        # pFedMe keeps no θ from round to round: Algorithm 1 solves the inner problem anew from the received w.
        self.theta = client.w.clone()

    def step(self, client: Client) -> None:
        """Take K steps of θ and one step of w on one batch."""
        batch, w, theta = client.next_batch(), client.w, self.theta
        for _ in range(self.num_inner_steps):
            theta -= self.personal_lr * (client.gradient(theta, batch) + self.penalty * (theta - w))
        w -= client.rates * self.penalty * (w - theta)


class Mixture(Solver):
    """Takes the steps of APFL, in which w descends on its own loss, and v on the loss of v̄ = αv + (1 − α)w.

    Each step, on one batch b, takes the old w and v on the right-hand sides::

        w ← w − η g_i(w; b),    v ← v − η α g_i(v̄; b)
        adaptive, first batch of the round:  α ← clip(α − η ⟨v − w, g_i(v̄; b)⟩, 0, 1)

    η is the user's learning rate. The new α is used from the second batch on.

    Args:
        v: (K, d) start value of v.
        mixture: (K, 1) start value of α.
        adaptive: Whether α is adapted.

    Attributes:
        v: (K, d) latest v.
        mixture: (K, 1) latest α.
    """

    uses_lr = True

    def __init__(self, v: Tensor, mixture: Tensor, adaptive: bool) -> None:
        self.v, self.mixture, self.adaptive = v.clone(), mixture.to(v), adaptive

    def step(self, client: Client) -> None:
        """Take one step of w and v on one batch, and one of α if it is the first batch."""
        batch, w, v, mixture, rates = client.next_batch(), client.w, self.v, self.mixture, client.rates
        of_w = client.gradient(w, batch)
        of_mixture = client.gradient(mixture * v + (1 - mixture) * w, batch)
        # The derivative of f_i(αv + (1 − α)w) by α is ⟨v − w, ∇f_i(v̄)⟩, from the gradient that v's step needs anyway.
        if self.adaptive and client.num_steps == 0:
            slope = (rates * (v - w) * of_mixture).sum(dim=1, keepdim=True)
            self.mixture = (mixture - slope).clamp(0, 1)
        w -= rates * of_w
        v -= rates * mixture * of_mixture


class Armijo(Solver):
    """Takes SGD steps whose size is found by an Armijo line search on each batch, so no step size needs tuning.

    Each step, on one batch b with g = g_i(w; b), tries η = η₀, bη₀, b²η₀, ... and takes the first η with::

        f_b(w − ηg) ≤ f_b(w) − c η ‖g‖²,    η₀ = min(η_max, η_prev γ_r^(1 / batches per epoch))

    All trials see the same batch and random state, and the buffers are restored after each. If 100 trials fail, the
    step is 1e-6 and η_prev is the last η that was tried. If ‖g‖ < 1e-8, nothing is updated. The bound is relaxed by
    four roundings of the loss, because near a minimum the loss cannot decrease by less than its rounding.

    Args:
        sufficient_decrease: Fraction c of the decrease that a linear model predicts.
        shrink: Factor b on η after each failed trial.
        growth: Factor γ_r by which η may grow over an epoch.
        max_step: Largest step size η_max.

    Attributes:
        accepted: (K, 1) last η, which is η_prev of the next step; 1 before the first step.
        has_searched: (K, 1) bool; whether a client made a line search in this round.

    References:
        Vaswani et al. 2019, "Painless Stochastic Gradient", Algorithm 1; "Towards Hyper-parameter-free Federated
        Learning".
    """

    takes_terms = False
    MAX_TRIALS, FALLBACK_STEP, MIN_NORM = 100, 1e-6, 1e-8

    def __init__(
        self, sufficient_decrease: float = 0.1, shrink: float = 0.9, growth: float = 2.0, max_step: float = 10.0
    ) -> None:
        self.sufficient_decrease, self.shrink = sufficient_decrease, shrink
        self.growth, self.max_step = growth, max_step

    def begin(self, client: Client) -> None:
        """Set η_prev = 1 for all clients."""
        self.accepted = torch.ones(len(client.w), 1, dtype=torch.float64)
        self.has_searched = torch.zeros(len(client.w), 1, dtype=torch.bool)

    def step(self, client: Client) -> None:
        """Search the step size on one batch, and take the step."""
        batch, w = client.next_batch(), client.w
        client.same_draws()
        loss, gradient = client.loss_and_gradient(w, batch)
        square = gradient.square().sum(dim=1, keepdim=True)
        # Written as ~(a < b), so that a NaN searches, too, and shows in the result.
        searches = ~(square.sqrt() < self.MIN_NORM).cpu()
        if not searches.any():
            return
        self.has_searched |= searches

        def there(steps: Tensor) -> Tensor:
            return upload(steps.to(square.dtype), square.device)

        step = (self.accepted * self.growth ** (1 / client.num_batches)).clamp(max=self.max_step)
        # A loss that is not finite bounds nothing: w becomes NaN, and the client has no part in the round.
        is_known = torch.isfinite(loss).cpu()
        taken, left = torch.where(is_known, self.FALLBACK_STEP * searches.double(), torch.nan), searches & is_known
        roundings = 4 * torch.finfo(loss.dtype).eps * loss.abs().clamp(min=1.0)
        for trial in range(self.MAX_TRIALS):
            # K clients search in lockstep; a client that has found its step keeps it while the others go on.
            step = torch.where(left, step * self.shrink, step) if trial else step
            bound = loss - there(self.sufficient_decrease * step) * square + roundings
            found = left & (client.trial_loss(w - there(step) * gradient, batch) <= bound).cpu()
            taken, left = torch.where(found, step, taken), left & ~found
            if not left.any():
                break
        self.accepted = torch.where(searches, step, self.accepted)
        w -= there(taken) * gradient
