"""Operators: their classes, schemas, kernels and effects."""

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload, OpOverloadPacket

# Namespaces of torch's own operators, whose tags say what they do.
OPERATORS = {"aten", "inductor", "mkldnn", "prims", "profiler", "quantized", "quantized_decomposed", "rngprims"}


def overloads_of(target: object) -> list[Any]:
    """Return the overloads of an operator's packet, and anything else as it is."""
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    return [target]


def schema_of(target: object) -> Any:
    """Return the schema of an overload, None for anything that has no schema."""
    return getattr(target, "_schema", None)


def arguments_of(op: OpOverload) -> list[torch.Argument]:
    """Return the arguments that an overload's schema declares."""
    return list(op._schema.arguments)


def name_of(target: OpOverload | OpOverloadPacket) -> str:
    """Return the name of an operator with its namespace and without its overload: "aten::add"."""
    return target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name


def has_kernel(op: OpOverload, key: str = "") -> bool:
    """Return whether an overload has a kernel, for the dispatch key `key` if that is given; TorchScript's have none."""
    if key:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op._name, key)
    return torch._C._dispatch_has_kernel(op._name)


def is_composite(op: OpOverload) -> bool:
    """Return whether torch decomposes an operator for every backend: it has no kernel of its own on a CPU or a GPU."""
    keys = torch._C.DispatchKey
    whole = any(map(op.has_kernel_for_dispatch_key, (keys.CPU, keys.CUDA)))
    return not whole and bool(op.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd))


def has_effects(target: object) -> bool:
    """Return whether an operator has a registered effect, such as printing."""
    from torch._higher_order_ops import effects

    return any(map(effects.has_effects, overloads_of(target)))


def is_custom(op: OpOverload) -> bool:
    """Return whether `torch.library.custom_op` made an operator, whose kernel for autograd calls it again."""
    from torch._library.custom_ops import OPDEFS

    return op._schema.name in OPDEFS


def has_dispatch_rules(op: OpOverload) -> bool:
    """Return whether rules for dispatch modes are registered for an operator."""
    from torch._library.simple_registry import singleton

    return bool(singleton.find(op._schema.name).torch_dispatch_rules._data)


def is_lowered_by_inductor(op: OpOverload) -> bool:
    """Return whether Inductor has a decomposition of an operator, or lowers it."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    return op in decompositions or op in lowerings


def aten_names() -> set[str]:
    """Return the names of ATen's operators."""
    known = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return {name.partition(".")[0] for namespace, _, name in known if namespace == "aten"}
