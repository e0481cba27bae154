"""Time one step of K clients: one client after another, mapped as the vectorized engine does it, or in one graph.

    python benchmarks/cohort_steps.py [cnn resnet] [--clients 2 5 10 20] [--device cuda] [--seconds 2] [--turns 3]

A step is the loss of each client's own batch by its own weights, and the gradients of all; no optimizer steps, and no
batch is made. ``python benchmarks/gpu.py cohort-cnn cohort-resnet`` measures the same on a card, with memory.

one-by-one       Forward and backward pass of each client in turn.
vmap             ``vmap(grad(loss))``, as the vectorized engine runs a step that is not recorded.
recorded         The same, recorded and replayed, as that engine does when a shape came often enough.
grouped          Written out: convolutions and GroupNorm in K groups, linear layers as ``baddbmm``, one backward pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fedbc_lightning.models import CIFARCNN, ResNet18GroupNorm
from torch import Tensor, fx, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fedbc_lightning.engines.recorded.recording import record

MODELS: dict[str, tuple[Callable[[], Any], int]] = {"cnn": (CIFARCNN, 20), "resnet": (ResNet18GroupNorm, 32)}
"""A model, and the size of a batch."""
WAYS = ("one-by-one", "vmap", "recorded", "grouped")
CLIENTS = (2, 5, 10, 20)


class Grouped(fx.Interpreter):
    """Runs a network for K clients: images have shape (B, K C, H, W), and what comes after ``flatten`` (K, B, F)."""

    def __init__(self, network: nn.Module, num_clients: int) -> None:
        super().__init__(fx.symbolic_trace(network))
        self.num_clients, self.weights = num_clients, dict[str, Tensor]()

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a layer with the weights of all clients."""
        layer, (inputs,), weights, k = self.fetch_attr(target), args, self.weights, self.num_clients
        weight, bias = weights.get(f"{target}.weight"), weights.get(f"{target}.bias")
        if isinstance(layer, nn.Conv2d):
            assert weight is not None
            bias = None if bias is None else bias.reshape(-1)
            options = layer.stride, layer.padding, layer.dilation, k * layer.groups
            return functional.conv2d(inputs, weight.flatten(0, 1), bias, *options)
        if isinstance(layer, nn.GroupNorm):
            assert weight is not None
            assert bias is not None
            return functional.group_norm(inputs, k * layer.num_groups, weight.reshape(-1), bias.reshape(-1), layer.eps)
        if isinstance(layer, nn.Linear):
            assert weight is not None
            assert bias is not None
            return torch.baddbmm(bias[:, None], inputs, weight.transpose(1, 2))
        return self._by_client(inputs) if isinstance(layer, nn.Flatten) else layer(*args, **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, of which ``flatten`` alone mixes clients and samples."""
        return self._by_client(args[0]) if target is torch.flatten else super().call_function(target, args, kwargs)

    def _by_client(self, images: Tensor) -> Tensor:
        return images.reshape(len(images), self.num_clients, -1).transpose(0, 1)


class CohortStep:
    """A step of K clients in several ways.

    Args:
        model: Name of the model.
        num_clients: Number of clients, K.
        device: Where it is computed.
    """

    def __init__(self, model: str, num_clients: int, device: torch.device | str) -> None:
        torch.manual_seed(0)
        make, batch_size = MODELS[model]
        self.network = make().network.to(device)
        named = dict(self.network.named_parameters())
        self.names, self.num_clients = list(named), num_clients
        self.weights = [p.detach().expand(num_clients, *p.shape).clone() for p in named.values()]
        self.inputs = torch.randn(num_clients, batch_size, 3, 32, 32, device=device)
        self.targets = torch.randint(10, (num_clients, batch_size), device=device)

    def of(self, way: str) -> Callable[[], Any]:
        """Return a function that takes the step, and returns the gradients of all weights, (K, ...) each."""
        weights, inputs, targets = self.weights, self.inputs, self.targets
        if way == "one-by-one":
            return self._one_by_one
        if way == "grouped":
            return partial(self._grouped, Grouped(self.network, self.num_clients))
        mapped = vmap(grad(self._loss))
        if way == "vmap":
            return lambda: mapped(weights, inputs, targets)
        number = len(weights)
        replay, _ = record(
            lambda *all_of: tuple(mapped(list(all_of[:number]), *all_of[number:])), [*weights, inputs, targets]
        )

        def replayed() -> Any:
            with torch.no_grad():
                return replay(*weights, inputs, targets)

        return replayed

    def _loss(self, weights: list[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = functional_call(self.network, dict(zip(self.names, weights, strict=True)), (inputs,))
        return functional.cross_entropy(outputs, targets)

    def _one_by_one(self) -> list[Tensor]:
        found = []
        for k in range(self.num_clients):
            leaves = [weight[k].detach().requires_grad_() for weight in self.weights]
            loss = self._loss(leaves, self.inputs[k], self.targets[k])
            found.append(torch.autograd.grad(loss, leaves))
        return [torch.stack(column) for column in zip(*found, strict=True)]

    def _grouped(self, interpreter: Grouped) -> Any:
        leaves = [weight.detach().requires_grad_() for weight in self.weights]
        interpreter.weights = dict(zip(self.names, leaves, strict=True))
        outputs = interpreter.run(self.inputs.transpose(0, 1).flatten(1, 2))
        losses = functional.cross_entropy(outputs.flatten(0, 1), self.targets.flatten(), reduction="sum")
        return torch.autograd.grad(losses / self.inputs.shape[1], leaves)


def steps_per_second(step: Callable[[], Any], num_clients: int, seconds: float, clock: Callable[[], float]) -> float:
    """Return the clients' steps per second, after one step that is not counted."""
    step()
    number, began = 0, clock()
    while (passed := clock() - began) < seconds or not number:
        step()
        number += 1
    return number * num_clients / passed


def main() -> None:
    """Print a table of clients' steps per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--clients", nargs="+", type=int, default=list(CLIENTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each way and turn")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    if unknown := set(given.models) - set(MODELS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    is_gpu = given.device != "cpu"

    def clock() -> float:
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() if is_gpu else time.process_time()

    print(f"{'seconds' if is_gpu else 'CPU seconds'}, torch {torch.__version__}")
    print(f"| model | K | {' | '.join(WAYS)} |\n|{'---|' * (2 + len(WAYS))}")
    for model in given.models or MODELS:
        for num_clients in given.clients:
            steps = CohortStep(model, num_clients, given.device)
            ways = {way: steps.of(way) for way in WAYS}
            for way in WAYS[1:]:  # the same gradients, but for rounding
                for found, expected in zip(ways[way](), steps.of("one-by-one")(), strict=True):
                    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(given.turns):
                for way in WAYS[:: 1 if turn % 2 else -1]:
                    rates[way].append(steps_per_second(ways[way], num_clients, given.seconds, clock))
            medians = [statistics.median(rates[way]) for way in WAYS]
            shown = [f"{rate:.4g} ({rate / medians[0]:.2f})" for rate in medians]
            print(f"| {model} | {num_clients} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
