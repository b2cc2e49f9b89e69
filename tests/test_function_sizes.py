"""The output of `make check` about the size of the code and of functions."""

import pytest

from tests import function_sizes
from tests.function_sizes import Function, faults, functions, sizes

HELPER = "def _helper(x):\n    return x + 1\n\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return a folder with one module that a test writes; half of its functions may be helpers."""
    monkeypatch.setattr(function_sizes, "MOST_SHARE", {"tree": 0.5})
    monkeypatch.setattr(function_sizes, "MOST", {"tree": {"statements": 100, "tokens": 200}})
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("use", "is_helper"),
    [
        pytest.param("_helper(1)", True, id="called once"),
        pytest.param("_helper(_helper(1))", False, id="called twice"),
        pytest.param("map(_helper, [1])", False, id="handed on"),
    ],
)
def test_what_is_a_helper(tree, use, is_helper):
    """A short private function counts if it is called once and not used otherwise."""
    (tree / "module.py").write_text(f"{HELPER}def public():\n    return {use}\n")
    assert [function.is_helper for function in functions(tree)] == [is_helper, False]


def test_what_is_counted(tree, monkeypatch):
    """Statements and tokens of Python, also in folders; lines, words and signs of templates; nothing of stubs."""
    monkeypatch.setattr(function_sizes, "RELEASED", {"tree/inner": (1, 7)})
    (tree / "module.py").write_text('"""A docstring."""\n\nif 1:  # a comment\n    call(2,\n         3)\n')
    (tree / "stub.pyi").write_text("x: int\n")
    (tree / "inner").mkdir()
    (tree / "inner" / "page.j2").write_text("{{ a }}\n\n<b>\n")
    assert [line.split() for line in sizes(tree.parent)][1:] == [
        ["tree", "5", "100", "18", "200"],
        ["inner", "2", "1", "8", "7"],
    ]


@pytest.mark.parametrize(("name", "size"), [("statements", 1), ("tokens", 3)])
def test_a_tree_that_grows_is_named(tree, monkeypatch, name, size):
    """A tree with more than pyproject.toml permits is named with both numbers."""
    (tree / "module.py").write_text("x = 1\n")
    limits = {"statements": 1, "tokens": 3}
    monkeypatch.setattr(function_sizes, "MOST", {"tree": limits})
    monkeypatch.setattr(function_sizes, "functions", lambda tree: iter([Function("", "", 1, called_once=False)]))
    assert list(faults(tree.parent)) == []
    limits[name] -= 1
    advice = "make it smaller, or raise the number in pyproject.toml and say why in CHANGELOG.md"
    assert list(faults(tree.parent)) == [f"tree has {size} {name}, over {size - 1}: {advice}"]


def test_too_many_helpers_are_named(tree):
    """A tree with too many helpers is named with their share and places."""
    (tree / "module.py").write_text(f"{HELPER}VALUE = _helper(1)\n")
    line = "tree: 100.0% of the functions are helpers of at most 5 lines, over 50%: tree/module.py:1 _helper"
    assert list(faults(tree.parent)) == [line]


def test_a_long_function_is_named(tree):
    """A function of more than 60 lines is named with its length."""
    (tree / "module.py").write_text("def long():\n" + "    pass\n" * 60)
    assert list(faults(tree.parent)) == ["tree/module.py:1 long has 61 lines, over 60"]


def test_a_tree_within_its_limits_passes(tree):
    """A tree with functions of medium size passes."""
    (tree / "module.py").write_text("def public():\n    return 1\n" + "\n" * 2 + HELPER + "VALUE = _helper(1)\n")
    assert list(faults(tree.parent)) == []
