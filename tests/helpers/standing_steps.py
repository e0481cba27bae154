"""Steps that ask what Python can see of a weight, and not of the tensor that stands for it when it is replayed."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def weight_of(module):
    return module.net[0].weight


def flag(module):
    return 1.0 if getattr(weight_of(module), "no_decay", False) else 2.0


def class_of_it(module):
    return 1.0 if type(weight_of(module)) is nn.Parameter else 2.0


def instance(module):
    return 1.0 if isinstance(weight_of(module), nn.Parameter) else 2.0


def same_object(module):
    return 1.0 if weight_of(module) is module.net[2].weight else 2.0


def key(module):
    return {weight_of(module): 1.0}.get(module.net[2].weight, 2.0)


def member(module):
    return 1.0 if (weight_of(module), 0) in [(module.net[2].weight, 0)] else 2.0


def equal_tuples(module):
    return 1.0 if (weight_of(module),) == (module.net[2].weight,) else 2.0


def counted(module):
    return [(weight_of(module),)].count((module.net[2].weight,)) + 1.0


def offset(module):
    return weight_of(module).storage_offset() + 1.0


def windows(module):
    return weight_of(module).as_strided((2, 2), (1, 1)).sum()


def mode_of_others(module):
    return 1.0 if HELPER.training else 2.0


HELPER = nn.Dropout(0.5)
RECORD = {"rate": 1.0}


class Settings:
    """Holds one number."""

    def __init__(self):
        self.rate = 1.0


SETTINGS, PAIRS, LIST = Settings(), [["rate", 1.0]], [1.0]


def replaced_fields(module):
    return SETTINGS.rate


def updated(module):
    found = {"rate": 0.0}
    found.update(RECORD)
    return found["rate"]


def updated_by_pairs(module):
    found = {"rate": 0.0}
    found.update(PAIRS)
    return found["rate"]


def sliced(module):
    found = [0.0]
    found[:] = LIST
    return found[0]


NUMPY_RECORD = np.array([(1.0,)], dtype=[("rate", "f8")])[0]


def field_of_a_record(module):
    return float(NUMPY_RECORD["rate"])


def extended(module):
    found = [0.0]
    found.extend(RECORD)
    return float(len(found))


def set_updated(module):
    found = {"other"}
    found.update(RECORD)
    return float(len(found))


class Descriptor:
    """Is asked by a dataclass where a field is set."""

    def __get__(self, owner, kind=None):
        return 1.0

    def __set__(self, owner, value):
        RECORD["rate"] = value


@dataclass
class Described:
    """A dataclass whose field is one."""

    rate: float = Descriptor()


def described(module):
    return Described(2.0).rate


def grows(module):
    found = {"a": 1.0}
    for key in found:
        found[key + "a"] = 2.0
    return 1.0


REFUSED = {
    way.__name__: way
    for way in (
        flag, class_of_it, instance, same_object, key, member, equal_tuples, counted, offset, windows,
        field_of_a_record, described, grows,
    )
}  # fmt: skip
CHANGED = {
    "the mode of a module that is not a child": (mode_of_others, lambda: HELPER.train(not HELPER.training)),
    "all attributes of an object at once": (replaced_fields, lambda: setattr(SETTINGS, "__dict__", {"rate": 3.0})),
    "a dict that another one is updated with": (updated, lambda: RECORD.update(rate=RECORD["rate"] + 1)),
    "pairs that a dict is updated with": (updated_by_pairs, lambda: PAIRS[0].__setitem__(1, PAIRS[0][1] + 1)),
    "a dict that a list is extended with": (extended, lambda: RECORD.update({f"more {len(RECORD)}": 1.0})),
    "a dict that a set is updated with": (set_updated, lambda: RECORD.update({f"more {len(RECORD)}": 1.0})),
    "a list that is put into another one": (sliced, lambda: LIST.__setitem__(0, LIST[0] + 1)),
}


class Ordered:
    """Compares itself by code of its own."""

    def __lt__(self, other):
        return True

    def __eq__(self, other):
        return True

    __hash__ = None


def sorts(module):
    found = [Ordered(), Ordered()]
    found.sort()
    return 1.0


def removes(module):
    found = [Ordered()]
    found.remove(1)
    return 1.0


REFUSED |= {"sorts": sorts, "removes": removes}


class Saving(torch.overrides.TorchFunctionMode):
    """Counts the functions of torch that are called."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    """Sees all operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
