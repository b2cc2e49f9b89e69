"""TVM as a compiler of parts of graphs.

It gets the operators of core ATen but for a few; some of those are decomposed too, and some stay in eager. A tuned
graph is timed against eager: tuning measures kernels alone, which may not be enough. A part is called with inputs in
the form that the VM needs, and returns torch tensors.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeAlias

import torch
import tvm
import tvm_ffi
from torch import fx
from torch.fx import GraphModule
from torch.utils.dlpack import from_dlpack
from tvm import relax

from backend_kwargs import trial
from backend_kwargs.backends import Inputs
from backend_kwargs.backends.partitioned import LEFT_TO_ATEN, CompiledPart, PartCompiler, Unsupported, work
from backend_kwargs.backends.tvm.build import build
from backend_kwargs.backends.tvm.lowering.graph import Kernels, Lowered, lower
from backend_kwargs.backends.tvm.lowering.node import DTYPES
from backend_kwargs.backends.tvm.settings import TVMOptions
from backend_kwargs.facts import Call
from backend_kwargs.graphs.parts import Decompositions, Run, device_of, names_of, returned_by, tensors_of
from backend_kwargs.graphs.replay import Task
from backend_kwargs.graphs.writes import communicates, copy_of_graph, why_not_repeatable
from backend_kwargs.torch_internals.dynamo import tracing
from backend_kwargs.torch_internals.tensors import core_aten_decompositions, get_decompositions, name_of
from backend_kwargs.trial.roundings import DrawsError

# TVM's code loads whole vectors from addresses aligned as in its own tensors; other addresses crash the process.
ALIGNMENT = 64

# The VM returns one tensor or several: torch's if an input was one, else TVM's.
Results: TypeAlias = torch.Tensor | tvm.runtime.Tensor | Sequence[torch.Tensor | tvm.runtime.Tensor]

_last_streams: dict[torch.device, torch.cuda.Stream] = {}
_launching = threading.Lock()


class _Main(threading.local):
    """The function "main" in a VM for each thread: a VM is not re-entrant, and TVM releases the GIL."""

    def __init__(self, library: tvm.runtime.Module, device: tvm.runtime.Device, allocator: str) -> None:
        self.call = relax.VirtualMachine(library, device, allocator)["main"]


def runner(part: GraphModule, lowered: Lowered, executable: relax.VMExecutable, device: torch.device) -> Run:
    """Return a function that computes the results of `part` by the VM, none of them in the memory of another value."""
    placeholders = {node.name: node.meta["val"] for node in part.graph.find_nodes(op="placeholder")}
    names = list(placeholders)
    positions = [names.index(name) for name in lowered.inputs]
    sizes = lowered.shape_sources
    # A pool would keep memory for each size that ever occurred.
    main = _Main(executable.jit(), tvm.device(device.type, device.index or 0), "naive" if sizes else "pooled")
    brings_stream = any(isinstance(placeholders[name], torch.Tensor) for name in lowered.inputs)
    run = _on_stream(device, main, brings_stream=brings_stream)
    shared: list[int] | None = None

    def call(args: Inputs) -> list[torch.Tensor]:
        nonlocal shared
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # TVM's pool would reuse memory that the user's own CUDA graph writes at each replay.
            result = part(*args)
            return [result] if isinstance(result, torch.Tensor) else list(result)
        inputs = [_ready(args[i]) for i in positions]
        if sizes:
            named = dict(zip(names, args, strict=True))
            inputs.append(tvm_ffi.Shape(tuple(source.read(named) for source in sizes)))
        outputs = _tensors(run(inputs))
        if shared is None:
            shared = _shared(outputs, inputs, _tensors(run(inputs)))
        for i in shared:
            outputs[i] = outputs[i].clone()
        return outputs

    return call


def _ready(value: object) -> object:
    """Return an input in the VM's form: dense, aligned, with no operation pending; unchanged if it has that form."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_neg():
        value = value.resolve_neg()
    if not value.is_contiguous():
        value = value.contiguous()
    return value.clone() if value.data_ptr() % ALIGNMENT else value


def _on_stream(device: torch.device, main: _Main, *, brings_stream: bool) -> Callable[[Inputs], Results]:
    """Return a function that calls the VM on torch's current stream; any tensor among the inputs sets the stream."""
    if device.type == "cpu":
        return lambda inputs: main.call(*inputs)

    def run(inputs: Inputs) -> Results:
        # One at a time: between the wait and the launch, another thread's call could reuse the pool's memory.
        with _launching:
            # TVM's pool reuses memory at once, which is safe only on one stream: there it follows the last use.
            current = torch.cuda.current_stream(device)
            last = _last_streams.get(device, current)
            if last != current:
                current.wait_stream(last)
            _last_streams[device] = current
            if brings_stream:
                return main.call(*inputs)
            with torch.cuda.device(device), tvm_ffi.use_torch_stream():
                return main.call(*inputs)

    return run


def _tensors(returned: Results) -> list[torch.Tensor]:
    """Return the VM's results as torch tensors, which they are already if an input was one."""
    outputs = [returned] if isinstance(returned, torch.Tensor | tvm.runtime.Tensor) else list(returned)
    return [each if isinstance(each, torch.Tensor) else from_dlpack(each) for each in outputs]


def _shared(outputs: Sequence[torch.Tensor], inputs: Inputs, again: Sequence[torch.Tensor]) -> list[int]:
    """Return which outputs are an input, an earlier output, or constants, which a second run returned `again`.

    The VM does the same at each call, so checking one call suffices.
    """
    addresses = {value.data_ptr() for value in inputs if isinstance(value, torch.Tensor)}
    shared = []
    for i, (output, later) in enumerate(zip(outputs, again, strict=True)):
        address = output.data_ptr()
        if output.numel() and (address in addresses or address == later.data_ptr()):
            shared.append(i)
        addresses.add(address)
    return shared


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
        if self.settings.aten_ops is not None:
            return self.settings.aten_ops
        device, names = tensors_of(node)[0].device.type, names_of(node)
        most = MOST_CONVOLUTION_FLOPS if "convolution" in names else MOST_FLOPS
        large = device == "cpu" and not set(PRODUCTS).isdisjoint(names) and work(node) > most
        return (*ATEN_OPS.get(device, ()), *(PRODUCTS if large else ()))

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
        """Return why dynamo's graph runs faster in eager than `compiled`, with both times; "" if it does not.

        Tuned code is timed. Both are called as the compiled function is, without gradients, and on copies of inputs
        that a call changes. What `auto` would not race is not timed, nor are operators that are not torch's: each call
        would repeat them.
        """
        if self.settings.scheduler != "meta_schedule" or self.fallback == "error":
            return ""
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
