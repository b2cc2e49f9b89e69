"""Which of a graph's operators may be inlined below dynamo, so that compiled code contains their body."""

from types import FunctionType

import torch

from backend_kwargs.bundles.identity.library_code import is_library_name, is_own
from backend_kwargs.torch_internals.operators import (
    OpOverload,
    OpOverloadPacket,
    has_dispatch_rules,
    has_kernel,
    is_custom,
    is_lowered_by_inductor,
    overloads_of,
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
