"""Decompositions for operators whose results have other strides in torch's fake tensors than in eager.

A part's results get the strides of the fake tensors.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from backend_kwargs.torch_internals.decompositions import suggest_memory_format
from backend_kwargs.torch_internals.operators import OpOverload

aten = torch.ops.aten
Rule = Callable[..., object]
Decompositions = Mapping[OpOverload, Rule]
# The position of the argument that they take their strides from. In eager the first ones keep channels last and no
# other layout; the results of the second ones are contiguous.
CHANNELS_LAST: Mapping[OpOverload, int] = dict.fromkeys(
    (
        aten.roll.default,
        aten.reflection_pad3d.default,
        aten.replication_pad3d.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
    ),
    0,
)
CONTIGUOUS: Mapping[OpOverload, int] = {
    **dict.fromkeys(
        (
            aten._weight_norm_interface.default,
            aten.baddbmm.default,
            aten.isin.Tensor_Scalar,
            aten.log_sigmoid_forward.default,
        ),
        0,
    ),
    aten.pow.Scalar: 1,
}


def with_eagers_layouts(table: Decompositions) -> dict[OpOverload, Rule]:
    """Return decompositions whose results have eager's strides."""
    decompositions = dict(table)
    for ops, keeps in ((CHANNELS_LAST, True), (CONTIGUOUS, False)):
        decompositions |= {op: partial(_laid_out, op, decompositions.get(op), at, keeps) for op, at in ops.items()}
    return decompositions


def _laid_out(op: OpOverload, rule: Rule | None, at: int, keeps: bool, *args: Any, **kwargs: Any) -> Any:
    """Compute on a contiguous argument, of which fake tensors are right, and lay the first result out as eager does."""
    x = args[at]
    if x.is_contiguous():
        return rule(*args, **kwargs) if rule else NotImplemented
    result = op(*args[:at], x.contiguous(), *args[at + 1 :], **kwargs)
    layout = suggest_memory_format(x) if keeps else torch.contiguous_format
    if isinstance(result, torch.Tensor):
        return result.contiguous(memory_format=layout)
    first, *others = result
    return first.contiguous(memory_format=layout), *others
