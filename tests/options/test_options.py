from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, Optional, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.options.option import Option, Where, check, convert, declared, describe, lookup

COUNT = Annotated[int, Where("of at least 1", lambda count: count >= 1)]
CATALOGUE = {name: Option(name) for name in ("max_autotune", "triton.max_tiles", "a_group_of_long_name.threads")}

TYPES = [
    pytest.param(Any, "anything", id="any"),
    pytest.param(bool, "bool", id="bool"),
    pytest.param(float, "float", id="float"),
    pytest.param(None, "None", id="none"),
    pytest.param(int | None, "int | None", id="union"),
    pytest.param(Optional[int], "int | None", id="optional"),  # noqa: UP045 - torch 2.11 writes it so
    pytest.param(Literal["none", "all"], "'none' | 'all'", id="literal"),
    pytest.param(Optional[Literal["a"]], "'a' | None", id="optional-literal"),  # noqa: UP045
    pytest.param(list, "list", id="bare-list"),
    pytest.param(list[str], "list[str]", id="list"),
    pytest.param(tuple[int, ...], "tuple[int, ...]", id="tuple"),
    pytest.param(dict[str, list[int]], "dict[str, list[int]]", id="dict"),
    pytest.param(Callable[[int], int] | None, "callable | None", id="callable"),
    pytest.param(list[str | Callable[..., None]], "list[str | callable]", id="callables"),
    pytest.param(Annotated[int, "of bytes"], "int", id="annotated"),
    pytest.param(COUNT, "int of at least 1", id="limited"),
    pytest.param(COUNT | None, "int of at least 1 | None", id="limited-or-none"),
    pytest.param("Policy | None", "anything", id="text"),
    pytest.param(ForwardRef("Policy"), "anything", id="forward-reference"),
    pytest.param(
        Literal[tuple(range(200))], ", ".join(map(str, range(40))).replace(",", " |")[:117] + "...", id="long"
    ),
]


class Sized(Protocol):
    size: int


def refusal(use, option, value):
    try:
        use(option, value)
    except BackendKwargsError as e:
        return str(e)
    return ""


@pytest.mark.parametrize(("wanted", "text"), TYPES)
def test_describe(wanted, text):
    """A type is described in readable words."""
    assert describe(wanted) == text


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("max_autotune", id="as-is"),
        pytest.param("max-autotune", id="dash"),
        pytest.param("triton.max-tiles", id="dash-in-group"),
    ],
)
def test_lookup_finds(name):
    """A name is found with dashes instead of underscores."""
    assert lookup(name, CATALOGUE) is CATALOGUE[name.replace("-", "_")]


def test_lookup_of_a_name_without_its_group():
    """An option of that name in a group is meant, rather than one with a similar name."""
    catalogue = {name: Option(name, int, 0) for name in ("group.of.size", "sizes")}
    with pytest.raises(BackendKwargsError) as e:
        lookup("size", catalogue)
    assert str(e.value) == "Unknown option 'size'. Did you mean 'group.of.size'?"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("max_autotun", "Unknown option 'max_autotun'. Did you mean 'max_autotune'?", id="nearest"),
        pytest.param(
            "threads", "Unknown option 'threads'. Did you mean 'a_group_of_long_name.threads'?", id="group-left-out"
        ),
        pytest.param("qqq", "Unknown option 'qqq'. Look there.", id="nothing-near"),
        pytest.param(3, "Option name must be str, got 3 (int).", id="no-name"),
    ],
)
def test_lookup_refuses(name, message):
    """The error for a wrong name is one line with the closest name, or else the next step."""
    with pytest.raises(BackendKwargsError) as e:
        lookup(name, CATALOGUE, otherwise="Look there.")
    assert str(e.value) == message


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        pytest.param(Any, object(), id="any"),
        pytest.param("Policy | None", 3, id="text"),
        pytest.param(ForwardRef("Policy"), 3, id="forward-reference"),
        pytest.param(Sized, 3, id="protocol"),
        pytest.param(bool, True, id="bool"),
        pytest.param(int, 3, id="int"),
        pytest.param(float, 3.0, id="float"),
        pytest.param(int | None, None, id="none"),
        pytest.param(float | int, 3, id="int-before-widening"),
        pytest.param(Literal[0, 1], 1, id="literal"),
        pytest.param(list[str], ["a"], id="list"),
        pytest.param(list, [1, "a"], id="bare-list"),
        pytest.param(set[int], {1}, id="set"),
        pytest.param(tuple[int, str], (1, "a"), id="pair"),
        pytest.param(tuple[int, ...], (1, 2, 3), id="tuple"),
        pytest.param(dict[str, list[int]], {"a": [1]}, id="dict"),
        pytest.param(Callable[[int], int] | None, abs, id="callable"),
        pytest.param(type[int], bool, id="class"),
        pytest.param(Annotated[int, "of bytes"], 3, id="annotated"),
        pytest.param(COUNT, 1, id="within-its-limit"),
        pytest.param(COUNT | None, None, id="none-beside-a-limit"),
    ],
)
def test_check_returns_the_very_value(wanted, value):
    """A value of the right type is returned unchanged."""
    assert check(Option("x", wanted), value) is value


