"""Facts about the data of clients elsewhere: the server asks for them before the run, and each client tells its own."""

from __future__ import annotations

from functools import partial

import numpy as np

from fedbc_lightning.core.errors import ConfigurationError
from fedbc_lightning.data import FederatedDataModule, SitesDataModule
from fedbc_lightning.data.datamodule import SPLITS
from fedbc_lightning.data.datasets import labels_of, num_items
from fedbc_lightning.distributed.backend import Ask, Backend, Lost, in_order
from fedbc_lightning.federation.expected import check_facts
from fedbc_lightning.federation.messages import Down, Facts, MessageError, decode, encode


def ask_for_facts(backend: Backend, datamodule: SitesDataModule) -> None:
    """Ask the clients whose data are elsewhere how many samples they have, before the data module is set up.

    Raises:
        ConfigurationError: A client does not answer.
    """
    clients = datamodule.elsewhere
    asks = [Ask([client], 1, encode(Down([client], [], None, {}, {}))) for client in clients]
    for client, answer in zip(clients, in_order(backend.work(b"", asks), asks, "data elsewhere"), strict=True):
        try:
            if isinstance(answer, Lost):
                raise MessageError(answer.reason)
            facts = decode(answer, Facts, partial(check_facts, client=client))
        except MessageError as error:
            raise ConfigurationError(
                f"trainer.backend: client {client}, whose data are elsewhere, does not say what it has: {error}"
            ) from None
        datamodule.take_facts(client, facts.counts[0])


def facts_of(datamodule: FederatedDataModule, clients: list[int]) -> Facts:
    """Return what clients tell of their data."""
    counts = []
    for client in clients:
        found = {}
        for split in SPLITS:
            dataset = datamodule.client_dataset(client, split)
            labels = None if dataset is None else labels_of(dataset)
            size = [0 if dataset is None else num_items(dataset)]
            found[split] = size if labels is None else np.bincount(labels).tolist()
        counts.append(found)
    return Facts(clients, counts)
