"""The model-contrastive term of MOON, which compares features of a batch under three models."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedbc_lightning.local.terms import part_of


class ModelContrast:
    """Pulls the features of a batch to those by the model that a client starts from, and away from those by another.

    It adds μ times the mean over the samples of −log(exp(s_near / τ) / (exp(s_near / τ) + exp(s_far / τ))) to the loss
    of each batch, where s_near and s_far are the cosine similarities of a sample's features by the current model to
    those by the start model and by the other model.

    Unlike a :class:`~fedbc_lightning.local.Term`, it has no gradient in closed form: it is part of the loss before
    backward.

    Args:
        weight: Weight μ ≥ 0.
        temperature: Temperature τ > 0.
        layer: Name of the layer whose output is the features, as in ``named_modules``.
        far: The other model, (d + b,) or (K, d + b): parameters and floating-point buffers.

    References:
        Li et al. 2021, "Model-Contrastive Federated Learning", equations 3 and 4.
    """

    def __init__(self, weight: float, temperature: float, layer: str, far: Tensor) -> None:
        self.weight, self.temperature, self.layer, self.far = weight, temperature, layer, far

    def value(self, features: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """Return μ times the term, a scalar, of the features (n, ...) of n samples by the three models.

        Example:
            >>> one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
            >>> round(ModelContrast(1.0, 0.5, "", one).value(one, one, other).item(), 4)  # log(1 + exp(-1 / 0.5))
            0.1269
        """
        # Half precision has too few digits for a difference of two similarities.
        wide = torch.promote_types(features.dtype, torch.float32)
        own, near, far = (values.to(wide).flatten(1) for values in (features, near, far))
        difference = cosine_similarity(own, far) - cosine_similarity(own, near)
        return self.weight * softplus(difference / self.temperature).mean()

    def part(self, clients: slice) -> ModelContrast:
        """Return the term of one of the K clients, whose ``far`` is (d + b,)."""
        return ModelContrast(self.weight, self.temperature, self.layer, part_of(self.far, clients).reshape(-1))
