"""Steps in which values decide about Python, that look at ``batch_idx``, or that rest on something that changes."""

import abc

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from helpers.corner_steps import MEAN, VARIANCE, happens
from helpers.stateful_steps import Plain

LOW = np.full(8, -9.0, dtype=np.float32)


def bias(module):
    return module.net[0].bias.detach()


def small_integers(module):
    return (bias(module) * 20).long()


def writes_the_bias(module):
    return 2.0 if "-0.2" in repr(bias(module)) else 1.0


def factorizes(module):
    try:
        torch.linalg.cholesky(torch.eye(2) * bias(module)[0].sign())
    except Exception:
        return 2.0
    return 1.0


def finds_the_target(module):
    try:
        functional.cross_entropy(torch.zeros(1, 3), small_integers(module)[:1] + 2)
    except Exception:
        return 2.0
    return 1.0


def finds_the_item(module):
    try:
        torch.zeros(4)[small_integers(module)]
    except IndexError:
        return 2.0
    return 1.0


def is_probability(module):
    try:
        functional.binary_cross_entropy(bias(module)[:1], torch.ones(1))
    except Exception:
        return 2.0
    return 1.0


VALUES = {
    "str": lambda m: float(len(str(bias(m)))),
    "repr": writes_the_bias,
    "address of an iterator": lambda m: float(int(str(iter([]))[-5:-1], 16)),
    "__repr__": lambda m: 2.0 if "-0.2" in bias(m).__repr__() else 1.0,
    "percent": lambda m: 2.0 if "-0.2" in "%s" % bias(m) else 1.0,  # noqa: UP031
    "format of a string": lambda m: 2.0 if "-0.2" in "{}".format(bias(m)) else 1.0,  # noqa: UP032
    "format": lambda m: 2.0 if "-0.2" in format(bias(m)) else 1.0,
    "format of one number": lambda m: 2.0 if "-0.2" in format(bias(m)[0]) else 1.0,
    "attribute in a format": lambda m: float(len("{0._version}".format(m.net[0].bias))),  # noqa: UP030, UP032
    "gradient in a format": lambda m: float(len("{0.grad}".format(m.net[0].bias))),  # noqa: UP030, UP032
    "hash": lambda m: float(m.net[0].bias.__hash__() % 1000003), "version": lambda m: float(m.net[0].bias._version),
    "type": lambda m: float(len(bias(m).type())), "address": lambda m: float(bias(m).data_ptr()),
    "same memory": lambda m: float(bias(m).is_set_to(bias(m))), "pinned": lambda m: float(bias(m).is_pinned()),
    "function of NumPy": lambda m: float(np.exp(bias(m))[0]),
    "number of NumPy": lambda m: float(np.float64(bias(m)[0])),
    "sum by NumPy": lambda m: float(np.add(bias(m)[0], np.float64(0))),
    "maximum by NumPy": lambda m: float(np.maximum(LOW, bias(m))[0]),
    "parts": lambda m: float(torch.tensor_split(torch.arange(10.0), small_integers(m).abs())[0].shape[0]),
    "sparse": lambda m: float(bias(m).relu().to_sparse()._nnz()),
    "equal": lambda m: float(torch.equal(bias(m), torch.full((8,), 0.37))),
    "close": lambda m: float(torch.allclose(bias(m), torch.full((8,), 0.37))),
    "nonzero": lambda m: float(torch.is_nonzero(bias(m)[0])),
    "tensor of tensors": lambda m: torch.tensor([bias(m)[0], bias(m)[1]]).sum(),
    "list as index": lambda m: torch.arange(100.0)[[small_integers(m)[0].abs()]].sum(),
    "counts": lambda m: float(torch.bincount(small_integers(m).abs()).shape[0]),
    "positions": lambda m: float(torch.argwhere(bias(m) > 0).shape[0]),
    "factorization": factorizes, "target": finds_the_target, "item": finds_the_item, "probability": is_probability,
}  # fmt: skip
"""Name -> a way whose Python values may depend on values of weights or on addresses."""

