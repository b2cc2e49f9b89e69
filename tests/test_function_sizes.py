"""The output of `make check` about function sizes."""

import pytest

from tests import function_sizes
from tests.function_sizes import faults, functions

HELPER = "def _helper(x):\n    return x + 1\n\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return a folder with one module that a test writes; half of its functions may be helpers."""
    monkeypatch.setattr(function_sizes, "MOST_SHARE", {"tree": 0.5})
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
