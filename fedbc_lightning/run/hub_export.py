"""Writes a model in Hugging Face's formats: safetensors, and the folder that peft loads an adapter from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.core.files import replacing
from fedbc_lightning.state import checkpoint


def write_safetensors(state: dict[str, Tensor], source: dict[str, Any], out: Path) -> None:
    """Write a module's state dict to a file, with its origin as metadata.

    Raises:
        ConfigurationError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigurationError(
            f"out: '{out}' needs safetensors: pip install 'fedbc-lightning[llm]', or give a name that ends in .ckpt."
        ) from error
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    with replacing(out) as partial:
        save_file(tensors, partial, {"format": "pt", checkpoint.SOURCE: json.dumps(source)})


def find_adapter(module: nn.Module) -> tuple[str, Any] | None:
    """Return the name and the object of the module's only ``PeftModel``; None if it has none or several."""
    peft = sys.modules.get("peft")  # a module that has adapters has imported it
    found = [(name, part) for name, part in module.named_modules() if peft and isinstance(part, peft.PeftModel)]
    return found[0] if len(found) == 1 else None


def write_adapter(adapter: tuple[str, Any], state: dict[str, Tensor], out: Path) -> None:
    """Write the folder that ``PeftModel.from_pretrained`` reads.

    Args:
        adapter: Name and object of the ``PeftModel`` in the user's module.
        state: State dict of the user's module.
        out: Folder to make.
    """
    name, model = adapter
    prefix = f"{name}." if name else ""
    own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    model.save_pretrained(str(out), state_dict=own)
