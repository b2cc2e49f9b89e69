"""What ONNX Runtime and OpenVINO share: compilers of parts for inference on a CPU."""

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import fx

from backend_kwargs.backends.part_compiler import TAGS, PartCompiler, has_floats
from backend_kwargs.torch_internals.operators import OpOverload, schema_of

LAYOUT = "depends on the memory layout"
MEMORY: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("as_strided", "as_strided_copy", "as_strided_scatter", "view_copy.dtype", "view.dtype"), LAYOUT)
    | dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), LAYOUT
    )
)


class Engine(PartCompiler):
    """An inference engine on a CPU; parameters are its constants."""

    tags: ClassVar[Mapping[torch.Tag, str]] = MappingProxyType(
        {**TAGS, torch.Tag.dynamic_output_shape: "its size depends on data"}
    )
    takes_nan: ClassVar[bool] = False
    settings: Any

    def __init__(self, settings: Any) -> None:
        self.settings, self.min_block_size = settings, settings.min_block_size

    def aten_ops(self, node: fx.Node) -> tuple[str, ...]:
        names: tuple[str, ...] = self.settings.aten_ops
        return names


def argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an operator by its name in the schema, whether given or not; None where it has no such."""
    assert isinstance(node.target, OpOverload)
    for at, each in enumerate(schema_of(node.target).arguments):
        if each.name == name:
            return node.args[at] if at < len(node.args) else node.kwargs.get(name, each.default_value)
    return None


def reads_floats(node: fx.Node) -> bool:
    """Return whether an input is of floating point."""
    return has_floats(node.all_input_nodes)


def uses_more_than_first(node: fx.Node) -> bool:
    """Return whether another result of a node than its first one is used."""
    return any(user.target is operator.getitem and user.args[1] != 0 for user in node.users)


def fixed_sizes(node: fx.Node) -> tuple[int, ...] | None:
    """Return the sizes of a node's result, or None if one is symbolic."""
    shape = node.meta["val"].shape
    return tuple(shape) if all(isinstance(size, int) for size in shape) else None


def dense(value: torch.Tensor | torch.SymInt | int) -> torch.Tensor:
    """Return an argument in the form that engines read: contiguous, detached, without a pending negation."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(int(value))
    if value.is_contiguous() and not (value.requires_grad or value.is_neg()):
        return value
    return value.detach().resolve_neg().contiguous()
