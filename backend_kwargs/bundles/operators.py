"""Which of a graph's operators may be inlined below dynamo, so that compiled code contains their body."""

import sys
from types import FunctionType

import torch

from backend_kwargs.torch_internals.modes import (
    OpOverload,
    OpOverloadPacket,
    has_dispatch_rules,
    has_kernel,
    is_custom,
    is_lowered_by_inductor,
    overloads_of,
)

# The releases of torch and Python are compared when a bundle is loaded.
LIBRARIES = frozenset(
    {"torch", "numpy", "builtins", "math", "cmath", "operator", "functools", "itertools", "collections", "typing"}
    | {"_operator", "_functools", "_collections", "_collections_abc", "abc", "enum", "types", "typing_extensions"}
    | {"dataclasses", "numbers", "fractions", "contextlib", "warnings", "_warnings", "logging", "string", "re"}
    | {"bisect", "_bisect", "heapq", "_heapq", "copy", "reprlib"}
)
# Operators of other namespaces may have changed when the code is loaded.
TORCH_NAMESPACES = frozenset(
    {"aten", "prim", "prims", "profiler", "inductor", "quantized", "quantized_decomposed", "mkldnn", "mkl", "onednn"}
    | {"_c10d_functional", "c10d_functional", "_quantized", "rngprims", "debugprims", "symm_mem", "c10d"}
)
# Kernels with these keys run while a graph is traced, and what they call becomes part of it.
TRACED_KEYS = ("CompositeImplicitAutograd", "Autograd", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")


def inlined(gm: torch.fx.GraphModule) -> str | None:
    """Return the name of a call in the graph whose body may become part of compiled code, None if there is none."""
    for each in gm.modules():
        if not isinstance(each, torch.fx.GraphModule):
            continue
        for node in each.graph.nodes:
            if node.op == "call_function" and not _is_opaque(node.target):
                is_function = isinstance(node.target, FunctionType)
                return node.target.__qualname__ if is_function else str(node.target)
            if node.op == "call_module" and not isinstance(each.get_submodule(node.target), torch.fx.GraphModule):
                return str(node.target)
    return None


def _is_opaque(target: object) -> bool:
    """Return whether compiled code calls `target` itself, or has of it what torch's release determines."""
    if isinstance(target, OpOverloadPacket):
        return all(map(_is_opaque, overloads_of(target)))
    if isinstance(target, OpOverload):
        return target.namespace in TORCH_NAMESPACES or not _is_traced(target)
    if isinstance(target, FunctionType):
        return is_own(target)
    return is_library_name(getattr(target, "__module__", None) or type(target).__module__)


def _is_traced(op: OpOverload) -> bool:
    """Return whether an operator's own Python code may become part of a graph."""
    # A custom_op's own kernel for autograd calls the operator again.
    keys = [key for key in TRACED_KEYS if key != "Autograd" or not is_custom(op)]
    return (
        any(has_kernel(op, key) for key in keys)
        or bool(op.py_kernels)
        or has_dispatch_rules(op)
        or is_lowered_by_inductor(op)
    )


def is_own(function: FunctionType) -> bool:
    """Return whether a function's code is in the source file of a library's module."""
    name = function.__globals__.get("__name__", "")
    module = sys.modules.get(name)
    return (
        module is not None
        and is_library_name(name)
        and function.__globals__ is vars(module)
        and function.__code__.co_filename in (getattr(module, "__file__", None), f"<frozen {name}>")
    )


def is_library_name(name: str) -> bool:
    """Return whether a Python module of this name belongs to a library whose release is compared."""
    return name.partition(".")[0] in LIBRARIES
