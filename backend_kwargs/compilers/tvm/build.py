"""From a Relax module to an executable: target, pipeline, schedules, code."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from tvm import relax
from tvm.tirx.compilation_pipeline import PIPELINE_MAP

from backend_kwargs.compilers.tvm.schedules import schedule
from backend_kwargs.compilers.tvm.target import target_of
from backend_kwargs.errors import BackendKwargsError, unknown

CUDA_GRAPH = "relax.backend.use_cuda_graph"
# "static_shape_tuning" is left out: it wants arguments of its own, and scheduler="meta_schedule" does what it is for.
PIPELINES = ("default", "default_build", "zero")
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
    """What `relax.VirtualMachine` takes, and what was done for it."""

    executable: Any
    target: str
    tuned: int = 0
    notes: tuple[str, ...] = ()


def build(mod: tvm.IRModule, settings: Any, device: torch.device) -> Built:
    """Compile `mod` for the device as the settings say. Raises BackendKwargsError where they are at fault."""
    target = target_of(settings.target, device)
    with target, _context(settings):
        mod = _pipeline(settings.pipeline)(mod)
        mod, tuned, notes = schedule(mod, settings, target)
        # Every pipeline that finishes a module takes its purity checks away first.
        if "relax.force_pure" not in mod["main"].attrs:
            mod = tvm.transform.Sequential(FINISH)(mod)
        executable = relax.build(
            mod, target, relax_pipeline=None, tir_pipeline=_tir(settings.tir_pipeline), exec_mode=settings.exec_mode
        )
    return Built(executable, str(target.export()), tuned, notes)


def _context(settings: Any) -> Any:
    config: Mapping[str, Any] = {CUDA_GRAPH: True} if settings.cuda_graph else {}
    try:
        return tvm.transform.PassContext(
            opt_level=2 if settings.opt_level is None else settings.opt_level,
            config={**config, **settings.pass_config},
        )
    except AttributeError as error:
        raise BackendKwargsError(f"Option 'pass_config': {error}") from error


def _pipeline(named: Any) -> Any:
    if named is None:
        return tvm.transform.Sequential(LEGALIZE)
    if not isinstance(named, str):
        return named
    if named not in PIPELINES:
        raise unknown("TVM pipeline", named, PIPELINES, otherwise=f"TVM has {', '.join(PIPELINES)}.")
    return relax.get_pipeline(named)


def _tir(named: Any) -> Any:
    named = "default" if named is None else named
    if isinstance(named, str) and named not in PIPELINE_MAP:
        raise unknown("TIR pipeline", named, PIPELINE_MAP, otherwise=f"TVM has {', '.join(PIPELINE_MAP)}.")
    return named
