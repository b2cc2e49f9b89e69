"""Inductor's code of frozen graphs: which constants its results may be, and when its constants are freed."""

import weakref
from operator import attrgetter
from types import ModuleType

import torch
from torch.fx import GraphModule, Node

from backend_kwargs.backends import CompileInner, Inputs
from backend_kwargs.facts import Call
from backend_kwargs.torch_internals.inductor_code import forget_module, generated_modules

NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def freeing_constants(inner_compile: CompileInner) -> CompileInner:
    """Free a graph's constants with its code, which Inductor keeps in a list of all modules that it generated."""

    def compile_one(gm: GraphModule, example_inputs: Inputs, **kwargs: object) -> Call:
        known = {*map(id, generated_modules())}
        compiled = inner_compile(gm, example_inputs, **kwargs)
        for module in generated_modules():
            if id(module) not in known and any(map(torch.is_tensor, vars(module).values())):
                weakref.finalize(compiled, _forget, weakref.ref(module)).atexit = False
        return compiled

    return compile_one


def _forget(module: "weakref.ref[ModuleType]") -> None:
    if (code := module()) is not None:
        forget_module(code)


def noting_constants(inner_compile: CompileInner, constants: list[torch.Tensor]) -> CompileInner:
    """Append to `constants` those of a frozen graph that may be its results: each call returns the same memory."""

    def compile_one(gm: GraphModule, example_inputs: Inputs, **kwargs: object) -> Call:
        compiled = inner_compile(gm, example_inputs, **kwargs)
        before = [_before(result) for result in gm.graph.output_node().all_input_nodes]
        if found := [nodes for nodes in before if not any(node.op == "placeholder" for node in nodes)]:
            attributes = {str(node.target) for nodes in found for node in nodes if node.op == "get_attr"}
            # Inductor makes tensors of its own for 0-dimensional constants.
            made = (getattr(compiled, "constants", None) or {}).values()
            constants.extend(filter(torch.is_tensor, [*(attrgetter(name)(gm) for name in attributes), *made]))
        return compiled

    return compile_one


def _before(result: Node) -> set[Node]:
    """Return `result` and the nodes on which it depends, but for those that are only sizes."""
    nodes, todo = {result}, [result]
    while todo:
        new = {each for each in todo.pop().all_input_nodes if not isinstance(each.meta.get("val"), NUMBERS)} - nodes
        nodes |= new
        todo += new
    return nodes
