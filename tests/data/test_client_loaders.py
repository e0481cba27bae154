"""LoadersOnDemand: the loaders of many clients, each made when it is asked for, are those of the data module."""

import pytest
import torch
from test_federated_data import SIZES, Toy

from fedbc_lightning.data.loading import ClientLoaders, LoadersOnDemand

CLIENTS = [2, 0, 1]


class Counting(Toy):
    """Counts the loaders that are made."""

    num_made = 0

    def _reachable(self, device):
        self.num_made += 1
        return super()._reachable(device)


class Own(Toy):
    """Gives client 0 larger batches."""

    def client_train_dataloader(self, client, *args, **options):
        loader = super().client_train_dataloader(client, *args, **options)
        loader.batch_size += 2 * (client == 0)
        return loader


class OnInstance(Toy):
    """Has the method of the class above as an attribute of the object."""

    def __init__(self, **options):
        super().__init__(**options)
        self.client_train_dataloader = Own(**options).client_train_dataloader


def loaders_of(data):
    return data.client_train_dataloaders(CLIENTS, 5, seed=9, device=None)


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"hide": True}, {"val_fraction": 0.4}])
def test_they_are_the_loaders_that_the_data_module_makes_for_each_client(options):
    data = Toy(batch_size=3, **options)
    together = loaders_of(data)
    alone = ClientLoaders([data.client_train_dataloader(client, 5, seed=9) for client in CLIENTS])
    assert isinstance(together, LoadersOnDemand)
    assert len(together) == 3
    for one, other in zip([*together, *together[1:]], [*alone, *alone[1:]], strict=True):
        one.set_epoch(1)
        other.set_epoch(1)
        batches = [list(loader) for loader in (one, other)]
        assert all(map(torch.equal, *[[part for batch in of_one for part in batch] for of_one in batches]))
    assert together.num_batches.tolist() == alone.num_batches.tolist() == [len(loader) for loader in alone]
    assert together.sizes.tolist() == alone.sizes.tolist()
    assert together.datasets == alone.datasets
    assert together.gathers is alone.gathers is not options.get("hide", False)
    kept = together.sizes - 1
    assert torch.equal(together.orders(2, kept), alone.orders(2, kept))


def test_no_loader_is_made_but_the_first_one_until_it_is_asked_for():
    data = Counting()
    loaders = loaders_of(data)
    loaders.orders(3, loaders.sizes)
    assert (loaders.num_batches.sum(), loaders.gathers) == (3, True)
    assert data.num_made == 1
    assert loaders[2].num_samples == SIZES[1]
    assert data.num_made == 2


def test_data_that_do_not_shuffle_keep_their_order():
    data = Toy()
    data.shuffle = False
    loaders = loaders_of(data)
    assert torch.equal(loaders.orders(1, loaders.sizes), torch.cat([torch.arange(SIZES[k]) for k in CLIENTS]))


@pytest.mark.parametrize("kind", [Own, OnInstance])
def test_a_method_of_the_users_own_makes_each_loader(kind):
    loaders = loaders_of(kind(batch_size=3))
    assert [loader.batch_size for loader in loaders] == [3, 5, 3]
    assert not loaders.gathers


def test_loaders_for_evaluation_are_those_of_each_client_and_none_if_one_has_no_data():
    data = Toy(eval_batch_size=2)
    together = data.client_eval_dataloaders([2, 0], "test", device=None)
    assert isinstance(together, LoadersOnDemand)
    for client, loader in zip([2, 0], together, strict=True):
        alone = data.client_eval_dataloader(client)
        assert all(map(torch.equal, [x for x, _ in loader], [x for x, _ in alone]))
    assert data.client_eval_dataloaders([2, 1], "test", device=None) is None
