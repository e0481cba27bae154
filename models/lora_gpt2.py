"""A tiny GPT-2 whose adapters alone are trained and exchanged."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedbc_lightning.core.checks import Count, Fraction, NotNegative, Positive
from fedbc_lightning.core.errors import ConfigurationError, needs

from .base import Batch, NextToken

if TYPE_CHECKING:
    from peft import PeftModel

# The linear layers of a block of GPT-2 that get an adapter
ADAPTED = ["c_attn", "c_proj", "c_fc"]


class LoRAGPT2(NextToken):
    """GPT-2 with randomly drawn, frozen weights and LoRA adapters, for sequences of tokens; nothing is downloaded.

    Inputs are tokens int64 ``(B, L)``. Targets are either int64 ``(B,)``, the token that follows the sequence, or int64
    ``(B, L)``, the token that follows each position, and -100 where none is predicted. Only the adapters, A and B of
    each linear layer, require a gradient, so that methods see and exchange them alone. What the frozen weights cannot
    express the adapters must, so it learns less than a model that was trained before: it shows how such a model is
    federated, and fits a laptop.

    Args:
        vocabulary_size: Number of tokens (LEAF's alphabet has 80 characters).
        sequence_length: Largest number L of tokens of a sequence.
        embedding_dim: Width of the model; a multiple of ``num_heads``.
        num_layers: Number of blocks.
        num_heads: Number of heads of attention.
        rank: Rank r of the adapters.
        alpha: Scale of the adapters; they count alpha / r.
        dropout: Dropout in front of the adapters, in [0, 1).
        gradient_checkpointing: Whether the blocks are computed again in the backward pass, which saves memory.
        lr: Step size of AdamW, > 0.
        weight_decay: Weight decay of AdamW, >= 0.

    Raises:
        ConfigurationError: An argument is impossible, or the extra ``llm`` is not installed.

    References:
        E. Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, section 4.1.
    """

    network: PeftModel

    def __init__(
        self,
        vocabulary_size: Count = 80,
        sequence_length: Count = 80,
        embedding_dim: Count = 64,
        num_layers: Count = 2,
        num_heads: Count = 2,
        rank: Count = 8,
        alpha: float = 16.0,
        dropout: Fraction = 0.0,
        gradient_checkpointing: bool = False,
        lr: Positive = 0.01,
        weight_decay: NotNegative = 0.0,
    ) -> None:
        super().__init__(lr, weight_decay=weight_decay)
        if embedding_dim % num_heads:
            raise ConfigurationError(
                f"model.embedding_dim: got {embedding_dim}; it must be a multiple of num_heads, {num_heads}."
            )
        with needs("model: LoRAGPT2 needs transformers and peft", "llm"):
            from peft import LoraConfig, get_peft_model
            from transformers import GPT2Config, GPT2LMHeadModel
        base = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary_size, n_positions=sequence_length, n_embd=embedding_dim, n_layer=num_layers,
                n_head=num_heads, bos_token_id=None, eos_token_id=None,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                # GPT-2's own 0.02 is to be trained: frozen, it would keep all logits near 0, whatever adapters do.
                initializer_range=embedding_dim**-0.5,
            )
        )  # fmt: skip
        if gradient_checkpointing:
            # The reentrant kind needs an input that requires a gradient, which a block of frozen weights does not get:
            # the adapters would have no gradient.
            base.gradient_checkpointing_enable({"use_reentrant": False})
        scale: Any = alpha  # peft says that it is whole, and divides it by r
        # fan_in_fan_out, because GPT-2 in transformers has Conv1D layers, whose weights are (in, out)
        lora = LoraConfig(r=rank, lora_alpha=scale, lora_dropout=dropout, target_modules=ADAPTED, fan_in_fan_out=True)
        with warnings.catch_warnings():
            # peft 0.21 asks transformers 5.24 in the old way whether the model has checkpoints.
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
            self.network = get_peft_model(base, lora)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits ``(B, L, vocabulary_size)`` of the token after each position.

        Raises:
            ConfigurationError: The inputs are not tokens, or too many.
        """
        limit = self.hparams["sequence_length"]
        if inputs.ndim != 2 or inputs.dtype != torch.int64 or not 0 < inputs.shape[1] <= limit:
            raise ConfigurationError(
                f"model: LoRAGPT2 takes tokens (B, L) of int64 with 1 <= L <= model.sequence_length={limit}, but the "
                f"batch has {inputs.dtype} of shape {tuple(inputs.shape)}."
            )
        return self.network(input_ids=inputs).logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW on the adapters."""
        adapters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(adapters, lr=self.hparams["lr"], weight_decay=self.hparams["weight_decay"])

    def _apply_to(self, batch: Batch) -> Batch:
        """Return logits ``(n, vocabulary_size)`` and targets ``(n,)``, where n is B or B L."""
        inputs, targets = batch
        logits = self(inputs)
        return (logits[:, -1], targets) if targets.ndim == 1 else (logits.flatten(0, 1), targets.flatten())
