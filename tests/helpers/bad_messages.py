"""What can be wrong with the fields of a message: values of other kinds, and numbers that nobody can add up."""

import torch

NO_VALUE = [None, "x", 7.5, ["x"], [None], {"evil": 1}, {"evil": torch.zeros(1)}, torch.zeros(2, 3, 4)]


def of_another_kind(value):
    """Yield values that are none of the kind of a field's value."""
    if isinstance(value, torch.Tensor):
        yield from (value[..., :-1], value[None], value.bool(), value.new_zeros(()), value.to(torch.float8_e4m3fn))
    elif isinstance(value, list):
        yield from ([value * 2, value[:-1]] if value else [])
        yield from ([other] for item in value for other in of_another_kind(item))
    elif isinstance(value, dict):
        yield {**value, "evil": torch.zeros(1)}
        others = [(k, other) for k, v in value.items() for other in NO_VALUE if type(other) is not type(v)]
        others += [(k, other) for k, v in value.items() for other in of_another_kind(v)]
        yield from ({**value, k: other} for k, other in others)
    elif isinstance(value, float):
        yield 1e300


def filled(value, number):
    """Return a field's value with this number throughout its tensors of floating numbers."""
    if isinstance(value, dict):
        return {name: filled(item, number) for name, item in value.items()}
    if isinstance(value, list):
        return [filled(item, number) for item in value]
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return torch.full_like(value, number) if is_floating else value
