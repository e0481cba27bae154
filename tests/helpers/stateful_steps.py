"""Ways in which a ``training_step`` keeps state outside of its module, or depends on something that is not compared."""

import builtins
import contextlib
import contextvars
import enum
import functools
import itertools
import logging
import os
import random
import threading
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional

STEP = 0
COUNTS = {"steps": 0}
RNG = np.random.default_rng(0)
LOCAL = threading.local()
VARIABLE = contextvars.ContextVar("variable", default=0)


class Plain(LightningModule):
    """A step that is a function of weights and batch, times what a way makes of its state.

    Args:
        way: Called with the module in every step; gives a number, or a tensor without dimensions.
    """

    def __init__(self, way=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3))
        self.way = way

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.log("train_accuracy", (outputs.argmax(1) == batch[1]).float().mean())
        loss = functional.cross_entropy(outputs, batch[1])
        return loss if self.way is None else loss * self.way(self)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def module_global(module):
    global STEP
    STEP += 1
    return 1 / STEP


def function_attribute(module):
    function_attribute.count += 1
    return 1 / function_attribute.count


function_attribute.count = 0


def _closure():
    count = 0

    def way(module):
        nonlocal count
        count += 1
        return 1 / count

    return way


def _closed_list():
    held = []

    def way(module):
        held.append(1)
        return 1 / len(held)

    return way


class Meter:
    """A helper that counts, in as many places as there are."""

    total = 0

    def __init__(self):
        self.count, self.items = 0, []

    def __call__(self, module):
        self.count += 1
        return 1 / self.count

    def count_in_class(self, module):
        type(self).total += 1
        return 1 / type(self).total

    @staticmethod
    def count_statically(module):
        Meter.total += 1
        return 1 / Meter.total

    @classmethod
    def count_by_class(cls, module):
        cls.total += 1
        return 1 / cls.total

    @property
    def value(self):
        self.count += 1
        return 1 / self.count

    def __getattr__(self, name):
        if name != "missing":
            raise AttributeError(name)
        self.count += 1
        return 1 / self.count

    def __rmul__(self, other):
        self.count += 1
        return other / self.count

    def __mul__(self, other):
        self.count += 1
        return other / self.count

    def __len__(self):
        self.count += 1
        return self.count

    def __bool__(self):
        self.count += 1
        return self.count % 2 == 0

    def __iter__(self):
        self.count += 1
        return iter([self.count])

    def __contains__(self, item):
        self.count += 1
        return self.count % 2 == 0

    def __getitem__(self, item):
        self.count += 1
        return 1 / self.count

    def __eq__(self, other):
        self.count += 1
        return self.count % 2 == 0

    __hash__ = object.__hash__

    def __format__(self, spec):
        self.count += 1
        return str(self.count)

    def __float__(self):
        self.count += 1
        return 1 / self.count

    def __enter__(self):
        self.count += 1
        return 1 / self.count

    def __exit__(self, *error):
        return None

    def add(self, number):
        self.items.append(number)
        return 1.0


METER = Meter()


class CountingLoss(nn.Module):
    """A loss object of the module of the user's code, as many write them."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, value):
        self.calls += 1
        return value / self.calls


LOSS = CountingLoss()


def loss_object(module):
    return LOSS(torch.ones(()))


def _generator():
    def numbers():
        count = 0
        while True:
            count += 1
            yield 1 / count

    held = numbers()
    return lambda module: next(held)


def default_argument(module, held=[0]):  # noqa: B006  (the state is the point)
    held[0] += 1
    return 1 / held[0]


def rare_mixup(module):
    return 0.5 if RNG.random() < 0.02 else 1.0


def nested_dict(module):
    COUNTS["steps"] += 1
    return 1 / COUNTS["steps"]


def module_attribute(module):
    module.count = getattr(module, "count", 0) + 1
    return 1 / module.count


def by_setattr(module):
    setattr(module, "count", getattr(module, "count", 0) + 1)  # noqa: B010
    return 1 / module.count


def by_object_setattr(module):
    object.__setattr__(module, "count", getattr(module, "count", 0) + 1)
    return 1 / module.count


def by_own_dict(module):
    module.__dict__["count"] = module.__dict__.get("count", 0) + 1
    return 1 / module.__dict__["count"]


def by_vars(module):
    vars(module)["count"] = vars(module).get("count", 0) + 1
    return 1 / vars(module)["count"]


def by_globals(module):
    globals()["STEP"] += 1
    return 1 / STEP


def by_exec(module):
    exec("COUNTS['steps'] += 1", globals())
    return 1 / COUNTS["steps"]


def by_import(module):
    import helpers.stateful_steps as own

    own.STEP += 1
    return 1 / own.STEP


def _holding(kind, use):
    held = kind()

    def way(module):
        return use(held)

    return way


def extend_deque(held):
    held.append(1)
    return 1 / len(held)


def count_next(held):
    return 1 / next(held)


def count_counter(held):
    held["steps"] += 1
    return 1 / held["steps"]


def grow_default(held):
    _ = held[len(held)]
    return 1 / len(held)


def count_namespace(held):
    held.inner.count += 1
    return 1 / held.inner.count


def add_in_place(held):
    held += 1
    return float(held.sum())


def add_to_tensor(held):
    held.add_(1)
    return 1 / held


def add_to_data(held):
    held.data += 1
    return 1 / held


def draw_tensor(held):
    return torch.rand((), generator=held)


@dataclass(slots=True)
class Slots:
    count: int = 0


def count_slots(held):
    held.count += 1
    return 1 / held.count


@functools.lru_cache(maxsize=None)  # noqa: UP033
def _cached(number):
    COUNTS["steps"] += 1
    return 1 / COUNTS["steps"]


def environment(module):
    os.environ["FEDBC_STEPS"] = str(int(os.environ.get("FEDBC_STEPS", "0")) + 1)
    return 1 / int(os.environ["FEDBC_STEPS"])


def clock(module):
    return 1 + time.perf_counter() % 1


def thread_local(module):
    LOCAL.count = getattr(LOCAL, "count", 0) + 1
    return 1 / LOCAL.count


def context_variable(module):
    VARIABLE.set(VARIABLE.get() + 1)
    return 1 / VARIABLE.get()


class Counted(torch.autograd.Function):
    """Counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx, value):
        Counted.calls += 1
        return value / Counted.calls

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Descriptor:
    """Counts how often it is read."""

    def __init__(self):
        self.count = 0

    def __get__(self, instance, owner):
        self.count += 1
        return 1 / self.count


