import math

import pytest
import torch

from backend_kwargs import make_backend
from backend_kwargs.options.option import Layer, copied, merge, same, sources, standing, with_users

LAYERS = (Layer("first", {"a": 1, "b": 1}), Layer("second", {"b": 2, "c": 2}))


class Unasked:
    def __eq__(self, other):
        raise RuntimeError("compares with nothing")

    __hash__ = None


UNASKED = Unasked()


def test_merge():
    """The last layer that sets an option wins."""
    assert merge(LAYERS) == {"a": 1, "b": 2, "c": 2}


def test_sources():
    """Each value has the layer that set it."""
    assert sources(LAYERS) == {"a": "first", "b": "second", "c": "second"}


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"a": [1]}, id="mapping"),
        pytest.param([[1]], id="list"),
        pytest.param(([1],), id="tuple"),
        pytest.param({1}, id="set"),
    ],
)
def test_copied_containers_are_others(value):
    """A copied container is equal, of the same type, and another object."""
    copy = copied(value)
    assert copy == value
    assert type(copy) is type(value)
    assert copy is not value


def test_copied_reaches_inner_containers():
    """Changes deep inside a copy do not affect the original."""
    value = {"a": [([1],)]}
    copied(value)["a"][0][0].append(2)
    assert value == {"a": [([1],)]}


class Kept(list):
    """A list with a meaning of its own, such as a named tuple."""


def test_copied_keeps_other_classes():
    """A subclass of a container may not be made from its items alone, so it is not copied."""
    value = Kept([1])
    assert copied(value) is value


def test_copied_shares_what_containers_hold():
    """A pass, a tensor or a function in a container is not copied."""
    leaf = object()
    assert copied([leaf])[0] is leaf


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        pytest.param(1, 1, True, id="int"),
        pytest.param(1, True, False, id="int-bool"),
        pytest.param(1, 1.0, False, id="int-float"),
        pytest.param(math.nan, float("nan"), True, id="nan"),
        pytest.param(0.0, -0.0, False, id="signed-zero"),
        pytest.param([1, [2]], [1, [2]], True, id="list"),
        pytest.param([1], [True], False, id="list-of-bool"),
        pytest.param([1], [1, 1], False, id="lengths"),
        pytest.param([1], (1,), False, id="list-tuple"),
        pytest.param({"a": 1}, {"a": 1}, True, id="mapping"),
        pytest.param({"a": 1}, {"a": True}, False, id="mapping-of-bool"),
        pytest.param({"a": 1}, {"b": 1}, False, id="keys"),
        pytest.param({1}, {1}, True, id="set"),
        pytest.param(torch.ones(2), torch.ones(2), True, id="tensors"),
        pytest.param(torch.ones(2), torch.zeros(2), False, id="other-tensors"),
        pytest.param(torch.ones(2), torch.ones(3), False, id="shapes"),
        pytest.param(UNASKED, UNASKED, True, id="identical"),
        pytest.param(Unasked(), Unasked(), False, id="comparing-raises"),
    ],
)
def test_same(a, b, equal):
    """Two values are the same if value and type agree at every depth; comparing never raises."""
    assert same(a, b) is equal


def test_a_layer_is_read_only():
    """A backend's layer contains a copy that others cannot change."""
    given = {"candidates": ["aten"]}
    (layer,) = make_backend("tmpl-inductor", given).layers
    given["candidates"].append("triton")
    with pytest.raises(TypeError):
        layer.options["strict"] = True
    with pytest.raises(AttributeError):
        layer.options = {}
    assert layer.options == {"candidates": ["aten"]}


@pytest.mark.parametrize(
    ("users", "options", "left"),
    [
        pytest.param({"freezing": True, "a": 1}, {"freezing": False}, {"a": 1}, id="permitted"),
        pytest.param({"freezing": True}, {"max_autotune": True}, {"freezing": True}, id="the candidate leaves it"),
        pytest.param({"freezing": True}, {"freezing": True}, {"freezing": True}, id="the candidate has it too"),
        pytest.param({"freezing": False}, {"freezing": False}, {"freezing": False}, id="forbidden"),
        pytest.param({"a": True}, {"a": False}, {"a": True}, id="another option"),
    ],
)
def test_which_of_the_users_options_stand(users, options, left):
    """All but those that permit what a candidate leaves out; they are merged onto the candidate's."""
    assert standing(users, options) == left
    assert with_users(options, users) == options | left
