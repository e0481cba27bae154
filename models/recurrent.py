"""Embedding and two-layer LSTM, which the text models share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedbc_lightning.core.errors import ConfigurationError


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
            ConfigurationError: The tokens are not integers ``(B, L)``, or are outside the vocabulary. The vocabulary is
                checked in every batch on the CPU, but only in the first one on other devices, because the check waits
                for the device.
        """
        if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32) or not tokens.shape[1]:
            raise ConfigurationError(
                f"model: expects tokens (B, L) of int64, L at least 1, but the batch has "
                f"{str(tokens.dtype).removeprefix('torch.')} of shape {tuple(tokens.shape)}."
            )
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
