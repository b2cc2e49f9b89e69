"""The guards of a package as data: expressions over sizes, their text, and what of them a file may contain."""

import msgspec
import pytest
import torch

from backend_kwargs.bundles.packages.guards import (
    OPERATIONS,
    Operation,
    PackageGuards,
    Symbol,
    TensorGuard,
    text_of,
    value_of,
)

TWICE = Operation("Mul", (2, "s"))


@pytest.mark.parametrize(
    ("term", "value", "text"),
    [
        pytest.param(3, 3, "3", id="constant"),
        pytest.param("s", 5, "n", id="name"),
        pytest.param(Operation("Add", ("s", -1)), 4, "n + -1", id="sum"),
        pytest.param(Operation("LessThan", (TWICE, 10)), True, "(2*n) <= 10", id="comparison"),
        pytest.param(Operation("Mod", (TWICE, 4)), 2, "(2*n) % 4", id="remainder"),
        pytest.param(Operation("Max", ("s", 7)), 7, "max(n, 7)", id="function"),
        pytest.param(Operation("Not", (Operation("Equality", ("s", 5)),)), False, "not(n == 5)", id="negation"),
        pytest.param(Operation("FloorDiv", ("s", 0)), None, "n//0", id="division by zero"),
        pytest.param(Operation("Mul", ("s", 2**62)), None, f"n*{2**62}", id="beyond 64 bits"),
        pytest.param(Operation("Mod", ("s",)), None, "n", id="too few arguments"),
        pytest.param(Operation("Pow", (-8, 0.5)), None, "-8**0.5", id="complex"),
    ],
)
def test_an_expression_has_a_value_and_a_text(term, value, text):
    assert value_of(term, {"s": 5}) == value
    assert text_of(term, {"s": "n"}) == text


GUARDS = PackageGuards(
    module="",
    graph="",
    tensors=(TensorGuard(("s", 8), (8, 1)), TensorGuard((TWICE,), (1,), offset=0)),
    symbols={"s": Symbol(0, "shape", 0)},
    conditions=(Operation("LessThan", ("s", 6)),),
)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        pytest.param((torch.ones(4, 8), torch.ones(8)), "", id="all hold"),
        pytest.param(
            (torch.ones(4, 8), torch.ones(9)),
            "Input b must have shape (2*a.shape[0] = 8,), got (9,).",
            id="a size that depends on another",
        ),
        pytest.param(
            (torch.ones(8, 4).t(), torch.ones(8)), "Input a must have strides (8, 1), got (1, 4).", id="strides"
        ),
        pytest.param(
            (torch.ones(7, 8), torch.ones(14)),
            "Sizes of inputs must meet a.shape[0] <= 6, got a.shape[0] = 7.",
            id="condition",
        ),
        pytest.param(
            (torch.ones(4, 8), torch.ones(9)[1:]),
            "Input b must begin at element 0 of its storage, got 1.",
            id="offset",
        ),
        pytest.param((torch.ones(4, 8),), "The call must have 2 tensors, got 1.", id="count"),
    ],
)
def test_a_problem_names_input_and_size(tensors, problem):
    assert GUARDS.problem(tensors, lambda: ["a", "b"]) == problem


def test_guards_are_the_same_after_json():
    assert msgspec.json.decode(msgspec.json.encode(GUARDS), type=PackageGuards) == GUARDS


@pytest.mark.parametrize(
    "condition",
    [
        pytest.param('["exec", ["s"]]', id="unknown operation"),
        pytest.param('["Add", []]', id="no arguments"),
        pytest.param('"s <= 6"', id="text"),
        pytest.param("[" * 10_000, id="deep"),
    ],
)
def test_conditions_from_a_file_are_validated(condition):
    content = f'{{"module": "", "graph": "", "tensors": [], "conditions": [{condition}]}}'
    with pytest.raises((msgspec.MsgspecError, RecursionError)):
        msgspec.json.decode(content, type=PackageGuards)


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_of_torch_is_known_by_its_class(name):
    """The names are those of sympy's classes, or of torch's additions to them."""
    import sympy
    from torch.utils._sympy import functions

    assert hasattr(sympy, name) or hasattr(functions, name)
