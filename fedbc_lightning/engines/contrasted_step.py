"""A client's ``training_step`` with a model-contrastive term in its loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from fedbc_lightning.core.errors import ConfigurationError, did_you_mean
from fedbc_lightning.core.seeding import preserved_globals
from fedbc_lightning.engines.step_function import collecting
from fedbc_lightning.engines.workbench import Workbench
from fedbc_lightning.local import ModelContrast
from fedbc_lightning.module.collector import MetricCollector


class FeaturesReached(BaseException):
    """Ends a step of which only the features are wanted; ``except Exception`` in the user's step lets it pass."""


class ContrastedStep:
    """Takes the steps of one client, whose loss compares features by the current model with those by two others.

    The features are the output of a layer, which a forward hook reads while ``training_step`` runs. By the two other
    models the step runs in evaluation mode up to that layer, without gradients, before it runs by the current model
    and with the same random draws; what it logs there is dropped.

    Args:
        bench: The workbench; it holds the model at which the client's training starts.
        contrast: The term of this client.
    """

    def __init__(self, bench: Workbench, contrast: ModelContrast) -> None:
        self._bench, self._contrast = bench, contrast
        self._layer = find_layer(bench.user.module, contrast.layer)
        layout, far = bench.layout, contrast.far
        buffers, self._counters = layout.read_buffers(), layout.read_counters()
        # The kept parameters at the start are those at the end of the client's last training, so they fit to both.
        far_row = bench.row.clone()
        far_row[: layout.num_parameters] = far[: layout.num_parameters]
        self._others = [(bench.row.clone(), buffers), (far_row, far[layout.num_parameters :])]

    def training_step(self, batch: Any, batch_idx: int) -> tuple[Tensor | None, Any]:
        """Return the loss of one batch with the term, and everything that ``training_step`` returned.

        Raises:
            ConfigurationError: The step does not use the layer as the term needs it.
        """
        near, far = self._features_of_others(batch, batch_idx)
        with self._watched() as outputs:
            loss, output = self._bench.user.training_step(batch, batch_idx)
        if loss is None:
            return None, output
        features = self._single(outputs)
        if not features.requires_grad:
            raise self._refusal("has no gradient, because nothing before it is trained, or it lies in a checkpoint")
        return loss + self._contrast.value(features, near, far), output

    @torch.no_grad()
    def _features_of_others(self, batch: Any, batch_idx: int) -> list[Tensor]:
        bench, user, layout = self._bench, self._bench.user, self._bench.layout
        w, buffers, counters = bench.row.clone(), layout.read_buffers(), layout.read_counters()
        scratch = [each.copy() for each in user.scratch]
        # MOON compares with two fixed models: no dropout, and BatchNorm by its running statistics.
        user.module.eval()
        found = []
        try:
            for row, own_buffers in self._others:
                bench.row.copy_(row)
                layout.write_buffers(own_buffers, self._counters)
                # A step may write into its batch and into the containers: both are copied.
                copied, unheard = apply_to_collection(batch, Tensor, Tensor.clone), collecting(user, MetricCollector())
                with preserved_globals(user.device), unheard, self._watched(is_last=True) as outputs:
                    user.training_step(copied, batch_idx)
                found.append(self._single(outputs))
        finally:
            user.train_mode()
            bench.row.copy_(w)
            layout.write_buffers(buffers, counters)
            for each, before in zip(user.scratch, scratch, strict=True):
                each.put(before)
        return found

    @contextmanager
    def _watched(self, *, is_last: bool = False) -> Iterator[list[Any]]:
        """Collect what the layer returns; `is_last` ends the step there."""
        outputs: list[Any] = []

        def look(layer: nn.Module, arguments: Any, output: Any) -> None:
            outputs.append(output)
            if is_last:
                raise FeaturesReached

        handle = self._layer.register_forward_hook(look)
        try:
            yield outputs
        except FeaturesReached:
            pass
        finally:
            handle.remove()

    def _single(self, outputs: list[Any]) -> Tensor:
        """Return the features (n, ...) that a step has shown.

        Raises:
            ConfigurationError: There are none, several, or they are no tensor of this form.
        """
        if len(outputs) != 1:
            raise self._refusal(f"is called {len(outputs)} times by training_step (a compiled step hides its layers)")
        (output,) = outputs
        if not isinstance(output, Tensor) or output.ndim < 2:
            found = f"the shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise self._refusal(f"returns {found}, not one vector for each sample")
        return output

    def _refusal(self, problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"algorithm.features: the layer '{self._contrast.layer}' {problem}; name a layer that training_step calls "
            "once, e.g. the one before the last. Where the features are no layer's output, pass them through a "
            "torch.nn.Identity and name that."
        )


def find_layer(module: nn.Module, name: str) -> nn.Module:
    """Return the layer of this name.

    Raises:
        ConfigurationError: The module has no such layer.
    """
    layers = {path: layer for path, layer in module.named_modules(remove_duplicate=False) if path}
    if name not in layers:
        shown = ", ".join(layers) if len(layers) <= 12 else f"{', '.join(list(layers)[:6])}, ..., {list(layers)[-1]}"
        raise ConfigurationError(
            f"algorithm.features: {type(module).__name__} has no layer '{name}'; "
            f"{did_you_mean(name, layers, f'it has {shown}.')}"
        )
    return layers[name]
