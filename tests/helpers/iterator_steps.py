"""Steps with iterators, generators and containers that leave a trace on the path that Python takes."""

import itertools

from helpers.corner_steps import happens


def zip_of_one_iterator(module):
    numbers, count = iter([1.0, 2.0, 3.0, 4.0]), 0.0
    for _ in zip(numbers, numbers, strict=True):
        count += 1
    return happens(count) if count == 2 else 1.0


def rest_after_islice(module):
    numbers = iter([1.0, 2.0, 3.0])
    list(itertools.islice(numbers, 1))
    return happens() if list(numbers) == [2.0, 3.0] else 1.0


def loop_that_goes_on(module):
    numbers = iter([1.0, 2.0, 3.0])
    for _ in numbers:
        break
    for number in numbers:
        return happens() if number == 2.0 else 1.0
    return 1.0


def layers_that_go_on(module):
    layers = iter(module.net)
    next(layers)
    for _ in layers:
        break
    for _ in layers:
        return happens()
    return 1.0


def iterator_of_an_iterator(module):
    numbers = iter([1.0, 2.0])
    next(iter(numbers))
    return happens() if next(numbers) == 2.0 else 1.0


def any_stops_early(module):
    numbers = iter([1.0, 2.0, 3.0])
    any(numbers)
    return happens() if next(numbers, None) == 2.0 else 1.0


def generator_that_is_not_ended(module):
    def numbers():
        yield 1.0
        raise ValueError

    try:
        next(numbers())
    except ValueError:
        return 1.0
    return happens()


def result_of_yield_from(module):
    def inner():
        yield 1.0
        return 5.0

    def outer():
        result = yield from inner()
        yield result

    return happens() if list(outer())[1] == 5.0 else 1.0


def comprehension_over_a_growing_list(module):
    numbers = [1.0]
    [numbers.append(number) for number in numbers if len(numbers) < 5]
    return happens() if len(numbers) > 2 else 1.0


def each(items):
    for item in items:  # noqa: UP028  (not the same to an evaluator)
        yield item


def generator_over_a_growing_list(module):
    numbers = [1.0]
    found = each(numbers)
    numbers.append(2.0)
    return happens() if len(list(found)) == 2 else 1.0


class Holder:
    def __init__(self):
        self.number = 1.0

    def get(self, _):
        return self.number


def map_over_a_changing_object(module):
    holder = Holder()
    found = map(holder.get, [0])
    holder.number = 2.0
    return happens() if sum(found) == 2.0 else 1.0


def generator_calls_a_closure(module):
    number = 1.0

    def current():
        return number

    found = (current() for _ in [0])
    number = 2.0
    return happens() if sum(found) == 2.0 else 1.0


def zip_of_a_late_generator(module):
    number = 1.0
    found = zip((number for _ in [0]), strict=True)
    number = 2.0
    return happens() if list(found) == [(2.0,)] else 1.0


def iteration_up_to_a_value(module):
    try:
        list(iter(lambda: 1, 1))
    except TypeError:
        return 1.0
    return happens()


def item_of_a_sum_is_found_once(module):
    places, found = iter([0, 1, 2, 3]), [1.0, 1.0, 1.0, 1.0]
    found[next(places)] += 5.0
    return happens() if next(places) == 1 else 1.0


def target_of_a_sum_is_found_once(module):
    found = [[1.0], [2.0], [3.0], [4.0]]
    found.pop()[0] += 1.0
    return happens() if len(found) == 3 else 1.0


def generator_that_stops_by_mistake(module):
    def numbers():
        next(iter([]))
        yield 1.0

    try:
        list(numbers())
    except StopIteration:
        return 1.0
    except RuntimeError:
        return happens()


def generator_over_a_changed_list(module):
    numbers = [1.0]
    found = (number for number in numbers)
    numbers[0] = 3.0
    return happens() if next(found) == 3.0 else 1.0


def iterator_over_a_growing_list(module):
    numbers = [1.0]
    found = iter(numbers)
    numbers.append(2.0)
    return happens() if len(list(found)) == 2 else 1.0


def reversed_over_a_changed_list(module):
    numbers = [1.0]
    found = reversed(numbers)
    numbers[0] = 4.0
    return happens() if list(found) == [4.0] else 1.0


def view_of_a_growing_dict(module):
    numbers = {"a": 1.0}
    keys = numbers.keys()
    numbers["b"] = 2.0
    return happens() if len(keys) == 2 else 1.0


def set_that_grows_in_place(module):
    numbers = same = {1.0, 2.0}
    same |= {3.0}
    return happens() if len(numbers) == 3 else 1.0


ITERATORS = (
    zip_of_one_iterator, rest_after_islice, loop_that_goes_on, layers_that_go_on, iterator_of_an_iterator,
    any_stops_early, generator_that_is_not_ended, result_of_yield_from, comprehension_over_a_growing_list,
    generator_over_a_growing_list, map_over_a_changing_object, generator_calls_a_closure, zip_of_a_late_generator,
    iteration_up_to_a_value, item_of_a_sum_is_found_once, target_of_a_sum_is_found_once,
    generator_that_stops_by_mistake, generator_over_a_changed_list, iterator_over_a_growing_list,
    reversed_over_a_changed_list, view_of_a_growing_dict, set_that_grows_in_place,
)  # fmt: skip
"""Ways that leave a trace whenever they run."""
