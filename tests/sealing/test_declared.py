"""What is declared of sizes: wrong declarations are one line, with what was wanted and what came."""

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.sealing.declared import Declared

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = {"x": {0: "n"}}


def called(x, y=None):
    return x + 1


WRONG = {
    "not compiled": (
        {"compiled": called},
        (
            "seal's `compiled` must be what torch.compile returned, a module after .compile(), or a CompiledModule, "
            "got <function called at {} (function)."
        ),
    ),
    "no example": (
        {"example_inputs": None},
        (
            "seal must have the arguments of one call: seal(compiled, example_inputs, ...), a tensor, a tuple of "
            "arguments, a dict of keywords, or (args, kwargs)."
        ),
    ),
    "example": (
        {"example_inputs": {"z": 1}},
        "The example inputs do not fit 'called': missing a required argument: 'x'.",
    ),
    "on_miss": ({"on_miss": "warn"}, "seal's `on_miss` must be 'eager' or 'raise', got 'warn' (str)."),
    "tol": ({"tol": -1}, "seal's `tol` must be a positive number or None, got -1 (int)."),
    "dims": (
        {"dims": [0]},
        "seal's `dims` must be a dict such as {'x': {0: 'batch', 1: 'sequence'}}, got [0] (list).",
    ),
    "dims of a tensor": (
        {"dims": {"x": {"n": 0}}},
        "seal's `dims['x']` must be a dict from dimensions to names, such as {0: 'batch'}, got {'n': 0} (dict).",
    ),
    "input": (
        {"dims": {"z": {0: "n"}}, "sizes": {"n": [3]}},
        "Unknown input in seal's `dims` 'z'. The inputs are x.",
    ),
    "dimension": (
        {"dims": {"x": {2: "n"}}, "sizes": {"n": [3]}},
        "Input 'x' has 1 dimensions, but `dims` names dimension 2.",
    ),
    "no sizes": ({"dims": X}, "seal's `sizes` must have the sizes of 'n': sizes={'n': [...]}."),
    "name": ({"dims": X, "sizes": {"m": [3]}}, "Unknown size 'm'. `dims` names n."),
    "sizes": (
        {"dims": X, "sizes": {"n": "3"}},
        "seal's `sizes['n']` must be a list of sizes or a range, got '3' (str).",
    ),
    "no size": (
        {"dims": X, "sizes": {"n": []}},
        "seal's `sizes['n']` must be a list or range of at least one whole number, none negative, got [] (list).",
    ),
    "negative": (
        {"dims": X, "sizes": {"n": range(-1, 3)}},
        (
            "seal's `sizes['n']` must be a list or range of at least one whole number, none negative, got range(-1, 3) "
            "(range)."
        ),
    ),
    "small buckets": (
        {"dims": X, "sizes": {"n": [3, 9]}, "buckets": {"n": [4, 8]}},
        "The largest bucket of 'n' must be at least 9, which `sizes` declares, got 8.",
    ),
    "three buckets": (
        {"dims": X, "sizes": {"n": [3, 9]}, "buckets": {"n": [2, 4, 8]}},
        "The largest bucket of 'n' must be at least 9, which `sizes` declares, got 8.",
    ),
    "an input without a name": (
        {"dims": {"": {0: "n"}}, "sizes": {"n": [3]}},
        "seal's `dims` must be a dict such as {'x': {0: 'batch', 1: 'sequence'}}, got '' (str).",
    ),
    "an input by its place": (
        {"dims": {0: {0: "n"}}, "sizes": {"n": [3]}},
        "seal's `dims` must be a dict such as {'x': {0: 'batch', 1: 'sequence'}}, got 0 (int).",
    ),
    "fill": (
        {"dims": X, "sizes": {"n": [3]}, "fill": {"mask": 0}},
        "Unknown input in seal's `fill` 'mask'. `dims` names x.",
    ),
    "fill's value": (
        {"dims": X, "sizes": {"n": [3]}, "fill": {"x": "0"}},
        "seal's `fill['x']` must be a number, got '0' (str).",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_declarations(kind):
    """The message says what was wanted, what came, and what to write."""
    given, message = WRONG[kind]
    compiled = given.get("compiled") or torch.compile(called, backend="eager")
    example = given.get("example_inputs", torch.ones(3))
    others = {name: value for name, value in given.items() if name not in ("compiled", "example_inputs")}
    with pytest.raises(bk.BackendKwargsError) as wrong:
        bk.seal(compiled, example, **others)
    head, _, tail = message.partition("{}")
    text = str(wrong.value)
    assert text == message or (tail and text.startswith(head) and text.endswith(tail))


def declared(sizes, buckets=None, dims=X):
    return Declared.read(dims, sizes, buckets, None)


def test_a_range_is_for_any_size_and_a_list_for_each():
    """What is dynamic follows from the form of the sizes; buckets make a range exact."""
    both = {"x": {0: "n", 1: "m"}}
    assert declared({"n": [1, 2], "m": range(9)}, dims=both).dynamic == {"m"}
    padded = declared({"n": [1, 2], "m": range(1, 9)}, {"m": [4, 8]}, both)
    assert (padded.dynamic, padded.count, dict(padded.codes)) == (frozenset(), 4, {"n": (1, 2), "m": (4, 8)})


def test_a_bucket_that_no_size_needs_gets_no_code():
    """Sizes of 5 and 6 need the bucket of 8 alone."""
    found = declared({"n": [5, 6]}, {"n": [4, 8, 16]})
    assert (dict(found.codes), found.padded_sizes("n", 8), found.padded_sizes("n", 4)) == ({"n": (8,)}, [5, 6], [])


def test_sizes_of_a_bucket_alone():
    """Buckets without sizes declare all sizes from 1 up to the largest."""
    assert declared(None, {"n": [8, 4]}).sizes == {"n": range(1, 9)}


def test_a_spread_has_the_ends():
    """Of many sizes the smallest and the largest are called, and some in between."""
    points = declared({"n": range(1, 4097)}).spread(64)
    sizes = [point["n"] for point in points]
    assert (sizes[0], sizes[-1], len(sizes) <= 64, len(sizes) > 30) == (1, 4096, True, True)


def test_a_range_with_steps():
    """Only its own sizes are called."""
    points = declared({"n": range(8, 4097, 8)}).spread(10)
    assert all(point["n"] % 8 == 0 for point in points)
    assert points[-1]["n"] == 4096
