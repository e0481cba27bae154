"""Logistic regression for two classes with one weight vector."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedbc_lightning.core.checks import Count, Fraction, NotNegative, Positive
from fedbc_lightning.core.errors import ConfigurationError

from .classifier import Classifier


class BinaryLogisticRegression(Classifier):
    """The l2-regularised logistic regression of L2GD on LibSVM data, without intercept and initialised with w = 0.

    The objective over the m samples a_j is::

        f(w) = (1/m) Σ log(1 + exp(-b_j a_j·w)) + (mu/2) ‖w‖²,   b_j = 2 y_j - 1, which is -1 or 1

    Targets are the classes y = 0 and 1, int64 ``(B,)``. The logit of class 0 is 0 and that of class 1 is w·a, so that
    cross-entropy is the logistic loss above. ``weight_decay`` is mu; as in any PyTorch model it acts on the gradient,
    and the logged losses do not contain it. For an intercept, add a feature that is 1 in every sample to the data.

    :class:`LogisticRegression` for two classes has two weight vectors, of which only the difference w = w_1 - w_0
    matters. It has the same losses and predictions with 2 (d + 1) parameters instead of d, but its steps move w twice
    as far, and its penalty of mu is one of mu / 2 on w.

    Args:
        num_features: Length d of a flattened input (123 in a1a).
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty mu, >= 0.

    References:
        F. Hanzely and P. Richtarik, Federated Learning of a Mixture of Global and Local Models, 2020.

    Example:
        >>> import torch
        >>> BinaryLogisticRegression(num_features=123)(torch.ones(4, 123)).tolist()[0]
        [0.0, 0.0]
    """

    def __init__(
        self, num_features: Count = 123, lr: Positive = 0.01, momentum: Fraction = 0.0, weight_decay: NotNegative = 0.0
    ) -> None:
        super().__init__(lr, momentum, weight_decay)
        linear = nn.Linear(num_features, 1, bias=False)
        # Every run starts at F(0), by which the errors in L2GD's figures are divided: (F(x) - F*) / (F(0) - F*).
        nn.init.zeros_(linear.weight)
        self.network = nn.Sequential(nn.Flatten(), linear)

    @property
    def num_classes(self) -> int:
        """Number of classes, which is always 2."""
        return 2

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits ``(B, 2)``, of which the first is 0.

        Raises:
            ConfigurationError: The inputs do not fit the model.
        """
        return F.pad(super().forward(inputs), (1, 0))

    def _too_few_classes(self, found: str) -> ConfigurationError:
        return ConfigurationError(
            f"model: BinaryLogisticRegression takes the classes 0 and 1, but {found}; use LogisticRegression for more."
        )
