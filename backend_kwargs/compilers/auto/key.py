"""Which decision is a graph's: for the same computation on the same inputs, machine and candidates."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

ADDRESS = re.compile(r"0x[0-9a-f]+")
SYMBOL = re.compile(r"\b[suz]\d+\b")


def structure(gm: GraphModule) -> str:
    """Return the computation as text in which no name of the user's stands: the same for the same graph anywhere."""
    numbers = {node: f"%{at}" for at, node in enumerate(gm.graph.nodes)}
    return "\n".join(_line(gm, node, numbers) for node in gm.graph.nodes)


def _line(gm: GraphModule, node: Node, numbers: Mapping[Node, str]) -> str:
    args = "" if node.op == "placeholder" else _arguments(node, numbers)
    return f"{numbers[node]} = {node.op} {_target(gm, node)}{args}"


def _arguments(node: Node, numbers: Mapping[Node, str]) -> str:
    spelled = map_arg((node.args, node.kwargs), lambda each: _Spelled(numbers[each]))
    return ADDRESS.sub("", repr(spelled))


class _Spelled(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _target(gm: GraphModule, node: Node) -> str:
    target = node.target
    if node.op == "placeholder":
        return ""
    if node.op in ("get_attr", "call_module"):
        return _attribute(gm, str(target))
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target).__name__)}"


def _attribute(gm: GraphModule, path: str) -> str:
    value: Any = gm
    for name in path.split("."):
        value = getattr(value, name)
    if isinstance(value, GraphModule):
        return f"{{{structure(value)}}}"
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.device.type}"
    return type(value).__name__


def signature(gm: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Return what each input is: shape (symbols where it varies), strides, dtype, device, whether it trains."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    described = [_input(node, value) for node, value in zip(placeholders, example_inputs, strict=True)]
    names: dict[str, str] = {}
    # A symbol's own name is made from where its size was read, which the next process may call otherwise.
    return [SYMBOL.sub(lambda m: names.setdefault(m[0], f"n{len(names)}"), text) for text in described]


def _input(node: Node, value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__ if isinstance(value, int | float | torch.SymInt) else repr(type(value))
    fake = node.meta.get("example_value")
    known = fake if isinstance(fake, torch.Tensor) else value
    strides = tuple(known.stride()) if known.layout == torch.strided else known.layout
    return f"{tuple(known.shape)} {strides} {value.dtype} {value.device.type} {value.requires_grad}"


def key_of(gm: GraphModule, example_inputs: Sequence[Any], asked: Mapping[str, Any]) -> str:
    """Return 64 hexadecimal digits for the graph, its inputs, this machine, and what is `asked` of a race."""
    told = {name: repr(value) for name, value in asked.items()}
    parts = [structure(gm), signature(gm, example_inputs), grad_mode(), machine(), told]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def structure_key(gm: GraphModule) -> str:
    """Return a short name for the computation whatever its sizes: that of a recompile is the same."""
    return hashlib.sha256(structure(gm).encode()).hexdigest()[:16]


def grad_mode() -> str:
    """Return in which of autograd's modes this thread is."""
    if torch.is_inference_mode_enabled():
        return "inference"
    return "grad" if torch.is_grad_enabled() else "no_grad"


@cache
def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in ("torch", "triton", "backend-kwargs")}


def machine() -> dict[str, Any]:
    """Return what a decision rests on beside the graph."""
    from backend_kwargs.requirements import machine as probed

    here, cuda = probed(), torch.cuda.is_available()
    return _versions() | {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cuda": here.cuda,
        "driver": here.driver,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "world": torch.distributed.get_world_size() if _distributed() else 1,
    }


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
