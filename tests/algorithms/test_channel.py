"""A part of the channel that the package does not have: pairwise masks, as in secure aggregation."""

from typing import Any

import pytest
import torch
from helpers.marks import each_engine
from helpers.quadratics import QuadraticData, Recorder
from torch import Tensor

from algorithms.running import fit
from algorithms.test_codecs import Spoils
from fedbc_lightning import Codecs, ConfigurationError
from fedbc_lightning.algorithms import SCAFFOLD, FedAvg
from fedbc_lightning.core.seeding import generator
from fedbc_lightning.federation.channel import ChannelPart, Exchange
from fedbc_lightning.server import BFloat16, ServerAdaptive, Sums, WeightedAverage
from fedbc_lightning.state.cohort import Cohort
from fedbc_lightning.state.declaration import ServerState


class PairwiseMasks(ChannelPart):
    """Hides each update from the server, which learns their sum alone.

    Clients i < j share a mask m_ij; i adds it to its update, and j subtracts it, so that all masks cancel in the sum.
    If a client drops out, the others tell the server their masks with it, and the server takes these off the sum.

    Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", section 4, without the
    exchange of keys: here the masks are drawn from the run's seed.

    Args:
        scale: Standard deviation of a mask.
    """

    def __init__(self, scale: float = 100.0) -> None:
        self.scale = scale
        self.seen: list[Tensor] = []

    def check(self, exchange: Exchange) -> None:
        """Refuse parts that look at single updates, and weights, with which masks do not cancel."""
        for part in exchange.server_parts:
            is_plain_sum = type(part) is WeightedAverage and part.by == "uniform" and part.rule is None
            if not (is_plain_sum or isinstance(part, ServerAdaptive)):
                raise ConfigurationError(f"masks: {type(part).__name__} needs more than the sum of all updates.")

    def send(self, updates: Tensor, cohort: Cohort, server: ServerState) -> Tensor:
        """Add the masks that each client shares with all others of the round; ``seen`` keeps what the server sees."""
        messages = updates + torch.stack([self._masks(client, server.ids, server) for client in cohort.ids])
        self.seen.append(messages)
        return messages

    def receive(self, server: ServerState, sums: Sums) -> None:
        """Take off the masks that the clients share with those that dropped out."""
        valid = [record["client"] for record in server.valid_records]
        lost = [client for client in server.ids if client not in valid]
        for client in valid:
            sums.add("weighted_model", -self._masks(client, lost, server))

    def _masks(self, client: int, others: list[int], server: ServerState) -> Tensor:
        """Return the sum of the masks of a client with some others."""
        total = torch.zeros_like(server.z)
        for other in others:
            pair, sign = sorted((client, other)), (other > client) - (other < client)
            draws = generator(server.seed, "pairwise mask", server.round, pair[0], step=pair[1])
            total += sign * self.scale * torch.randn(len(total), generator=draws, dtype=total.dtype)
        return total


def train(root: Any, algorithm: Any, **options: Any) -> Any:
    options = {"max_rounds": 3, "clients_per_round": 4} | options
    return fit(root, algorithm, QuadraticData(), Recorder(), **options)[0]


@each_engine
def test_masks_cancel_in_the_sum_even_if_a_client_drops_out(tmp_path, engine):
    options = {"engine": engine, "callbacks": [Spoils()] if engine == "sequential" else []}
    plain, masks = train(tmp_path, FedAvg("uniform"), **options), PairwiseMasks()
    masked = train(tmp_path, FedAvg("uniform"), channel=[masks], **options)
    torch.testing.assert_close(masked.server.z, plain.server.z, rtol=0, atol=1e-12)
    assert len(masked.server.valid_records) == 4 - len(options["callbacks"])
    assert all(messages.nan_to_num(99.0).abs().max() > 10 for messages in masks.seen)  # updates are below 5


def test_what_the_masks_hide_is_the_code_of_an_update(tmp_path):
    codec = Codecs(up=BFloat16())
    coded, both = (train(tmp_path, FedAvg("uniform"), codec=codec, channel=c) for c in (None, [PairwiseMasks()]))
    torch.testing.assert_close(both.server.z, coded.server.z, rtol=0, atol=1e-12)


@pytest.mark.parametrize("algorithm", [FedAvg("samples"), SCAFFOLD()])
def test_a_method_that_needs_more_than_the_sum_is_refused(tmp_path, algorithm):
    with pytest.raises(ConfigurationError, match=r"masks: (WeightedAverage|ControlVariates) needs more than the sum"):
        train(tmp_path, algorithm, channel=[PairwiseMasks()])
