"""TVM's options with their docs and checks, which of its releases work, and an import of it without side effects.

`make_backend` refuses other releases at once: nothing else would compile the graph.
"""

import ctypes
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, Literal

from backend_kwargs.errors import BackendKwargsError, pip_install, unknown
from backend_kwargs.options.machine import Limit, Lookup, Need, Requirement, Rule, installed_version, places_of
from backend_kwargs.options.option import Options, Where, declared
from backend_kwargs.torch_internals.replacing import replaced, undone

# By distribution, the required release. Each TVM renames its API; with a later FFI tuning crashes.
WORKING: Mapping[str, str] = MappingProxyType({"apache-tvm": "0.27", "apache-tvm-ffi": "0.1.14"})
INSTALL = pip_install("tvm")
SIGACTION_BYTES = 1024  # more than the `struct sigaction` of any system


def has_cuda() -> bool:
    """Return whether the installed TVM has its CUDA library; importing TVM to find out would take seconds."""
    return any(library for place in places_of("tvm") for library in place.glob("lib/*tvm_runtime_cuda*"))


CUDA = Requirement(
    lambda _: has_cuda(), "the installed apache-tvm is not a GPU build (it has no CUDA runtime)", INSTALL
)


def unfit() -> str:
    """Return why the installed TVM cannot be used, "" if it can; imports nothing."""
    for name, release in WORKING.items():
        found = installed_version(name)
        if found is None:
            return f"{name} {release} is not installed"
        if not found.startswith(f"{release}."):
            return f"{name} is {found} and {release} is wanted"
    return ""


def import_tvm() -> ModuleType:
    """Import tvm, which is fit for use, after torch, and restore the process's hooks."""
    import torch  # noqa: F401 - first, since both load libraries of the same names

    with _hooks_kept():
        import tvm
    return tvm  # type: ignore[no-any-return]


@contextmanager
def _hooks_kept() -> Iterator[None]:
    """Restore what `import tvm` replaces: sys.excepthook, and the process's action on SIGSEGV."""
    libc = None if sys.platform == "win32" else ctypes.CDLL(None)
    action = ctypes.create_string_buffer(SIGACTION_BYTES)
    with replaced(sys, "excepthook", sys.excepthook), undone() as stack:
        if libc is not None and libc.sigaction(signal.SIGSEGV, None, action) == 0:
            stack.callback(libc.sigaction, signal.SIGSEGV, action, None)
        yield


# ---- the options

KIND = "TVM option"
TUNING = "scheduler='meta_schedule', trials=64"
Number = Annotated[int, Where("of at least 0", lambda number: number >= 0)]
Positive = Annotated[int, Where("of at least 1", lambda number: number >= 1)]
# The decompositions of operators that users name first.
BECOMES: Mapping[str, tuple[str, ...]] = {
    "linear": ("addmm", "mm"),
    "matmul": ("mm", "bmm"),
    "softmax": ("_softmax",),
    "log_softmax": ("_log_softmax",),
    "layer_norm": ("native_layer_norm",),
    "group_norm": ("native_group_norm",),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose2d"), ("convolution",)),
}


@dataclass(frozen=True, slots=True)
class TVMOptions:
    """The options of TVM, with their defaults."""

    target: Annotated[str | dict[str, Any] | None, "what to generate code for: a kind, or a dict with 'kind'"] = None
    pipeline: Annotated[str | Callable[..., Any] | None, "Relax passes: a name, or a tvm Pass; None: ours"] = None
    pass_config: Annotated[dict[str, Any], "entries of TVM's PassContext(config=...)"] = field(default_factory=dict)
    exec_mode: Annotated[Literal["bytecode", "compiled"], "how Relax's virtual machine runs"] = "bytecode"
    tir_pipeline: Annotated[str | Callable[..., Any] | None, "passes over kernels: a name, or a tvm Pass"] = None
    cuda_graph: Annotated[bool, "record the launches of kernels as CUDA graphs"] = False
    scheduler: Annotated[
        Literal["meta_schedule", "dlight"] | None, "how kernels get their loops: by search, by dlight's rules, by ours"
    ] = None
    trials: Annotated[Number, "schedules to measure, over all kernels; 0 reuses the results in work_dir"] = 64
    max_trials_per_task: Annotated[Positive | None, "the most trials for one kernel; None: a fair share"] = None
    num_trials_per_iter: Annotated[Positive, "schedules measured between two updates of the cost model"] = 16
    cost_model: Annotated[Literal["random", "xgb", "mlp"], "cost model of the search"] = "random"
    strategy: Annotated[Literal["evolutionary", "replay-trace", "replay-func"], "the search strategy"] = "evolutionary"
    seed: Annotated[Number | None, "seed of the search"] = None
    work_dir: Annotated[str | None, "folder of tuning results; without a search, they are only reused"] = None
    fallback: Annotated[
        Literal["partition", "graph", "error"], "what may run in eager if TVM lacks an operator: a part, all, nothing"
    ] = "partition"
    freeze: Annotated[bool, "parameters become constants; changes of them compile again; inference only"] = False
    aten_ops: Annotated[
        tuple[str, ...] | None,
        "operators left to ATen, such as 'mm'; None: attention, products and convolutions (on a CPU the large ones)",
    ] = None
    verify: Annotated[bool, "compare the first call with eager's, and run in eager if it differs"] = False
    opt_level: Annotated[Number | None, "of TVM's PassContext; ignored by Relax"] = None

    @classmethod
    def of(cls, options: Options) -> "TVMOptions":
        """Return the settings for checked `options`: a work_dir alone reuses tuning results."""
        reuses = {"scheduler": "meta_schedule", "trials": 0} if _reuses(options) else {}
        return cls(**{**options, **reuses})


