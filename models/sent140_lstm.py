"""FedProx's sentiment model for Sent140."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedbc_lightning.core.checks import Count, Fraction, NotNegative, Positive

from .classifier import Classifier
from .recurrent import TokenLSTM


class Sent140LSTM(Classifier):
    """The Sent140 model of FedProx, after LEAF's: token embeddings, two LSTM layers of 256 and a linear layer.

    Inputs are tokens int64 ``(B, L)`` (L = 25) with padding, token 0, after the words; targets are int64 ``(B,)``. A
    tweet is classified by the state after its last token that is not padding, so padding has no effect; padding before
    the words is read like words whose embedding is 0. A tweet of padding only has the state 0, and its logits are the
    last layer's bias. The papers use fixed GloVe vectors of 300 numbers; here the embedding is learned with the rest.

    Args:
        vocabulary_size: Number of tokens, padding included.
        embedding_dim: Width of the embedding.
        hidden: Width of each LSTM layer.
        num_classes: Number of classes.
        lr: Step size of SGD, > 0.
        momentum: Momentum of SGD, in [0, 1).
        weight_decay: L2 penalty of SGD, >= 0.

    References:
        T. Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020;
        S. Caldas et al., LEAF: A Benchmark for Federated Settings, 2018.

    Example:
        >>> import torch
        >>> Sent140LSTM(vocabulary_size=100)(torch.zeros(4, 25, dtype=torch.int64)).shape
        torch.Size([4, 2])
    """

    def __init__(
        self,
        vocabulary_size: Count = 10_000,
        embedding_dim: Count = 300,
        hidden: Count = 256,
        num_classes: Count = 2,
        lr: Positive = 0.01,
        momentum: Fraction = 0.0,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        super().__init__(lr, momentum, weight_decay)
        self.recurrent = TokenLSTM(vocabulary_size, embedding_dim, hidden, padding_token=0)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits ``(B, num_classes)``.

        Raises:
            ConfigurationError: The inputs are not tokens of the vocabulary.
        """
        states = self.recurrent(inputs)
        places = torch.arange(1, inputs.shape[1] + 1, device=inputs.device)
        lengths = (places * (inputs != 0)).amax(dim=1)  # 0 for a tweet of padding only
        last = states[torch.arange(len(inputs), device=inputs.device), (lengths - 1).clamp(min=0)]
        return self.head(last * (lengths > 0).unsqueeze(1))
