"""Build an executable from a Relax module: target, pipeline, schedules, code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from tvm import relax

from backend_kwargs.backends.tvm.no_fast_math import exact_math
from backend_kwargs.backends.tvm.opaque import hide
from backend_kwargs.backends.tvm.schedules import schedule
from backend_kwargs.backends.tvm.settings import TVMOptions
from backend_kwargs.backends.tvm.target import target_of, why
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.options.layers import Options

CUDA_GRAPH = "relax.backend.use_cuda_graph"
LEGALIZE = (
    relax.backend.DispatchSampling(),
    relax.backend.DispatchSortScan(),
    relax.transform.LegalizeOps(),
    relax.transform.AnnotateTIROpPattern(),
    relax.transform.FoldConstant(),
    relax.transform.FuseOps(),
    relax.transform.FuseTIR(),
    relax.transform.DeadCodeElimination(),
)
FINISH = (
    relax.transform.LegalizeOps(),
    relax.transform.RewriteDataflowReshape(),
    relax.transform.ToNonDataflow(),
    relax.transform.RemovePurityChecking(),
    relax.transform.CallTIRRewrite(),
    relax.transform.StaticPlanBlockMemory(),
    relax.transform.RewriteCUDAGraph(),
    relax.transform.LowerAllocTensor(),
    relax.transform.KillAfterLastUse(),
    relax.transform.LowerRuntimeBuiltin(),
    relax.transform.ComputePrimValue(),
    relax.transform.VMShapeLower(),
    relax.transform.AttachGlobalSymbol(),
)


@dataclass(frozen=True)
class Built:
    """The arguments of `relax.VirtualMachine`, and facts about the build."""

    executable: relax.VMExecutable
    target: str
    tuned: int = 0
    notes: tuple[str, ...] = ()


def build(mod: tvm.IRModule, settings: TVMOptions, device: torch.device) -> Built:
    """Compile `mod` for the device with these settings. Raises BackendKwargsError if an option is the cause."""
    target = target_of(settings.target, device)
    with target, _context(settings, device):
        passes = _passes("pipeline", settings.pipeline, relax.get_pipeline) or tvm.transform.Sequential(LEGALIZE)
        on_kernels = settings.tir_pipeline or "default"
        _passes("tir_pipeline", on_kernels, tvm.tirx.get_tir_pipeline)  # raises for a name that TVM does not know
        mod = passes(mod)
        mod, tuned, notes = schedule(mod, settings, target)
        if device.type == "cpu":  # GPU schedules recognize sums over threads by their operator until code is generated
            mod = hide(mod, totals=True)
        # Every pipeline that finishes a module removes its purity checks first.
        if "relax.force_pure" not in mod["main"].attrs:
            mod = tvm.transform.Sequential(FINISH)(mod)
        with exact_math(target):
            executable = relax.build(
                mod,
                target,
                relax_pipeline=None,
                tir_pipeline=on_kernels,
                exec_mode=settings.exec_mode,
            )
    return Built(executable, str(target.export()), tuned, notes)


def _passes(option: str, given: object, named: Callable[[str], Any]) -> Any:
    """Return the passes that TVM has under a name, or passes as they are. Raises BackendKwargsError."""
    if not isinstance(given, str):
        return given
    try:
        return named(given)
    except Exception as error:
        raise BackendKwargsError(f"Option {option!r}: {why(error)}.") from error


def _context(settings: TVMOptions, device: torch.device) -> tvm.transform.PassContext:
    """Return TVM's context with the options of passes. Raises BackendKwargsError for a wrong entry."""
    # Without a GPU there is nothing to record, and TVM would look up a function of its CUDA runtime.
    config: Options = {CUDA_GRAPH: True} if settings.cuda_graph and device.type == "cuda" else {}
    try:
        return tvm.transform.PassContext(
            opt_level=2 if settings.opt_level is None else settings.opt_level,
            config={**config, **settings.pass_config},
        )
    except AttributeError as error:
        raise BackendKwargsError(f"Option 'pass_config': {why(error)}.") from error
