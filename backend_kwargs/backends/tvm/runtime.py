"""The callable of one part: inputs in the form that the VM needs, outputs as torch tensors."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import tvm
import tvm_ffi
from torch.fx import GraphModule
from torch.utils.dlpack import from_dlpack
from tvm import relax

from backend_kwargs.backends import Inputs
from backend_kwargs.backends.tvm.lowering.graph import Lowered
from backend_kwargs.graphs.parts import Run

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
            _after_last_stream(device)
            if brings_stream:
                return main.call(*inputs)
            with torch.cuda.device(device), tvm_ffi.use_torch_stream():
                return main.call(*inputs)

    return run


def _after_last_stream(device: torch.device) -> None:
    """Let the current stream wait for that of the last call on a device."""
    # TVM's pool reuses memory at once, which is safe only on one stream: there it follows the last use.
    current = torch.cuda.current_stream(device)
    last = _last_streams.get(device, current)
    if last != current:
        current.wait_stream(last)
    _last_streams[device] = current


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