FORMS = {
    "stride": lambda m: float(bias(m).stride()[0]),
    "histogram": lambda m: float(torch.histc(bias(m), 3).shape[0]),
    "positions of a given number": lambda m: float(torch.nonzero_static(bias(m) > 0, size=2).shape[0]),
}
"""Name -> a way whose Python values depend on the forms of weights alone."""


class IndexAttribute(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1.0 + getattr(batch_idx, "real", 0))


class IndexClass(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (happens() if batch_idx.__class__ is int else 1.0)


class IndexHas(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (happens() if hasattr(batch_idx, "real") else 1.0)


class IndexTried(Plain):
    def training_step(self, batch, batch_idx):
        try:
            batch_idx.bit_length()
        except AttributeError:
            return super().training_step(batch, batch_idx)
        return super().training_step(batch, batch_idx) * happens()


class IndexCalled(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (2.0 if callable(batch_idx) else happens())


class HeldStatistics(Plain):
    def forward(self, inputs):
        return self.net[2](functional.batch_norm(self.net[0](inputs), MEAN, VARIANCE, training=True))


class BatchStatistics(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, inputs):
        return self.net(self.norm(inputs))


class UncountedStatistics(BatchStatistics):
    def __init__(self):
        super().__init__()
        self.norm.num_batches_tracked = None


class InstanceStatistics(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, inputs):
        return self.net(self.norm(inputs[:, None])[:, 0])


class OwnCall(nn.Module):
    def forward(self, inputs):
        return inputs

    def _call_impl(self, *args):
        return happens(self.forward(*args))


class HasOwnCall(Plain):
    def __init__(self):
        super().__init__()
        self.layer = OwnCall()

    def forward(self, inputs):
        return self.net(self.layer(inputs))


class OwnWalk(Plain):
    def named_parameters(self, *args, **options):
        return happens(super().named_parameters(*args, **options))

    def forward(self, inputs):
        return self.net(inputs) * sum(1.0 for _ in self.parameters())


MODULES = (
    IndexAttribute, IndexClass, IndexHas, IndexTried, IndexCalled, HeldStatistics, BatchStatistics,
    UncountedStatistics, InstanceStatistics, HasOwnCall, OwnWalk,
)  # fmt: skip
"""Modules whose steps look at ``batch_idx``, write into what was there before, or run code of their own unseen."""


def _registered():
    class Kind(abc.ABC):  # noqa: B024  (classes are registered with it)
        pass

    class Other:
        pass

    held = Other()

    def way(module):
        return 1.0 if isinstance(held, Kind) else 2.0

    return way, lambda: Kind.register(Other)


def _one_and_three():
    class One:
        def number(self):
            return 1.0

    class Three:
        def number(self):
            return 3.0

    return One, Three


def _class_of_an_object():
    one, three = _one_and_three()
    held = one()

    def way(module):
        return held.number()

    return way, lambda: setattr(held, "__class__", three)


def _bases_of_a_class():
    one, three = _one_and_three()
    kind = type("Kind", (one,), {})
    held = kind()

    def way(module):
        return held.number()

    return way, lambda: setattr(kind, "__bases__", (three,))


def _name_of_a_class():
    one, _ = _one_and_three()
    held = one()

    def way(module):
        return float(len(type(held).__name__))

    return way, lambda: setattr(one, "__name__", "Another")


def _default_list():
    def way(module, *, held=[]):  # noqa: B006  (that it can change is the point)
        return len(held) + 1.0

    return way, lambda: way.__kwdefaults__["held"].append(1)


def _default_device():
    def way(module):
        return 1.0 if torch.zeros(1).device.type == "cpu" else 2.0

    return way, lambda: torch.set_default_device("meta")


def _form_of_an_array():
    held = np.array([1.0, 2.0])

    def way(module):
        return float(torch.as_tensor(held).shape[0])

    return way, lambda: setattr(held, "shape", (1, 2))


CHANGES = {
    "registered class": _registered, "class of an object": _class_of_an_object, "bases of a class": _bases_of_a_class,
    "name of a class": _name_of_a_class, "list as default": _default_list, "default device": _default_device,
    "form of an array": _form_of_an_array,
}  # fmt: skip
"""Name -> maker of a way and of a change after which it gives another number."""