class Described:
    number = Descriptor()


class Meta(type):
    """A class of classes that counts."""

    def __getattr__(cls, name):
        if name != "number":
            raise AttributeError(name)
        COUNTS["steps"] += 1
        return 1 / COUNTS["steps"]

    def __instancecheck__(cls, instance):
        COUNTS["steps"] += 1
        return COUNTS["steps"] % 2 == 0


class OfMeta(metaclass=Meta):
    pass


class Deciding:
    """Decides by itself what its attributes are."""

    def __getattribute__(self, name):
        COUNTS["steps"] += 1
        return 1 / COUNTS["steps"]


class Number(enum.Enum):
    """An enumeration whose members count how often they multiply."""

    TWO = 2

    def __rmul__(self, other):
        COUNTS["steps"] += 1
        return other / COUNTS["steps"]


class MyList(list):
    def __getitem__(self, item):
        COUNTS["steps"] += 1
        return 1 / COUNTS["steps"]


class MyInt(int):
    def __mul__(self, other):
        COUNTS["steps"] += 1
        return other / COUNTS["steps"]

    __rmul__ = __mul__


@contextlib.contextmanager
def counting():
    COUNTS["steps"] += 1
    yield 1 / COUNTS["steps"]


def in_context(module):
    with counting() as number:
        return number


def in_object_context(module):
    with METER as number:
        return number


def count_key(number):
    COUNTS["steps"] += 1
    return -number


def by_yield(module):
    def numbers():
        COUNTS["steps"] += 1
        yield 1 / COUNTS["steps"]

    return sum(numbers())


def late_generator(module):
    factor = 1.0
    numbers = (factor * number for number in (1.0, 2.0))
    factor = 2.0
    return sum(numbers) if factor > 1 else 1.0


def late_map(module):
    numbers = [1.0]
    doubled = zip(numbers, numbers, strict=True)
    numbers.append(2.0)
    return float(len(list(doubled)))


def growing_list(module):
    numbers = [1.0]
    for number in numbers:
        if len(numbers) < 5:
            numbers.append(number)
    return float(len(numbers))


def set_of_objects(module):
    return 1.0 + sum(k * len(cls.__name__) for k, cls in enumerate({Meter, Slots}))


def swallowed(module):
    try:
        COUNTS["steps"] += 1
    except Exception:
        return 1.0
    finally:
        COUNTS["finally"] = 1
    return 1 / COUNTS["steps"]


def logs_by_function(module):
    module.log("train_counted", torch.ones(()), reduce_fx=count_key)
    return 1.0


def writes_file(module):
    with open(os.devnull, "a") as file:
        file.write("step")
    return 1.0


def prints(module):
    print("step", flush=True)
    return 1.0


def logs_messages(module):
    logging.getLogger("mine").warning("step")
    return 1.0


def sets_seed(module):
    torch.manual_seed(0)
    return 1.0


def sets_default(module):
    torch.set_default_dtype(torch.get_default_dtype())
    return 1.0


def registers_hook(module):
    module.net[0].weight.register_hook(lambda gradient: gradient * 2)
    return 1.0


def freezes(module):
    module.net[0].bias.requires_grad_(False)
    return 1.0


def writes_weight(module):
    with torch.no_grad():
        module.net[0].bias.mul_(0.9)
    return 1.0


def writes_gradient(module):
    return 1.0 if module.net[0].bias.grad is None else 0.5


def looks_at_value(module):
    return 1.0 if module.net[0].bias.sum() > 0 else 2.0


def item_of_value(module):
    return module.net[0].bias.sum().item()


