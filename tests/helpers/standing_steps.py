"""Steps that ask what Python can see of a weight, and not of the tensor that stands for it when it is replayed."""

import torch
from torch import nn


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


REFUSED = {
    way.__name__: way
    for way in (
        flag, class_of_it, instance, same_object, key, member, equal_tuples, counted, offset, windows,
    )
}  # fmt: skip
CHANGED = {
    "the mode of a module that is not a child": (mode_of_others, lambda: HELPER.train(not HELPER.training)),
    "all attributes of an object at once": (replaced_fields, lambda: setattr(SETTINGS, "__dict__", {"rate": 3.0})),
    "a dict that another one is updated with": (updated, lambda: RECORD.update(rate=RECORD["rate"] + 1)),
    "pairs that a dict is updated with": (updated_by_pairs, lambda: PAIRS[0].__setitem__(1, PAIRS[0][1] + 1)),
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
