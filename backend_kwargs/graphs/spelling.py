"""Graphs and values as text that is the same in every process, on every device of one kind, and for any names."""

import re
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from backend_kwargs.torch_internals.tensors import OperatorBase
from backend_kwargs.torch_internals.triton import code_of, kernel_and_constants

ADDRESS = re.compile(r"0x[0-9a-f]+")
SYMBOL = re.compile(r"\b[suz]\d+\b")
DEVICE = re.compile(r"(cpu|cuda|mps|xpu):\d+")
# Attributes of triton.autotune and triton.heuristics that affect a kernel's results or speed, besides its code.
DECORATED = ("configs", "keys", "reset_to_zero", "restore_value", "values")


def structure(gm: GraphModule) -> str:
    """Return the computation as text without the user's names, so that it is the same for the same graph anywhere."""
    numbers = {node: f"%{at}" for at, node in enumerate(gm.graph.nodes)}
    return "\n".join(line_of(gm, node, numbers) for node in numbers)


def line_of(gm: GraphModule | None, node: Node, numbers: Mapping[Node, str]) -> str:
    """Return a node as text: number, kind, what it calls or reads of `gm`, and arguments by their numbers."""
    args = "" if node.op == "placeholder" else spelled((node.args, _kwargs(node)), numbers)
    return f"{numbers[node]} = {node.op} {_target(gm, node)}{args}"


def _kwargs(node: Node) -> Mapping[str, object]:
    """Return the node's keywords; for a user's Triton kernel, its source in place of its number."""
    if "kernel_idx" not in node.kwargs:
        return node.kwargs
    kernel, constants = kernel_and_constants(node.kwargs)
    return {**node.kwargs, "kernel_idx": _source(kernel), "constant_args_idx": constants}


def _source(kernel: Any) -> list[str]:
    """Return the code of a Triton kernel and of all functions that it calls, and its decorators' arguments."""
    if hasattr(kernel, "src"):
        return [code_of(kernel)]
    arguments = [f"{name}: {_said(getattr(kernel, name))}" for name in DECORATED if hasattr(kernel, name)]
    return [*arguments, *_source(kernel.fn)]


def _said(value: object) -> str:
    """Return a decorator's argument as text, functions as their code."""
    if isinstance(value, Mapping):
        return str([f"{name}: {_said(value[name])}" for name in sorted(value)])
    if isinstance(value, list | tuple):
        return str([_said(each) for each in value])
    code = getattr(value, "__code__", None)
    return f"{code.co_code.hex()} {code.co_names} {code.co_consts}" if code else str(value)


class _Spelled(str):
    """A text that is its own repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def spelled(value: Any, numbers: Mapping[Node, str] = {}) -> str:
    """Return `value` as text that is the same in every process, and on every device of one kind."""
    return repr(map_aggregate(value, lambda leaf: _Spelled(_leaf(leaf, numbers))))


def _leaf(leaf: object, numbers: Mapping[Node, str]) -> str:
    """Return one value as text: a node by its number, a device by its kind, others without addresses."""
    if isinstance(leaf, Node):
        return numbers[leaf]
    if isinstance(leaf, torch.device) or (isinstance(leaf, str) and DEVICE.fullmatch(leaf)):
        return torch.device(leaf).type
    if isinstance(leaf, set | frozenset):  # their order differs between processes
        return f"{{{', '.join(sorted(map(spelled, leaf)))}}}"
    return ADDRESS.sub("", repr(leaf))


def _target(gm: GraphModule | None, node: Node) -> str:
    """Return what a node calls or reads, as text without the user's names."""
    target = node.target
    if node.op == "placeholder":
        return ""
    if node.op in ("get_attr", "call_module"):
        return _attribute(gm, str(target))
    if isinstance(target, str):
        return target
    if isinstance(target, OperatorBase):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target).__name__)}"


def _attribute(gm: GraphModule | None, path: str) -> str:
    """Return what is at `path` as text: a graph by its nodes, a tensor by its layout, others by their class."""
    value = attrgetter(path)(gm)
    if isinstance(value, GraphModule):
        return f"{{{structure(value)}}}"
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.device.type}"
    return type(value).__name__


def layout_of(value: torch.Tensor) -> str:
    """Return the sizes and strides of a tensor as text, with symbols for those that vary."""
    return f"{tuple(value.shape)} {tuple(value.stride()) if value.layout == torch.strided else value.layout}"


def numbered_symbols(texts: Iterable[str]) -> list[str]:
    """Return texts with symbols named as they come: torch names one after the place where its size was read."""
    names: dict[str, str] = {}
    return [SYMBOL.sub(lambda m: names.setdefault(m[0], f"n{len(names)}"), text) for text in texts]
