"""Decompositions of operators, and the dtypes and memory formats of their results."""

from collections.abc import Callable
from typing import Any

from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes, suggest_memory_format


def decompose_in_inductor(op: OpOverload, rule: Callable[..., object]) -> None:
    """Let Inductor decompose an operator of this package, for good."""
    from torch._inductor import decomposition

    # Both tables: the second is a copy of the first, which Inductor made once and keeps.
    for table in (decomposition.decompositions, decomposition.select_decomp_table()):
        table[op] = rule


def store_in_inductor(op: OpOverload) -> None:
    """Let Inductor write to memory what an operator of this package is given, in place of a call, for good.

    Of itself it computes what is pointwise again wherever that is read, unless it reads five tensors or more.
    """
    from torch._inductor.lowering import register_lowering

    def lower(x: Any) -> Any:
        x.realize()
        return x

    register_lowering(op, type_promotion_kind=None)(lower)
