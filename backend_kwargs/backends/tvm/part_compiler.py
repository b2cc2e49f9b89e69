"""TVM as a compiler of parts of graphs."""

from collections.abc import Collection, Mapping
from typing import ClassVar

import torch
from torch import fx

from backend_kwargs.backends import Inputs
from backend_kwargs.backends.part_compiler import LEFT_TO_ATEN, CompiledPart, PartCompiler, Unsupported
from backend_kwargs.backends.tvm.against_eager import why_eager
from backend_kwargs.backends.tvm.build import build
from backend_kwargs.backends.tvm.decompositions import decompositions
from backend_kwargs.backends.tvm.lowering import Kernels, lower
from backend_kwargs.backends.tvm.lowering.node import DTYPES
from backend_kwargs.backends.tvm.runtime import runner
from backend_kwargs.backends.tvm.settings import TVMOptions
from backend_kwargs.backends.tvm.supported import ATEN_OPS, DENIED, aten_ops
from backend_kwargs.facts import Call
from backend_kwargs.graphs.layouts import Decompositions
from backend_kwargs.graphs.parts import device_of, returned_by

DEVICES = ("cpu", "cuda")


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
