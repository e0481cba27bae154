"""Embeddings and LSTMs for text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedbc_lightning.core.checks import Count
from fedbc_lightning.core.errors import ConfigurationError

from .base import Batch, Classifier, NextToken


class TokenLSTM(nn.Module):
    """An embedding and two LSTM layers, which map tokens to states.

    Args:
        vocabulary_size: Number of tokens, which are 0..vocabulary_size-1.
        embedding_dim: Width of the embedding.
        hidden: Width of each LSTM layer.
        padding_token: Token whose embedding is 0 and is not trained; None if there is no such token.
    """

    def __init__(self, vocabulary_size: int, embedding_dim: int, hidden: int, padding_token: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding_dim, padding_idx=padding_token)
        self.lstm = nn.LSTM(embedding_dim, hidden, num_layers=2, batch_first=True)
        self._has_seen_tokens = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the states ``(B, L, hidden)`` of the second layer after each of the tokens ``(B, L)``.

        Raises:
            ConfigurationError: Tokens are outside the vocabulary. It is checked in every batch on the CPU, but only in
                the first one on other devices, because the check waits for the device.
        """
        # A token outside the vocabulary trips an assertion inside CUDA, after which the process cannot use the device.
        if not self._has_seen_tokens and tokens.device.type != "cpu":
            self._check_range(tokens)
            self._has_seen_tokens = True
        try:
            embedded = self.embedding(tokens)
        except IndexError:
            self._check_range(tokens)
            raise
        return self.lstm(embedded)[0]

    def _check_range(self, tokens: Tensor) -> None:
        size, (least, most) = self.embedding.num_embeddings, tokens.aminmax()
        if least < 0 or most >= size:
            worst = int(least if least < 0 else most)
            raise ConfigurationError(
                f"model.vocabulary_size: got {size}, but the batch holds token {worst}; tokens are 0..{size - 1}."
            )


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
        **kwargs: Arguments of :class:`NextToken`: ``lr``, ``momentum`` and ``weight_decay`` of SGD.

    References:
        S. Caldas et al., LEAF: A Benchmark for Federated Settings, 2018.

    Example:
        >>> import torch
        >>> CharLSTM()(torch.zeros(4, 20, dtype=torch.int64)).shape
        torch.Size([4, 20, 80])
    """

    def __init__(
        self, vocabulary_size: Count = 80, embedding_dim: Count = 8, hidden: Count = 256, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.recurrent = TokenLSTM(vocabulary_size, embedding_dim, hidden)
        self.head = nn.Linear(hidden, vocabulary_size)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits ``(B, L, vocabulary_size)`` of the character after each position.

        Raises:
            ConfigurationError: The inputs are not characters of the vocabulary.
        """
        return self.head(self.recurrent(inputs))

    def _apply_to(self, batch: Batch) -> Batch:
        """Return logits ``(n, vocabulary_size)`` and targets ``(n,)``, where n is B or B L."""
        inputs, targets = batch
        states = self.recurrent(inputs)
        # LEAF predicts the character after the 80 alone, so the head is spared the other 79 states.
        if targets.ndim == 1:
            return self.head(states[:, -1]), targets
        return self.head(states).flatten(0, 1), targets.flatten()


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
        **kwargs: Arguments of :class:`Classifier`: ``lr``, ``momentum`` and ``weight_decay`` of SGD.

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
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
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
