"""Logistic regression of two classes with one weight vector."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedbc_lightning.core.errors import ConfigurationError

from .classifier import Classifier


class BinaryLogisticRegression(Classifier):
    r"""The l2-regularised logistic regression of L2GD on LibSVM data: one weight vector w, no intercept, from w = 0.

    .. math::
        f(w) = \frac{1}{m} \sum_{j=1}^{m} \log(1 + \exp(-b_j \, a_j^T w)) + \frac{\mu}{2} \|w\|^2,
        \quad b_j = 2 y_j - 1 \in \{-1, 1\}

    Targets are the classes y = 0 and 1, int64 ``(B,)``. The logits are 0 of class 0 and w·a of class 1, so that
    cross-entropy is the logistic loss above. ``weight_decay`` is mu; as in any PyTorch model it acts on the gradient,
    and the logged losses are without it. An intercept is the weight of a feature that is 1 in every sample.

    :class:`LogisticRegression` of two classes has two vectors, of which only the difference w = w_1 - w_0 matters:
    the same losses and predictions, with 2 (d + 1) numbers instead of d. Its steps move w twice as far, and its penalty
    of mu is one of mu / 2 on w.

    Args:
        num_features: Length of an input when flattened, d (123 in a1a).
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: mu, the L2 penalty, >= 0.

    References:
        F. Hanzely and P. Richtarik, Federated Learning of a Mixture of Global and Local Models, 2020.

    Example:
        >>> import torch
        >>> BinaryLogisticRegression(num_features=123)(torch.ones(4, 123)).tolist()[0]
        [0.0, 0.0]
    """

    def __init__(
        self, num_features: int = 123, lr: float = 0.01, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(lr, momentum, weight_decay)
        linear = nn.Linear(num_features, 1, bias=False)
        nn.init.zeros_(linear.weight)
        self.network = nn.Sequential(nn.Flatten(), linear)

    @property
    def num_classes(self) -> int:
        """Two."""
        return 2

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``(B, 2)``, the first 0.

        Raises:
            ConfigurationError: The inputs do not fit the model.
        """
        return F.pad(super().forward(inputs), (1, 0))

    def _too_few_classes(self, found: str) -> ConfigurationError:
        return ConfigurationError(
            f"model: BinaryLogisticRegression takes the classes 0 and 1, but {found}; use LogisticRegression for more."
        )
