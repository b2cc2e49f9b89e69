"""TVM as a compiler of parts of graphs.

It gets the operators of core ATen but for a few; some of those are decomposed too, and some stay in eager. A tuned
graph is timed against eager: tuning measures kernels alone, which may not be enough.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import fx

from backend_kwargs import trial
from backend_kwargs.backends import Inputs
from backend_kwargs.backends.partitioned import LEFT_TO_ATEN, CompiledPart, PartCompiler, Unsupported, work
from backend_kwargs.backends.tvm.build import build
from backend_kwargs.backends.tvm.lowering.graph import Kernels, lower
from backend_kwargs.backends.tvm.lowering.node import DTYPES
from backend_kwargs.backends.tvm.runtime import runner
from backend_kwargs.backends.tvm.settings import TVMOptions
from backend_kwargs.facts import Call
from backend_kwargs.graphs.parts import Decompositions, device_of, names_of, returned_by, tensors_of
from backend_kwargs.graphs.replay import Task
from backend_kwargs.graphs.writes import communicates, copy_of_graph, why_not_repeatable
from backend_kwargs.torch_internals.dynamo import tracing
from backend_kwargs.torch_internals.tensors import core_aten_decompositions, get_decompositions, name_of
from backend_kwargs.trial.roundings import DrawsError

REASONS: dict[str, str] = {
    "reads memory by strides": "as_strided as_strided_copy as_strided_scatter view.dtype view_copy.dtype",
    "its memory is uninitialised": "empty empty_like empty_permuted empty_strided new_empty new_empty_strided",
    "several sources may meet in one element": (
        "embedding_dense_backward index_add index_put index_reduce masked_scatter scatter scatter_add scatter_reduce"
    ),
    "TVM's sort orders equal elements and nan differently": (
        "kthvalue median mode nanmedian sort topk unique_consecutive"
    ),
    "a running result has no parallel loop": "cummax cummin cumprod cumsum logcumsumexp",
    "eager raises if an index is out of bounds": "embedding gather index index_select",
    "ATen's algorithm is far better than a plain loop": (
        "avg_pool2d_backward avg_pool3d_backward convolution_backward max_pool2d_with_indices_backward"
    ),
}
DENIED = {op: reason for reason, ops in REASONS.items() for op in ops.split()}
PRODUCTS = ("mm", "addmm", "bmm", "convolution")
# If 'aten_ops' is None: TVM has no library for these, and a vendor's is much faster than generated loops.
ATEN_OPS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("_scaled_dot_product_flash_attention_for_cpu",),
    "cuda": (*PRODUCTS, *(f"_scaled_dot_product_{kind}_attention" for kind in ("cudnn", "efficient", "flash"))),
}
# Of a product on a CPU, beyond which oneDNN is better; a smaller one is fused with its neighbours.
MOST_FLOPS, MOST_CONVOLUTION_FLOPS = 1e6, 2.5e5


def aten_ops(node: fx.Node) -> tuple[str, ...]:
    """Return the operators that are left to ATen where `node` is, unless the user names others."""
    device, names = tensors_of(node)[0].device.type, names_of(node)
    most = MOST_CONVOLUTION_FLOPS if "convolution" in names else MOST_FLOPS
    large = device == "cpu" and not set(PRODUCTS).isdisjoint(names) and work(node) > most
    return (*ATEN_OPS.get(device, ()), *(PRODUCTS if large else ()))


# ---- decompositions

aten = torch.ops.aten
# Core ATen keeps these whole; they are decomposed, since TVM fuses the parts.
DECOMPOSED = (
    *(aten.elu, aten.gelu, aten.hardtanh, aten.leaky_relu, aten.linalg_vector_norm, aten.slice_scatter, aten._softmax),
    *(aten._log_softmax, aten.native_layer_norm, aten.native_group_norm, aten._native_batch_norm_legit),
    *(aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit_no_training),
)
# Decomposed, these read by indices, which TVM does not get: some may be out of bounds.
WITHIN_BOUNDS = frozenset({"_unsafe_index", "roll"})
# Decomposed, it adds one element after the other.
ADDS_UP = frozenset({"index_add"})
# Decomposed, these draw other random numbers than eager.
RANDOM = frozenset({"bernoulli", "native_dropout", "rrelu_with_noise", "rrelu_with_noise_functional"})
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
# Decomposed, its logsumexp is wrong, which the backward pass reads.
WRONG_IN_TRAINING = frozenset({"_scaled_dot_product_flash_attention_for_cpu"})


def decompositions(kept: Collection[str] = (), trains: bool = False) -> Decompositions:
    """Return the decompositions, except for operators in `kept`, by name, and those that TVM gets whole."""
    kept = {*kept, *WITHIN_BOUNDS, *ADDS_UP, *RANDOM, *(WRONG_IN_TRAINING if trains else ())}
    table = {**core_aten_decompositions(), **get_decompositions(DECOMPOSED)}
    table[ATTENTION] = partial(_attention, table[ATTENTION])
    return {op: rule for op, rule in table.items() if name_of(op).removeprefix("aten::") not in kept}


def _attention(
    rule: Callable[..., tuple[torch.Tensor, ...]], query: torch.Tensor, *args: object, **kwargs: object
) -> tuple[torch.Tensor, ...]:
    """Decompose attention, with the strides of the query for the result, as in eager: users view it."""
    result, *rest = rule(query, *args, **kwargs)
    if query.stride(1) < query.stride(2):
        return result.transpose(1, 2).contiguous().transpose(1, 2), *rest
    return result.contiguous(), *rest


DEVICES = ("cpu", "cuda")
ROUNDS, BUDGET_S = 30, 1.0


class TVM(PartCompiler):
    """TVM, by Relax and its virtual machine."""

    name: ClassVar[str] = "TVM"
    namespaces: ClassVar[Collection[str]] = ("aten", "prims")
    dtypes: ClassVar[Mapping[torch.dtype, str]] = DTYPES
    denied: ClassVar[Mapping[str, str]] = DENIED
    unreported: ClassVar[Collection[str]] = (LEFT_TO_ATEN,)
    trains: ClassVar[bool] = True

    def __init__(self, settings: TVMOptions) -> None:
        self.settings, self.freezes, self.kernels = settings, settings.freeze, Kernels()
        self.fallback, self.verify = settings.fallback, settings.verify

    def decompositions(self, trains: bool) -> Decompositions:
        whole = self.settings.aten_ops
        return decompositions(ATEN_OPS["cpu"] if whole is None else whole, trains)

    def aten_ops(self, node: fx.Node) -> Collection[str]:
        return aten_ops(node) if self.settings.aten_ops is None else self.settings.aten_ops

    def misplaced(self, devices: Collection[torch.device]) -> str:
        if any(device.type not in DEVICES for device in devices):
            return f"TVM has no device {', '.join(sorted(map(str, devices)))} here"
        return "on several devices" if len(devices) > 1 else ""

    def lacks(self, node: fx.Node) -> str:
        try:
            self.kernels.of(node)
        except Unsupported as unsupported:
            return unsupported.reason
        return ""

    def compile(self, part: fx.GraphModule) -> CompiledPart:
        device, lowered = device_of(returned_by(part)[0]), lower(part, self.kernels)
        built = build(lowered.mod, self.settings, device)
        return CompiledPart(runner(part, lowered, built.executable, device), built.target, built.tuned, built.notes)

    def why_eager(self, gm: fx.GraphModule, example_inputs: Inputs, compiled: Call) -> str:
        raced = self.settings.scheduler == "meta_schedule" and self.fallback != "error"
        return why_eager(gm, example_inputs, compiled) if raced else ""


def why_eager(gm: fx.GraphModule, example_inputs: Inputs, compiled: Call) -> str:
    """Return why dynamo's graph runs faster in eager than `compiled`, with both times; "" if it does not.

    Both are called as the compiled function is, without gradients, and on copies of inputs that a call changes. What
    `auto` would not race is not timed either, nor are operators that are not torch's: each call would repeat them.
    """
    if communicates(gm) or why_not_repeatable(gm, example_inputs, custom_ops=False):
        return ""
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    # The calls are not part of dynamo's compile, whose context AOTAutograd would change.
    with tracing(None):
        try:
            task = Task.of(copy_of_graph(gm), example_inputs)
        except DrawsError:  # as another thread may
            return ""
        calls = {"eager": task.caller(gm.forward), "TVM": task.caller(compiled)}
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), tensors[0].device)
        with task.generators_kept():
            samples = trial.interleave(calls, rounds=ROUNDS, device=device, warmup=2, budget_s=BUDGET_S)
    if trial.ratio_interval(samples["eager"], samples["TVM"]).median >= 1:
        return ""
    eager, tvm = (f"{trial.median_interval(samples[name]).median * 1e3:.3g} ms" for name in calls)
    return f"it is faster: {eager} a call, and {tvm} with TVM"
