"""Graphs, their inputs and torch's state as text for keys.

It is the same in every process, on every device of one kind, and for any names.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from backend_kwargs.torch_internals.tensors import OperatorBase, allowed_attention, has_static_address
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


# ---- inputs, and torch's state

MOST_INPUTS = 32  # that are described
AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "maia")


def signature(gm: GraphModule, example_inputs: Sequence[object]) -> list[str]:
    """Return a description of each input, with its shape (symbols for sizes that vary) and strides."""
    texts = []
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        fake = node.meta.get("example_value")  # which has symbols
        known = fake if isinstance(fake, torch.Tensor) else value
        texts.append(f"{_kind(value)} {layout_of(known) if isinstance(known, torch.Tensor) else ''}")
    return numbered_symbols(texts)


def _kind(value: object) -> str:
    """Return the properties of an input besides its sizes: rank, dtype, device, requires_grad, and a static address.

    An input with a static address is not copied by CUDA graphs.
    """
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    stays = " static" if has_static_address(value) else ""
    return f"{value.dim()} {value.dtype} {value.device.type} {value.requires_grad}{stays}"


def kinds(example_inputs: Sequence[object]) -> list[str]:
    """Return a description of each input whatever its sizes."""
    return [*map(_kind, example_inputs)]


def described(example_inputs: Sequence[object]) -> tuple[str, ...]:
    """Return the dtypes and sizes of the inputs that are not parameters, for people to read."""
    given = [each for each in example_inputs if not isinstance(each, torch.nn.Parameter)]
    words = [
        f"{str(each.dtype).removeprefix('torch.')} {'x'.join(map(str, each.shape)) or 'scalar'}"
        if isinstance(each, torch.Tensor)
        else type(each).__name__
        for each in given
    ]
    return tuple(words[:MOST_INPUTS])


def devices_of(example_inputs: Sequence[object]) -> list[str]:
    """Return the kinds of devices that the inputs are on."""
    return sorted({value.device.type for value in example_inputs if isinstance(value, torch.Tensor)})


def card_of(example_inputs: Sequence[object]) -> int | None:
    """Return the index of the first GPU that an input is on, None if none is: it need not be the current one."""
    return next((each.device.index for each in example_inputs if isinstance(each, torch.Tensor) and each.is_cuda), None)


def ambient() -> dict[str, object]:
    """Return the parts of torch's state that affect how the graph computes."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    # Not torch.get_float32_matmul_precision(), which raises if these differ.
    backends: Any = torch.backends
    float32 = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul)
    return {
        "defaults": f"{torch.get_default_dtype()} {torch.get_default_device().type}",
        "grad": "inference" if torch.is_inference_mode_enabled() else "grad" if torch.is_grad_enabled() else "no_grad",
        "autocast": {kind: str(torch.get_autocast_dtype(kind)) for kind in kinds},
        # A graph may contain torch.autocast() itself, which reads these.
        "autocast defaults": [str(torch.get_autocast_dtype(kind)) for kind in AUTOCAST],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "fast paths": [backends.mha.get_fastpath_enabled(), backends.opt_einsum.enabled, backends.opt_einsum.strategy],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "libraries": [library.enabled for library in (backends.cudnn, backends.mkldnn)],
        "float32": [backend.fp32_precision for backend in float32],
        "attention": allowed_attention(),
    }
