"""The workloads of benchmarks/engines.py in other frameworks, for its --peers; FedAvg, by their documented interfaces.

    pip install 'pfl[pytorch]' 'flwr[simulation]'
    python benchmarks/peers.py pfl W1 [--wall]

Prints client-steps per second, with one thread; pfl-research is timed in CPU seconds without ``--wall``, Flower always
in seconds, since it works in processes of its own.

Each trains as many clients per round, with the same samples, batch size, optimizer and number of steps; evaluation is
switched off. pfl-research gets a client's samples in a new order in every round, but not in every epoch, and the same
clients as we. Flower draws its own, and sends them to one Ray actor.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, count
from typing import Any

import engines
import numpy as np
import torch
from engines import BATCH_SIZE, LEARNING_RATE, MOMENTUM, WORKLOADS, Clients, Workload
from torch import Tensor, nn
from torch.nn import functional

from fedbc_lightning import UniformSampler


def num_steps(work: Workload, sizes: np.ndarray) -> int:
    """Of clients of these sizes in a round."""
    return work.epochs * int(np.ceil(sizes / work.batch_size).sum())


class WithLoss(nn.Module):
    """What pfl-research trains.

    Args:
        net: Gives logits.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy."""
        return functional.cross_entropy(self.net(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Of the one evaluation that cannot be switched off, in the first round, which is not timed."""
        from pfl.metrics import Weighted

        return {"loss": Weighted(self.loss(inputs, targets).item() * len(inputs), len(inputs))}


def pfl_research(work: Workload, data: Clients, seconds: float = math.inf) -> float:
    """Client-steps per second of one process of its simulation, which stops early once so many seconds are timed.

    It trains on a GPU if torch sees one.
    """
    # Lightning sets it; each look for a GPU then opens the driver's library, and pfl looks in every step
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    class Stopwatch(TrainingProcessCallback):
        """Looks at the clock after each round from the end of the warm-up on."""

        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
            now = engines.CLOCK()
            if central_iteration == work.warm_up - 1:
                self.started = now
            self.last = central_iteration + 1
            _, metrics = super().after_central_iteration(metrics, model, central_iteration=central_iteration)
            return self.last > work.warm_up and now - self.started > seconds, metrics

    def sampled(round: int) -> list[int]:
        return UniformSampler()(data.num_clients, work.num_sampled, seed=0, round=round)

    def shuffled(client: int) -> PyTorchTensorDataset:
        inputs, targets = data.arrays[client]
        order = torch.randperm(len(inputs), device=inputs.device)
        return PyTorchTensorDataset((inputs[order], targets[order]))

    ids = chain.from_iterable(sampled(round) for round in count(1))
    dataset = FederatedDataset(shuffled, ids.__next__)
    net, watch = WithLoss(work.make_net()), Stopwatch()

    def local_optimizer(parameters: Iterator[Tensor], lr: float) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=lr, momentum=work.momentum)

    rounds = work.warm_up + work.rounds
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=rounds + 1, train_cohort_size=work.num_sampled,
            val_cohort_size=None,
        ),
        SimulatedBackend(dataset, dataset, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(net, local_optimizer, torch.optim.SGD(net.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=work.batch_size, local_num_epochs=work.epochs, local_learning_rate=work.lr
        ),
        NNEvalHyperParams(local_batch_size=None),
        [watch],
        send_metrics_to_platform=False,
    )  # fmt: skip
    taken = engines.CLOCK() - watch.started
    return sum(num_steps(work, work.sizes[sampled(t)]) for t in range(work.warm_up + 1, watch.last + 1)) / taken


@cache
def clients(sizes: bytes, shape: tuple[int, ...]) -> Clients:
    """Made once in each actor, as the data of the others are made once."""
    return Clients(np.frombuffer(sizes, dtype=np.int64), shape)


def flower(work: Workload, data: Clients) -> float:
    """Client-steps per second of its simulation with one Ray actor."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.WARNING)
    make_net, epochs, warm_up, sizes, shape = (
        work.make_net,
        work.epochs,
        work.warm_up,
        work.sizes.astype(np.int64),
        work.shape,
    )
    steps, started, client_app, server_app = [0], [0.0], ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        inputs, targets = clients(sizes.tobytes(), shape).arrays[int(context.node_config["partition-id"])]
        torch.set_num_threads(1)
        net = make_net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        taken = 0
        for _ in range(epochs):
            for chosen in torch.randperm(len(inputs)).split(BATCH_SIZE):
                optimizer.zero_grad()
                functional.cross_entropy(net(inputs[chosen]), targets[chosen]).backward()
                optimizer.step()
                taken += 1
        metrics = MetricRecord({"num-examples": len(inputs), "num-steps": taken})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    def counted(contents: list[RecordDict], weighted_by: str) -> MetricRecord:
        steps[0] += sum(int(content["metrics"]["num-steps"]) for content in contents)
        return MetricRecord()

    def looked_at(round: int, arrays: ArrayRecord) -> MetricRecord:
        if round == warm_up:
            steps[0], started[0] = 0, time.perf_counter()
        return MetricRecord()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=work.num_sampled / data.num_clients, fraction_evaluate=0.0, min_train_nodes=work.num_sampled,
            min_evaluate_nodes=0, min_available_nodes=data.num_clients, train_metrics_aggr_fn=counted,
        )  # fmt: skip
        arrays = ArrayRecord(work.make_net().state_dict())
        strategy.start(grid, arrays, num_rounds=warm_up + work.rounds, evaluate_fn=looked_at)
        started[0] = time.perf_counter() - started[0]

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
    run_simulation(server_app, client_app, data.num_clients, backend_config=resources)
    if not steps[0]:
        raise RuntimeError("no client has trained; Flower's log says why")
    return steps[0] / started[0]


BY_PACKAGE: dict[str, Callable[[Workload, Clients], float]] = {"pfl": pfl_research, "flwr": flower}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=BY_PACKAGE)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--wall", action="store_true", help="time in seconds instead of CPU seconds")
    given = parser.parse_args()
    if given.wall:
        engines.CLOCK = time.perf_counter
    torch.set_num_threads(1)
    work = WORKLOADS[given.workload]
    print("steps/s", BY_PACKAGE[given.package](work, Clients(work.sizes, work.shape)))


if __name__ == "__main__":
    import peers  # Ray's actor finds functions by the name of their module

    peers.main()
