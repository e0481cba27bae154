"""Steps by which it shows whether what is evaluated takes the path that Python takes."""

import types

from helpers.corner_steps import happens


def inner_function_is_callable(module):
    def inner():
        return 1.0

    return happens() if callable(inner) else 1.0


def attribute_that_functions_lack(module):
    return 1.0 if hasattr(lambda: 0, "parent") else happens()


def attribute_that_functions_have(module):
    return happens() if hasattr(class_of_a_function, "__call__") else 1.0  # noqa: B004  (not the same to an evaluator)


def class_of_a_function(module):
    def inner():
        return 1.0

    return happens() if isinstance(inner, types.FunctionType) else 1.0


def parameter_hides_the_name_of_a_comprehension(module):
    found = [(lambda x: (lambda: x)())(5.0) for x in [1.0]]
    return happens() if found[0] == 5.0 else 1.0


class Private:
    def __init__(self):
        self._other__number, self.__number = 1.0, 2.0

    def get(self):
        return [self._other__number, *(self.__number for _ in [0])][1]


PRIVATE = Private()


def private_name(module):
    return happens() if PRIVATE.get() == 2.0 else 1.0


def name_of_an_error_is_deleted(module):
    try:
        raise ValueError
    except ValueError:
        pass
    try:
        error  # noqa: B018  (it is gone)
    except NameError:
        return happens()
    return 1.0


def cause_of_an_error(module):
    try:
        raise ValueError from happens(None)
    except ValueError:
        return 1.0


def message_of_an_assertion(module):
    try:
        assert module is None, happens()
    except AssertionError:
        return 1.0


def target_of_an_annotation(module):
    happens(PRIVATE).number: int
    return 1.0


def annotation_of_an_inner_function(module):
    def inner(number: happens() = 1.0):
        return number

    return inner()


def keyword_named_as_a_method(module):
    return happens() if "items" in dict(items={"a": 1}) else 1.0  # noqa: C408  (the keyword is the point)


def depth(number):
    return 0 if number == 0 else 1 + depth(number - 1)


def deep_recursion(module):
    try:
        depth(100)
    except RuntimeError:
        return 1.0
    return happens()


def bool_of_nothing(module):
    try:
        return happens() if bool() is False else 2.0  # noqa: UP018  (the call without an argument is the point)
    except TypeError:
        return 1.0


def keyword_given_twice(module):
    def inner(number):
        return number

    try:
        inner(number=1.0, **{"number": 2.0})
    except TypeError:
        return happens()
    return 1.0


def too_few_for_a_star(module):
    try:
        _first, *_others, _last = [1.0]
    except ValueError:
        return happens()
    return 1.0


def failed_unpacking_stores_nothing(module):
    first = 0.0
    try:
        first, _second = (1.0,)
    except ValueError:
        return happens() if first == 0.0 else 1.0
    return 2.0


class Slot:
    __slots__ = ("number",)

    def __getattr__(self, name):
        return 1.0


SLOT = Slot()


def empty_slot(module):
    return happens() if hasattr(SLOT, "number") else 1.0


def class_of_a_class(module):
    return happens() if Private.__class__ is type else 1.0


def name_that_a_module_lacks(module):
    try:
        from math import missing  # noqa: F401
    except ImportError:
        return happens()
    return 1.0


def sets_an_outer_name(module):
    def outer():
        number = 1.0

        def inner():
            nonlocal number
            number = 2.0

        inner()
        return number

    return 1.0 if outer() == 2.0 else happens()


def tuple_grows_as_a_new_one(module):
    numbers = same = (1.0,)
    numbers += (2.0,)
    return 1.0 if len(same) == 1 else happens()


def inner_function_sees_the_last_value(module):
    number = 1.0

    def inner():
        return number

    number = 2.0
    return 1.0 if inner() == 2.0 else happens()


def name_given_in_a_comprehension(module):
    number = 1.0
    [number := 2.0 for _ in range(2)]
    return 1.0 if number == 2.0 else happens()


def name_of_a_comprehension_stays_inside(module):
    number = 5.0
    [number for number in range(3)]  # noqa: C416  (the name is the point)
    return 1.0 if number == 5.0 else happens()


def result_of_a_finally(module):
    for number in [1.0]:
        try:
            continue
        finally:
            return number if number is not None else happens()  # noqa: B012  (that it wins is the point)
    return happens()


def debug_mode(module):
    return 1.0 if __debug__ is True else happens()


class OwnGet(dict):
    def get(self, key, default=None):
        return happens(dict.get(self, key, default))

    def items(self):
        return happens(dict.items(self))


OWN_GET = OwnGet(first=1.0)


def item_of_a_dict_with_another_get(module):
    return OWN_GET["first"]


def keys_of_a_dict_with_other_items(module):
    return float(len([key for key in OWN_GET]))  # noqa: C416  (the loop is the point)


class OwnEquality(type):
    def __eq__(cls, other):
        return happens(False)

    __hash__ = type.__hash__


class OfOwnEquality(metaclass=OwnEquality):
    number = 1.0


OF_OWN_EQUALITY = OfOwnEquality()


def attribute_of_an_object_whose_class_compares(module):
    return OF_OWN_EQUALITY.number


WITH_TRACE = (
    inner_function_is_callable, attribute_that_functions_lack, attribute_that_functions_have, class_of_a_function,
    parameter_hides_the_name_of_a_comprehension, private_name, name_of_an_error_is_deleted, cause_of_an_error,
    message_of_an_assertion, target_of_an_annotation, annotation_of_an_inner_function, keyword_named_as_a_method,
    deep_recursion, bool_of_nothing, keyword_given_twice, too_few_for_a_star, failed_unpacking_stores_nothing,
    empty_slot, class_of_a_class, name_that_a_module_lacks,
)  # fmt: skip
"""Ways that leave a trace whenever they run."""

WITHOUT_TRACE = (
    sets_an_outer_name, tuple_grows_as_a_new_one, inner_function_sees_the_last_value, name_given_in_a_comprehension,
    name_of_a_comprehension_stays_inside, result_of_a_finally, debug_mode, item_of_a_dict_with_another_get,
    keys_of_a_dict_with_other_items, attribute_of_an_object_whose_class_compares,
)  # fmt: skip
"""Ways that leave a trace only where another path is taken than Python takes."""