@pytest.mark.parametrize(
    ("wanted", "value", "widened"),
    [
        pytest.param(float, 3, 3.0, id="float"),
        pytest.param(float | None, 3, 3.0, id="union"),
        pytest.param(list[float], [1, 2.5], [1.0, 2.5], id="list"),
        pytest.param(dict[str, float], {"a": 1}, {"a": 1.0}, id="dict"),
    ],
)
def test_check_widens_int_to_float(wanted, value, widened):
    """An int becomes a float if the type is float, and the caller's container is not changed."""
    before = repr(value)
    assert repr(check(Option("x", wanted), value)) == repr(widened)
    assert repr(value) == before


@pytest.mark.parametrize("wanted", [str, str | None, list[str] | str], ids=describe)
def test_a_path_is_text(wanted):
    """A path is taken where the text of one is, and kept as text, which a config can hold."""
    assert check(Option("x", wanted), Path("a/b")) == convert(Option("x", wanted), Path("a/b")) == "a/b"


@pytest.mark.parametrize(
    ("wanted", "value", "message"),
    [
        pytest.param(bool, "yes", "Inductor option 'x' must be bool, got 'yes' (str).", id="text-for-bool"),
        pytest.param(bool, 1, "Inductor option 'x' must be bool, got 1 (int).", id="int-for-bool"),
        pytest.param(int, True, "Inductor option 'x' must be int, got True (bool).", id="bool-for-int"),
        pytest.param(float, True, "Inductor option 'x' must be float, got True (bool).", id="bool-for-float"),
        pytest.param(float, 10**400, f"Inductor option 'x' must be float, got 1{'0' * 76}... (int).", id="too-big"),
        pytest.param(int, None, "Inductor option 'x' must be int, got None (NoneType).", id="none"),
        pytest.param(
            Literal[0, 1, 2, 3], True, "Inductor option 'x' must be 0 | 1 | 2 | 3, got True (bool).", id="literal-bool"
        ),
        pytest.param(Literal["a"], "b", "Inductor option 'x' must be 'a', got 'b' (str).", id="literal"),
        pytest.param(int | None, 1.5, "Inductor option 'x' must be int | None, got 1.5 (float).", id="union"),
        pytest.param(
            list[int], [1, True], "Inductor option 'x' must be list[int], got [1, True] (list).", id="element"
        ),
        pytest.param(list[int], (1,), "Inductor option 'x' must be list[int], got (1,) (tuple).", id="container"),
        pytest.param(
            tuple[int, int], (1,), "Inductor option 'x' must be tuple[int, int], got (1,) (tuple).", id="too-few"
        ),
        pytest.param(
            dict[str, int], {"a": "b"}, "Inductor option 'x' must be dict[str, int], got {'a': 'b'} (dict).", id="value"
        ),
        pytest.param(
            dict[str, int], {1: 1}, "Inductor option 'x' must be dict[str, int], got {1: 1} (dict).", id="key"
        ),
        pytest.param(
            Callable[[], int],
            "math:sqrt",
            "Inductor option 'x' must be callable, got 'math:sqrt' (str).",
            id="callable",
        ),
        pytest.param(COUNT, 0, "Inductor option 'x' must be int of at least 1, got 0 (int).", id="limit"),
        pytest.param(
            COUNT, "1", "Inductor option 'x' must be int of at least 1, got '1' (str).", id="text-for-limited"
        ),
    ],
)
def test_check_refuses(wanted, value, message):
    """A value of another type raises with the expected type, the value and its type."""
    with pytest.raises(BackendKwargsError) as e:
        check(Option("x", wanted), value, "Inductor option")
    assert str(e.value) == message