OPTIONS = declared(TVMOptions, data={"aten_ops"})

GONE = "was removed from TVM"
# Options known to users of older releases, of other backends or of torch.compile.
REMOVED: Mapping[str, str] = {
    **dict.fromkeys(("auto_scheduler", "autotvm", "ansor"), f"{GONE}; write {TUNING}"),
    **dict.fromkeys(("executor", "runtime"), f"{GONE} with Relay; 'exec_mode' says how the VM runs"),
    "desired_layouts": f"{GONE} with Relay; write a pass and pass it as 'pipeline'",
    "mode": "is for Inductor; TVM has 'scheduler' and 'trials'",
}


def verify(options: Options, tell: Callable[[Limit], None]) -> None:
    """Raise if options that are valid alone contradict each other; call `tell` if there are no results to reuse."""
    _check_aten_ops(options.get("aten_ops") or ())
    tunes, work_dir = options.get("scheduler") == "meta_schedule", options.get("work_dir")
    if options.get("trials") and not tunes:
        raise BackendKwargsError(f"{KIND} 'trials' needs a search: also write {TUNING.partition(',')[0]}.")
    if options.get("trials") == 0 and not work_dir:
        raise BackendKwargsError(f"{KIND} 'trials' of 0 reuses what was tuned before: say where by work_dir='...'.")
    if work_dir and (_reuses(options) or options.get("trials") == 0) and not any(Path(work_dir).rglob("*.json")):
        why, remedy = f"{work_dir!r} contains no results of a search", f"also write {TUNING}, once"
        tell(Limit("TVM option 'work_dir'", why, remedy, "nothing is tuned"))


def _check_aten_ops(names: Sequence[str]) -> None:
    """Raise for operators that ATen lacks, or that no graph has when TVM sees it."""
    import torch

    from backend_kwargs.torch_internals.tensors import aten_names, is_composite, overloads_of, schema_of

    for op in names:
        if not op.isidentifier() or op.startswith("__") or not hasattr(torch.ops.aten, op):
            raise unknown("ATen operator", op, aten_names())
        overloads = overloads_of(getattr(torch.ops.aten, op))
        if not (functional := [each for each in overloads if not schema_of(each).is_mutable]):
            raise BackendKwargsError(f"ATen operator {op!r} writes in place, which no graph does that TVM sees.")
        if all(map(is_composite, functional)):
            instead = f"name {' and '.join(map(repr, BECOMES[op]))} instead" if op in BECOMES else ""
            step = instead or 'TORCH_LOGS="aot_graphs" shows how'
            raise BackendKwargsError(f"ATen operator {op!r} is taken apart before TVM sees a graph: {step}.")


def _reuses(options: Options) -> bool:
    """Return whether tuning results are only reused."""
    return bool(options.get("work_dir")) and options.get("scheduler") is None


def _without_trials(value: Lookup) -> str:
    """Return why an option of the search has no effect, "" if it has."""
    if value("scheduler") != "meta_schedule":
        return "it is read only under scheduler='meta_schedule'"
    return "" if value("trials") else "trials=0 measures nothing"


def _of_cuda(value: Lookup) -> Sequence[tuple[Need, ...]]:
    """Return what a target of kind cuda needs."""
    target = value("target")
    kind = target.get("kind") if isinstance(target, Mapping) else target
    return [ON_CUDA] if kind == "cuda" else []


ON_CUDA: tuple[Need, ...] = ("gpu", CUDA)
XGBOOST = Requirement(
    lambda here: all(package in here.packages for package in ("xgboost", "psutil")),
    "xgboost and psutil are not both importable",
    "pip install xgboost psutil, or take cost_model='random'",
)
RULES: tuple[Rule, ...] = (
    Rule("target", either=_of_cuda),
    Rule("cuda_graph", needs=ON_CUDA),
    Rule("cost_model", unless=_without_trials, either=lambda v: [(XGBOOST,)] if v("cost_model") == "xgb" else []),
    *(Rule(x, unless=_without_trials) for x in ("strategy", "seed", "max_trials_per_task", "num_trials_per_iter")),
    Rule("work_dir", unless=lambda value: "dlight's rules measure nothing" if value("scheduler") == "dlight" else ""),
    Rule("opt_level", unless=lambda value: "ignored by Relax"),
)
