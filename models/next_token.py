"""Base class of the models that predict the next token of a sequence."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .classifier import Classifier

# Target of a position that is not predicted; it is torch's default ignore_index
NOT_PREDICTED = -100


class NextToken(Classifier):
    """Classifier of the token that follows; losses and accuracy are means over the tokens that are predicted.

    Each predicted token of a client's data or of the pooled data counts once, whatever its sequence or batch. A target
    of -100 marks a position that is not predicted, such as padding after a shorter text.

    Args:
        lr: Step size, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty, >= 0.
    """

    classes_argument: ClassVar[str] = "vocabulary_size"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the predicted tokens.

        Args:
            outputs: Logits ``(n, vocabulary_size)``.
            targets: Tokens ``(n,)``, or -100 at positions that are not predicted.
        """
        # A batch of padding alone has a loss of 0, instead of 0 / 0.
        return self._cross_entropy(outputs, targets, "sum") / self._weight(targets).clamp(min=1)

    def accuracy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of predicted tokens whose logit is the largest, in [0, 1]."""
        # argmax is never -100, so a position that is not predicted counts as no hit.
        return (outputs.argmax(dim=1) == targets).sum() / self._weight(targets).clamp(min=1)

    def _weight(self, targets: Tensor) -> Any:
        """Return the number of predicted tokens as a tensor; for an int, every step would wait for the device."""
        return (targets != NOT_PREDICTED).sum()
