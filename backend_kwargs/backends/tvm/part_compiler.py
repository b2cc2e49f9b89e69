"""TVM as a compiler of parts of graphs.

A tuned graph is timed against eager: tuning measures kernels alone, which may not be enough.
"""

from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
from torch import fx

from backend_kwargs import trial
from backend_kwargs.backends import Inputs
from backend_kwargs.backends.part_compiler import LEFT_TO_ATEN, CompiledPart, PartCompiler, Unsupported
from backend_kwargs.backends.tvm.build import build
from backend_kwargs.backends.tvm.lowering.graph import lower
from backend_kwargs.backends.tvm.lowering.kernels import Kernels
from backend_kwargs.backends.tvm.lowering.node import DTYPES
from backend_kwargs.backends.tvm.runtime import runner
from backend_kwargs.backends.tvm.settings import TVMOptions
from backend_kwargs.backends.tvm.supported import ATEN_OPS, DENIED, aten_ops, decompositions
from backend_kwargs.facts import Call
from backend_kwargs.graphs.eligibility import communicates, why_not_repeatable
from backend_kwargs.graphs.layouts import Decompositions
from backend_kwargs.graphs.parts import device_of, returned_by
from backend_kwargs.graphs.replay import Task
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.torch_internals.guards import tracing
from backend_kwargs.trial.draws import DrawsError

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
