"""LEAF's model for next-character prediction on Shakespeare."""

from __future__ import annotations

from torch import Tensor, nn

from fedbc_lightning.core.checks import Count, Fraction, NotNegative, Positive
from fedbc_lightning.core.errors import ConfigurationError

from .next_token import NextToken
from .recurrent import TokenLSTM


class CharLSTM(NextToken):
    """LEAF's Shakespeare model, which predicts the next character.

    It has an embedding of width 8, two LSTM layers of 256 and a linear layer.

    Inputs are characters int64 ``(B, L)``. Targets are either int64 ``(B,)``, the character that follows the sequence
    (LEAF; L = 80), or int64 ``(B, L)``, the character that follows each position. In the latter, -100 marks a position
    that is not predicted, such as padding after a shorter text. Losses and accuracy are means over characters: each
    predicted character of a client's data or of the pooled data counts once, whatever its sequence or batch.

    With 80 characters the model has 819,920 parameters. torch's LSTM has two bias vectors where TensorFlow has one;
    without the second ones (2,048), and with the 90 characters of Reddi et al. 2021, it has their 820,522 parameters.

    Args:
        vocabulary_size: Number of characters (LEAF's alphabet has 80).
        embedding_dim: Width of the embedding.
        hidden: Width of each LSTM layer.
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    References:
        S. Caldas et al., LEAF: A Benchmark for Federated Settings, 2018.

    Example:
        >>> import torch
        >>> CharLSTM()(torch.zeros(4, 20, dtype=torch.int64)).shape
        torch.Size([4, 20, 80])
    """

    def __init__(
        self,
        vocabulary_size: Count = 80,
        embedding_dim: Count = 8,
        hidden: Count = 256,
        lr: Positive = 0.01,
        momentum: Fraction = 0.0,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        super().__init__(lr, momentum, weight_decay)
        self.recurrent = TokenLSTM(vocabulary_size, embedding_dim, hidden)
        self.head = nn.Linear(hidden, vocabulary_size)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits ``(B, L, vocabulary_size)`` of the character after each position.

        Raises:
            ConfigurationError: The inputs are not characters of the vocabulary.
        """
        return self.head(self.recurrent(inputs))

    def _apply_to(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits ``(n, vocabulary_size)`` and targets ``(n,)``, where n is B or B L."""
        inputs, targets = batch
        if targets.shape not in (inputs.shape[:1], inputs.shape):
            raise ConfigurationError(
                f"model: CharLSTM takes targets of the shape of its inputs {tuple(inputs.shape)}, or one per sequence; "
                f"the batch has {tuple(targets.shape)}."
            )
        states = self.recurrent(inputs)
        # LEAF predicts the character after the 80 alone, so the head is spared the other 79 states.
        if targets.ndim == 1:
            return self.head(states[:, -1]), targets
        return self.head(states).flatten(0, 1), targets.flatten()
