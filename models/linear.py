"""Linear models, whose losses are convex in the parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedbc_lightning.core.checks import Count
from fedbc_lightning.core.errors import ConfigurationError

from .base import Classifier, Regressor


class LinearRegression(Regressor):
    """One linear layer from features to a number, the model of Fed+'s synthetic regression (1,000 features).

    Its loss is convex in the parameters.

    Args:
        num_features: Length of a flattened input.
        **kwargs: Arguments of :class:`Regressor`: ``lr``, ``momentum`` and ``weight_decay`` of SGD.

    Example:
        >>> import torch
        >>> LinearRegression(num_features=60)(torch.zeros(4, 60)).shape
        torch.Size([4])
    """

    def __init__(self, num_features: Count = 1000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(num_features, 1))


class LogisticRegression(Classifier):
    """One linear layer from features to class logits, the model of the Synthetic data.

    Its loss is convex in the parameters.

    Args:
        num_features: Length of a flattened input (60 in Synthetic, 784 in MNIST).
        num_classes: Number of classes.
        **kwargs: Arguments of :class:`Classifier`: ``lr``, ``momentum`` and ``weight_decay`` of SGD.

    Example:
        >>> import torch
        >>> LogisticRegression(num_features=60)(torch.zeros(4, 60)).shape
        torch.Size([4, 10])
    """

    def __init__(self, num_features: Count = 60, num_classes: Count = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(num_features, num_classes))


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
        **kwargs: Arguments of :class:`Classifier`: ``lr``, ``momentum`` and ``weight_decay`` of SGD.

    References:
        F. Hanzely and P. Richtarik, Federated Learning of a Mixture of Global and Local Models, 2020.

    Example:
        >>> import torch
        >>> BinaryLogisticRegression(num_features=123)(torch.ones(4, 123)).tolist()[0]
        [0.0, 0.0]
    """

    def __init__(self, num_features: Count = 123, **kwargs: Any) -> None:
        super().__init__(**kwargs)
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