@pytest.mark.parametrize(
    ("wanted", "text", "value"),
    [
        pytest.param(bool, "false", False, id="false"),
        pytest.param(bool, "True", True, id="true"),
        pytest.param(bool, " Yes ", True, id="blanks"),
        pytest.param(bool, "0", False, id="zero"),
        pytest.param(bool, "on", True, id="on"),
        pytest.param(int, "3", 3, id="int"),
        pytest.param(int | None, "none", None, id="none"),
        pytest.param(str | None, "null", None, id="null"),
        pytest.param(float, "3", 3.0, id="float"),
        pytest.param(float, "1e-3", 0.001, id="exponent"),
        pytest.param(str, "3", "3", id="text-of-number"),
        pytest.param(str, '"a"', '"a"', id="text-in-quotes"),
        pytest.param(str, "none", "none", id="text-of-none"),
        pytest.param(Literal["none", "all"], "none", "none", id="literal"),
        pytest.param(Literal["0", "1"], "1", "1", id="literal-text"),
        pytest.param(Literal[0, 1], "1", 1, id="literal-number"),
        pytest.param(list[int], "[1, 2]", [1, 2], id="list"),
        pytest.param(dict[str, Any], '{"a": null}', {"a": None}, id="dict"),
        pytest.param(set[int], "[1, 1]", {1}, id="set"),
        pytest.param(tuple[int | tuple[int, ...], ...], "[1, [2, 3]]", (1, (2, 3)), id="tuples"),
        pytest.param(tuple[int, int], [1, 2], (1, 2), id="list-from-toml"),
        pytest.param(Callable[..., Any] | None, "functools:partial", partial, id="callable"),
        pytest.param(list[Callable[..., Any]], '["itertools:starmap"]', [starmap], id="callables"),
        pytest.param(list[str | None], '["none"]', ["none"], id="quoted-word"),
        pytest.param(list[str] | None, "a[x=1,y=2],b", ["a[x=1,y=2]", "b"], id="words"),
        pytest.param(list[str] | None, "", [], id="no-words"),
        pytest.param(Any, "3", 3, id="untyped-number"),
        pytest.param(Any, "False", False, id="untyped-word"),
        pytest.param(Any, "[", "[", id="untyped-text"),
        pytest.param(bool, True, True, id="no-text"),
    ],
)
def test_convert(wanted, text, value):
    """Text is parsed by the option's type."""
    assert repr(convert(Option("x", wanted), text)) == repr(value)


@pytest.mark.parametrize(
    ("wanted", "text", "message"),
    [
        pytest.param(bool, "maybe", "Option 'x' must be bool, got 'maybe' (str).", id="bool"),
        pytest.param(bool, 1, "Option 'x' must be bool, got 1 (int).", id="number-from-json"),
        pytest.param(int, "3.0", "Option 'x' must be int, got '3.0' (str).", id="int"),
        pytest.param(int, "true", "Option 'x' must be int, got 'true' (str).", id="bool-for-int"),
        pytest.param(list[int], "a,b", "Option 'x' must be list[int] (as JSON), got 'a,b' (str).", id="list"),
        pytest.param(
            Callable[..., Any],
            "math:nope",
            "Option 'x' must be callable (as 'package.module:function'), got 'math:nope' (str).",
            id="callable",
        ),
        pytest.param(set, "[[1]]", "Option 'x' must be set (as JSON), got '[[1]]' (str).", id="unhashable"),
        pytest.param(COUNT, "0", "Option 'x' must be int of at least 1, got '0' (str).", id="limit"),
    ],
)
def test_convert_refuses(wanted, text, message):
    """Text that cannot be parsed as the type raises, with the way to write it."""
    with pytest.raises(BackendKwargsError) as e:
        convert(Option("x", wanted), text)
    assert str(e.value) == message


@dataclass
class Declaring:
    count: Annotated[COUNT, "how many"] = 3
    names: Annotated[list[str] | None, "which"] = None
    more: Annotated[dict[str, int], "what else"] = field(default_factory=dict)


def test_declared():
    """A dataclass declares options: each field's name, type with limits, default and doc."""
    assert list(declared(Declaring).values()) == [
        Option("count", COUNT, 3, "how many"),
        Option("names", list[str] | None, None, "which"),
        Option("more", dict[str, int], {}, "what else"),
    ]


@given(st.booleans() | st.integers() | st.floats())
def test_convert_undoes_str(value):
    """`convert` parses str() of a bool, int or float."""
    assert repr(convert(Option("x", type(value)), str(value))) == repr(value)


@given(st.text())
def test_convert_keeps_text(text):
    """Text for a str option is kept unchanged."""
    assert convert(Option("x", str), text) == text


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(use=st.sampled_from([check, convert]), case=st.sampled_from(TYPES), junk=JUNK, name=st.text(min_size=1))
def test_messages_are_short(use, case, junk, name):
    """Any value is accepted, or refused in one line of less than 400 characters."""
    message = refusal(use, Option(name * 50, case.values[0]), junk)
    assert len(message) < 400
    assert "\n" not in message