def shape_by_value(module):
    return module.net[0].bias[module.net[0].bias > 0].shape[0] + 1.0


def switches_mode(module):
    module.net.eval()
    return 1.0


def epoch(module):
    return 1 / (1 + module.current_epoch)


def keeps_output(module):
    METER.items.append(module.net[0].bias.sum())
    return 1.0


WAYS = {
    "module global": lambda: module_global, "function attribute": lambda: function_attribute, "closure": _closure,
    "closed list": _closed_list, "callable object": Meter, "bound method": lambda: METER.count_in_class,
    "static method": lambda: Meter.count_statically, "class method": lambda: Meter.count_by_class,
    "property": lambda: lambda m: METER.value, "getattr": lambda: lambda m: METER.missing,
    "multiplication": lambda: lambda m: METER,
    "length": lambda: lambda m: 1 / len(METER),
    "truth": lambda: lambda m: 1.0 if METER else 2.0,
    "iteration": lambda: lambda m: 1 / sum(METER),
    "containment": lambda: lambda m: 1.0 if 3 in METER else 2.0,
    "item": lambda: lambda m: METER[0],
    "equality": lambda: lambda m: 1.0 if METER == 3 else 2.0,
    "formatting": lambda: lambda m: 1 / int(f"{METER}"),
    "conversion": lambda: lambda m: float(METER),
    "accountant": lambda: lambda m: METER.add(1),
    "loss object": lambda: loss_object, "generator": _generator, "default argument": lambda: default_argument,
    "rare mixup": lambda: rare_mixup, "dict": lambda: nested_dict, "module attribute": lambda: module_attribute,
    "setattr": lambda: by_setattr, "object.__setattr__": lambda: by_object_setattr, "__dict__": lambda: by_own_dict,
    "vars": lambda: by_vars, "globals()": lambda: by_globals, "exec": lambda: by_exec, "import": lambda: by_import,
    "deque": lambda: _holding(deque, extend_deque),
    "itertools.count": lambda: _holding(functools.partial(itertools.count, 1), count_next),
    "random.Random": lambda: _holding(random.Random, random.Random.random),
    "numpy generator": lambda: _holding(np.random.default_rng, np.random.Generator.random),
    "torch generator": lambda: _holding(torch.Generator, draw_tensor),
    "random": lambda: lambda m: random.random(),
    "numpy.random": lambda: lambda m: float(np.random.rand()),
    "Counter": lambda: _holding(Counter, count_counter),
    "defaultdict": lambda: _holding(functools.partial(defaultdict, int), grow_default),
    "namespace": lambda: _holding(lambda: SimpleNamespace(inner=SimpleNamespace(count=0)), count_namespace),
    "slots": lambda: _holding(Slots, count_slots),
    "array": lambda: _holding(lambda: np.zeros(2), add_in_place),
    "tensor": lambda: _holding(lambda: torch.zeros(()), add_to_tensor),
    "tensor.data": lambda: _holding(lambda: torch.zeros(()), add_to_data),
    "cache": lambda: lambda m: _cached(len(COUNTS)),
    "environment": lambda: environment, "clock": lambda: clock, "thread": lambda: thread_local,
    "context variable": lambda: context_variable,
    "autograd function": lambda: lambda m: Counted.apply(torch.ones(())),
    "descriptor": lambda: lambda m: Described().number,
    "metaclass": lambda: lambda m: OfMeta.number,
    "instance check": lambda: lambda m: 1.0 if isinstance(3, OfMeta) else 2.0,
    "getattribute": lambda: lambda m: Deciding().anything,
    "enumeration": lambda: lambda m: Number.TWO,
    "list of one's own": lambda: _holding(lambda: MyList([1]), lambda held: held[0]),
    "int of one's own": lambda: _holding(lambda: MyInt(3), lambda held: held),
    "context": lambda: in_context, "context object": lambda: in_object_context,
    "key function": lambda: lambda m: sorted([1.0, 2.0], key=count_key)[0],
    "map": lambda: lambda m: sum(map(count_key, [1.0])),
    "partial": lambda: functools.partial(default_argument, held=[0]),
    "yield": lambda: by_yield, "try": lambda: swallowed, "log by function": lambda: logs_by_function,
    "file": lambda: writes_file, "print": lambda: prints, "logging": lambda: logs_messages, "seed": lambda: sets_seed,
    "default dtype": lambda: sets_default, "hook": lambda: registers_hook, "freezing": lambda: freezes,
    "weight": lambda: writes_weight, "gradient": lambda: writes_gradient, "value": lambda: looks_at_value,
    "item()": lambda: item_of_value, "mask": lambda: shape_by_value, "mode": lambda: switches_mode,
    "epoch": lambda: epoch, "kept output": lambda: keeps_output,
    "late generator": lambda: late_generator, "late zip": lambda: late_map, "growing list": lambda: growing_list,
    "set of objects": lambda: set_of_objects,
    "chained": lambda: lambda m: sum(itertools.chain(METER)),
    "builtins": lambda: lambda m: builtins.setattr(m, "count", 1) or 1.0,
}  # fmt: skip
"""Name -> maker of a way."""
