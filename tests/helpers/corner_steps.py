"""Steps in which code of the user's would run unseen, values decide, or something that the step rests on changes."""

import abc
import enum
import functools
import operator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from fedbc_lightning import recordable

EFFECTS = [0]
ARRAY = np.zeros(2)
MEAN, VARIANCE = torch.zeros(8), torch.ones(8)


def happens(value=1.0):
    """Leave a trace outside of the step, and give the value back."""
    EFFECTS[0] += 1
    return value


def traces():
    """Everything that the ways here and in ``path_steps`` change outside of their modules."""
    return EFFECTS[0], ARRAY.tolist(), MEAN.tolist(), VARIANCE.tolist()


UFUNC = np.frompyfunc(lambda number: happens(1.0), 1, 1)


def writes_a_positional_output(module):
    np.add(ARRAY, 1.0, ARRAY)
    return 1.0


def adds_to_an_item_of_a_list(module):
    found = operator.getitem([ARRAY], 0)
    found += 1
    return 1.0


def writes_into_the_largest(module):
    found = max([ARRAY])
    found[0] += 1
    return 1.0


class Member(enum.Enum):
    """An enumeration whose members do something whenever they are used."""

    TWO = 2

    def __rmul__(self, other):
        return happens(other)

    def __float__(self):
        return happens(2.0)

    def __str__(self):
        return happens("TWO")

    def __hash__(self):
        return happens(0)


def finds_a_member(module):
    return {Member.TWO: 1.0}[Member.TWO]


class WithValue(enum.Enum):
    ONE = 1

    @property
    def value(self):
        return happens(1.0)


class MakesNames(enum.EnumMeta):
    def __getattr__(cls, name):
        if name != "made":
            raise AttributeError(name)
        return happens(1.0)


class WithNames(enum.Enum, metaclass=MakesNames):
    ONE = 1


class Double(np.float64):
    def __mul__(self, other):
        return happens(other)

    __rmul__ = __mul__


class Pair(NamedTuple):
    first: float
    second: float

    def __add__(self, other):
        return happens(self)


class FakePair(tuple):
    _fields = ()

    def __new__(cls, *items):
        return happens(tuple.__new__(cls, items))


class Generic:
    def __class_getitem__(cls, item):
        return happens(1.0)


class TrueOrNot(type):
    def __bool__(cls):
        return happens(True)


class OfTrueOrNot(metaclass=TrueOrNot):
    pass


class OwnTensor(torch.Tensor):
    def __bool__(self):
        return happens(True)


class TrueList(list):
    def __bool__(self):
        return happens(True)


class InheritsTruth(TrueList):
    pass


class Key:
    """A key that collides with another one, and compares itself with it."""

    def __hash__(self):
        return hash("first")

    def __eq__(self, other):
        return happens(False)


class OwnProperty(property):
    def __get__(self, instance, owner=None):
        return happens(1.0)


class OwnStatic(staticmethod):
    def __get__(self, instance, owner=None):
        return happens(staticmethod.__get__(self, instance, owner))


class Described:
    @OwnProperty
    def number(self):
        return 1.0

    @OwnStatic
    def one():
        return 1.0


class Descriptor:
    def __get__(self, instance, owner):
        return happens(1.0)


class HasDescriptor:
    number = Descriptor()


class Hooked(abc.ABC):  # noqa: B024  (its hook is the point)
    @classmethod
    def __subclasshook__(cls, other):
        return happens(NotImplemented)


class InheritsHook(Hooked):
    pass


class Endless:
    def __next__(self):
        return happens(1.0)


class Three:
    def __init__(self):
        self.count = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        if self.count > 3:
            raise StopIteration
        return happens(self.count)


class LiesAboutItsClass:
    @property
    def __class__(self):
        return happens(LiesAboutItsClass)


def asks_for_the_class(module):
    return 1.0 if isinstance(LIAR, nn.Module) else 2.0


class ChecksErrors(type):
    def __subclasscheck__(cls, other):
        return happens(False)

    def __instancecheck__(cls, other):
        return happens(False)


def catches_by_metaclass(module):
    return 2.0 if isinstance(ERROR, OwnError) else 1.0


class OwnError(Exception, metaclass=ChecksErrors):
    pass


ERROR, LIAR, THIRD = ValueError(), LiesAboutItsClass(), Described()


@recordable
def harmless(module):
    return 1.0


@functools.wraps(harmless)
def wrapper_with_effect(module):
    return happens(harmless(module))


TENSOR, TRUE, DOUBLE = torch.zeros(1).as_subclass(OwnTensor), InheritsTruth([1]), Double(2.0)
KEYS, PAIR = {Key(): 1.0, "second": 2.0}, (1.0, 2.0)

UNSEEN = {
    "function of NumPy made of Python": lambda: lambda m: float(UFUNC(2.0)),
    "positional output": lambda: writes_a_positional_output,
    "item by operator": lambda: adds_to_an_item_of_a_list, "largest": lambda: writes_into_the_largest,
    "member multiplied": lambda: lambda m: operator.mul(2.0, Member.TWO),
    "member as number": lambda: lambda m: float(Member.TWO),
    "member as string": lambda: lambda m: float(len(str(Member.TWO))),
    "member as key": lambda: finds_a_member,
    "value of a member": lambda: lambda m: WithValue.ONE.value,
    "name made by an enumeration": lambda: lambda m: WithNames.made,
    "number of NumPy of one's own": lambda: lambda m: float(3.0 * DOUBLE),
    "sum of named tuples": lambda: lambda m: (Pair(*PAIR) + Pair(*PAIR)).first,
    "tuple with fields": lambda: lambda m: FakePair(1.0)[0], "item of a class": lambda: lambda m: Generic[1],
    "item of a class by operator": lambda: lambda m: operator.getitem(Generic, 1),
    "truth of a class": lambda: lambda m: 1.0 if OfTrueOrNot else 2.0,
    "truth of a tensor of one's own": lambda: lambda m: 1.0 if TENSOR else 2.0,
    "inherited truth": lambda: lambda m: 1.0 if TRUE else 2.0,
    "key that compares itself": lambda: lambda m: KEYS.get("first", 1.0),
    "property of one's own": lambda: lambda m: THIRD.number,
    "static method of one's own": lambda: lambda m: THIRD.one(),
    "descriptor through its class": lambda: lambda m: HasDescriptor.number,
    "inherited subclass hook": lambda: lambda m: 1.0 if isinstance(THIRD, InheritsHook) else 2.0,
    "next of an object": lambda: lambda m: next(Endless()),
    "iterator of one's own": lambda: lambda m: float(sum(Three())),
    "class by property": lambda: asks_for_the_class, "error by metaclass": lambda: catches_by_metaclass,
    "wrapper of a vouched function": lambda: wrapper_with_effect,
}  # fmt: skip
"""Name -> maker of a way that leaves a trace whenever it runs."""
