"""The output of `make check` about private names of torch."""

import ast

import pytest

from tests.private_names import faults, private_names


@pytest.mark.parametrize(
    ("code", "found"),
    [
        pytest.param("import torch._dynamo", "torch._dynamo", id="import"),
        pytest.param("from torch._guards import Guard", "torch._guards.Guard", id="from a private module"),
        pytest.param("from torch.utils import _pytree", "torch.utils._pytree", id="a private name of a public module"),
        pytest.param("torch.x._C.y", "_C", id="chain"),
        pytest.param("def f():\n    import torch._inductor", "torch._inductor", id="in a function"),
        pytest.param("import_module('torch._inductor.config')", "torch._inductor", id="text"),
        pytest.param("f'{x} torch.onnx._internal {y}'", "torch.onnx._internal", id="part of a text"),
        pytest.param("node._dynamo_source", "_dynamo_source", id="attribute of an object"),
        pytest.param("node._schema = 1", "_schema", id="attribute that is set"),
        pytest.param("getattr(node, '_dynamo_source', None)", "_dynamo_source", id="attribute by text"),
    ],
)
def test_a_private_name_is_found(code, found):
    """Each way to name what is private in torch is found."""
    assert [name for _, name in private_names(ast.parse(code))] == [found]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import torch\ntorch.compile(f)", id="public"),
        pytest.param("torch.ops.aten._to_copy.default\naten._softmax", id="operators"),
        pytest.param("class A:\n    def __init__(self):\n        self._x = 1\n\n\nother._x", id="one's own"),
        pytest.param("'''Works around torch._dynamo.'''", id="docstring"),
        pytest.param("record._replace(a=1)", id="of Python"),
        pytest.param("value.__class__", id="of every object"),
    ],
)
def test_other_names_pass(code):
    """Public names, operators, docstrings, and what the module defines itself, are no fault."""
    assert [*private_names(ast.parse(code))] == []


def test_a_fault_names_its_line(tmp_path):
    """A fault is told with its place, and what to do; the room itself may name anything."""
    for folder, code in (("auto", "import torch._C"), ("torch_internals", "import torch._C")):
        (tmp_path / "backend_kwargs" / folder).mkdir(parents=True)
        (tmp_path / "backend_kwargs" / folder / "module.py").write_text(f"\n{code}\n")
    place, room = "backend_kwargs/auto/module.py:2", "backend_kwargs/torch_internals/"
    assert [*faults(tmp_path)] == [f"{place} names 'torch._C': put it behind a function in {room}"]
