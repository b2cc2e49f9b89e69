"""MetaSchedule's search, in this process, and its results, which later processes reuse.

The best schedule of each kernel is a file below `work_dir` and the target's name, written whole after each batch of
measurements: so processes may share a `work_dir`, and a killed one leaves what it measured.
"""

import inspect
import json
import logging
import sys
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import torch
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.database import MemoryDatabase, TuningRecord, Workload
from tvm.s_tir.meta_schedule.runner import local_runner
from tvm.target import Target

from backend_kwargs.backends.tvm.settings import TUNING, TVMOptions
from backend_kwargs.backends.tvm.target import exact_math
from backend_kwargs.errors import BackendKwargsError, error_text, warn_once
from backend_kwargs.files import write_whole
from backend_kwargs.keys import digest
from backend_kwargs.options.option import Options
from backend_kwargs.progress import progress
from backend_kwargs.torch_internals.replacing import replaced

FAR, REPEATS, SHORTEST_RUN_MS = 2, 10, 2  # a schedule that takes FAR times the fastest runs once
# With TVM's own 512 candidates and four generations, preparing a batch takes longer than measuring it.
STRATEGIES: Mapping[str, Options] = {
    "evolutionary": {"population_size": 128, "init_min_unmeasured": 32, "genetic_num_iters": 2}
}
WORTH_TUNING = 0.05  # of the slowest function's time
QUIET = logging.getLogger(__name__)

Ours = Callable[[tirx.PrimFunc], Schedule]
T = TypeVar("T")


def tuned(mod: tvm.IRModule, settings: TVMOptions, target: Target, ours: Ours) -> tuple[tvm.IRModule, int]:
    """Return the module with the best known schedule for each function, and the number of schedules measured now.

    Where a function is tuned, `ours` is measured too, so a short search never makes it slower.
    """
    results = Results(_directory(settings, target))
    nothing_known = not settings.trials and not results.trials
    if nothing_known and settings.work_dir and any(Path(settings.work_dir).rglob("*.json")):
        why = f"{settings.work_dir!r} has no results of a search for this target, and nothing is tuned"
        warn_once(f"TVM option 'work_dir': {why}; also write {TUNING}, once.")
    measured = _search(mod, settings, target, results, ours) if settings.trials else 0
    with results.database:
        return tvm.relax.transform.MetaScheduleApplyDatabase()(mod), measured


# ---- known results


def _directory(settings: TVMOptions, target: Target) -> Path | None:
    """Return the folder of a target's results: TVM would use results for any target, by the function alone."""
    if not settings.work_dir:
        return None
    described = {name: value for name, value in target.export().items() if name != "host"}
    key = digest(described, 12, sort_keys=True)
    return Path(settings.work_dir) / f"{target.kind.name}-{key}"


@derived_object
class Results(ms.measure_callback.PyMeasureCallback):  # type: ignore[misc] # TVM is not typed
    """The best known schedules, and each kernel's number of trials in searches that ended, 0 if none did."""

    def __init__(self, directory: Path | None) -> None:
        super().__init__()
        self.directory, self.database, self.trials = directory, MemoryDatabase(), dict[int, int]()
        for file in directory.glob("*.json") if directory else ():
            stat = file.stat()
            if found := _read(file, (stat.st_mtime_ns, stat.st_size)):
                record, trials = found
                self.add(record.workload.mod, record.trace, record.run_secs, record.target, record.args_info)
                self.trials[tvm_ffi.structural_hash(record.workload.mod)] = trials

    def add(self, mod: tvm.IRModule, trace: object, seconds: Sequence[float], target: Target, args: object) -> None:
        """Add a schedule of a kernel, with its seconds."""
        workload = self.database.commit_workload(mod)
        self.database.commit_tuning_record(TuningRecord(trace, workload, seconds, target, args))

    def apply(self, scheduler: ms.TaskScheduler, task: int, *_: object) -> None:
        """Write what is known of a kernel, as MetaSchedule asks after each batch."""
        self.write(scheduler.tasks_[task].ctx.mod)

    def write(self, mod: tvm.IRModule, trials: int = 0) -> None:
        """Write a kernel's best schedule and the number of `trials` after which its search ended."""
        kernel = tvm_ffi.structural_hash(mod)
        self.trials[kernel] = max(trials, self.trials.get(kernel, 0))
        best = self.database.get_top_k(self.database.commit_workload(mod), 1)
        if not (best and self.directory):
            return
        content = json.dumps([best[0].workload.as_json(), best[0].as_json(), self.trials[kernel]])
        try:
            write_whole(self.directory / f"{kernel % 2**64:016x}.json", content)
        except BackendKwargsError as error:
            warn_once(f"TVM's results serve this process only: {error}")
            self.directory = None


@lru_cache(maxsize=4096)
def _read(file: Path, stamp: object) -> tuple[TuningRecord, int] | None:
    """Return the record in a file and its number of trials, None if it is broken or of another TVM.

    `stamp` is the file's time and size: each part of each graph asks for it, and TVM takes 2 ms to read a schedule.
    """
    try:
        workload, record, trials = json.loads(file.read_text())
        return TuningRecord.from_json(record, Workload.from_json(workload)), int(trials)
    except Exception:  # noqa: BLE001 - whatever TVM raises
        return None


# ---- the search


def _search(mod: tvm.IRModule, settings: TVMOptions, target: Target, results: Results, ours: Ours) -> int:
    """Search for schedules of those functions that are not searched yet; return the number of measurements."""
    tasks = [task for task in ms.relax_integration.extract_tasks(mod, target) if _is_searched(task)]
    share = _share(settings, tasks)
    tasks = [task for task in tasks if results.trials.get(tvm_ffi.structural_hash(task.dispatched[0]), 0) < share]
    if not tasks:
        return 0
    if results.directory:
        results.directory.mkdir(parents=True, exist_ok=True)
    trials = min(settings.trials, share * len(tasks))
    with progress("tuning", f"{trials} trials") as tell:
        _import_tensor_intrinsics()
        builder = InProcessBuilder()
        runner = InProcessRunner(builder.kept, lambda at: tell(f"trial {at} of {trials}", at / trials))
        measured = [_measure_ours(task, ours, builder, runner, results) for task in tasks]
        completed = _tune(_slow(tasks, measured), settings, builder, runner, results)
    for task in tasks:
        results.write(task.dispatched[0], share if completed else 0)
    return runner.measured


def _share(settings: TVMOptions, tasks: Sequence[ms.ExtractedTask]) -> int:
    """Return the most trials for one function."""
    return int(settings.max_trials_per_task or -(-settings.trials // max(len(tasks), 1)))


def _is_searched(task: ms.ExtractedTask) -> bool:
    """Return whether a search can gain: without sums a function is memory-bound, and ours is as good as any.

    A function of symbolic sizes cannot be measured.
    """
    sch = Schedule(task.dispatched[0])
    blocks = [sch.get(block) for block in sch.get_child_blocks(sch.get_sblock("root"))]
    sizes = [size for block in blocks for region in (*block.reads, *block.writes) for size in region.source.shape]
    return all(isinstance(size, tirx.IntImm) for size in sizes) and any(block.init is not None for block in blocks)


def _slow(tasks: Sequence[ms.ExtractedTask], seconds: Sequence[float | None]) -> list[ms.ExtractedTask]:
    """Return the functions whose time with our own schedule matters, or is unknown."""
    spent = [None if each is None else task.weight * each for task, each in zip(tasks, seconds, strict=True)]
    least = WORTH_TUNING * max((each for each in spent if each is not None), default=0)
    return [task for task, each in zip(tasks, spent, strict=True) if each is None or each >= least]


def _tune(
    tasks: list[ms.ExtractedTask], settings: TVMOptions, builder: "InProcessBuilder", runner: "InProcessRunner",
    results: Results,
) -> bool:  # fmt: skip
    """Search, and return whether the search was completed: TVM fails at some functions, after some measurements."""
    share = _share(settings, tasks)
    states = ms.utils.fork_seed(settings.seed, n=len(tasks))
    contexts = [
        ms.TuneContext(
            mod=task.dispatched[0],
            target=task.target,
            space_generator=_space(task.target),
            search_strategy=ms.SearchStrategy.create(settings.strategy, **STRATEGIES.get(settings.strategy, {})),
            task_name=task.task_name,
            rand_state=state,
            num_threads=torch.get_num_threads(),
            logger=QUIET,
        ).clone()
        for task, state in zip(tasks, states, strict=True)
    ]
    try:
        ms.tune_tasks(
            tasks=contexts,
            task_weights=[task.weight for task in tasks],
            work_dir="",
            max_trials_global=settings.trials,
            max_trials_per_task=share,
            num_trials_per_iter=min(settings.num_trials_per_iter, share),
            builder=builder,
            runner=runner,
            database=results.database,
            cost_model=settings.cost_model,
            measure_callbacks=[ms.measure_callback.AddToDatabase(), ms.measure_callback.UpdateCostModel(), results],
        )
    except Exception as error:  # noqa: BLE001 - TVM may raise any exception
        warn_once(f"TVM's search failed, and what it had measured is used: {error_text(error)}.")
        return False
    return True


def _space(target: Target) -> ms.SpaceGenerator:
    """Return the space of schedules in which a target's functions are searched."""
    kind = "cuda" if target.kind.name == "cuda" else "llvm"
    rules = ms.ScheduleRule.create(kind)
    if kind == "llvm":
        # TVM's own unrolling by 512 takes seconds to build. -1: no parallel loops, since TVM would use threads although
        # torch is limited to one.
        jobs = 16 if int(target.attrs.get("num-cores", 1)) > 1 else -1
        shorter = ms.schedule_rule.ParallelizeVectorizeUnroll(jobs, 64, [0, 16, 64], True)
        rules = [shorter if isinstance(r, ms.schedule_rule.ParallelizeVectorizeUnroll) else r for r in rules]
    return ms.space_generator.PostOrderApply(
        sch_rules=rules, postprocs=ms.Postproc.create(kind), mutator_probs=ms.Mutator.create(kind)
    )


def _measure_ours(
    task: ms.ExtractedTask, ours: Ours, builder: "InProcessBuilder", runner: "InProcessRunner", results: Results
) -> float | None:
    """Record our own schedule, and return its seconds, None if it does not apply."""
    mod = task.dispatched[0]
    try:
        sch = ours(mod["main"])
    except Exception:  # noqa: BLE001 - a rule that does not apply has nothing to measure
        return None
    (built,) = builder.build([ms.builder.BuilderInput(sch.mod, task.target)])
    args = ms.arg_info.ArgInfo.from_prim_func(mod["main"])
    if built.artifact_path is None:
        return None
    (future,) = runner.run([ms.runner.RunnerInput(built.artifact_path, task.target.kind.name, args)])
    if not (seconds := future.result().run_secs):
        return None
    results.add(mod, sch.trace, seconds, task.target, args)
    return float(seconds[0])


# ---- building and measuring in this process: TVM's workers exceed their own timeout importing tensor intrinsics


@derived_object
class InProcessBuilder(ms.builder.PyBuilder):  # type: ignore[misc] # TVM is not typed
    """Builds candidates in this process and keeps them by name until they are run."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, tvm.runtime.Executable] = {}

    def build(self, build_inputs: list[ms.builder.BuilderInput]) -> list[ms.builder.BuilderResult]:
        """Return the name of each, or the reason why it could not be built."""
        return [ms.builder.BuilderResult(*_or_reason(partial(self.built, each))) for each in build_inputs]

    def built(self, each: ms.builder.BuilderInput) -> str:
        """Build one candidate, and return its name."""
        mod = tvm.s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(each.mod)
        name = uuid.uuid4().hex
        with exact_math(each.target):
            self.kept[name] = tvm.compile(mod, target=each.target)
        return name


@derived_object
class InProcessRunner(ms.runner.PyRunner):  # type: ignore[misc] # TVM is not typed
    """Times candidates in this process."""

    def __init__(self, built: dict[str, tvm.runtime.Executable], told: Callable[[int], None]) -> None:
        super().__init__()
        self.built, self.told, self.measured = built, told, 0
        self.fastest: dict[str, float] = {}

    def run(self, runner_inputs: list[ms.runner.RunnerInput]) -> list[local_runner.LocalRunnerFuture]:
        """Return the seconds of each, or the reason why it could not run."""
        return [local_runner.LocalRunnerFuture(*_or_reason(partial(self.seconds, each))) for each in runner_inputs]

    def seconds(self, each: ms.runner.RunnerInput) -> list[float]:
        """Return the shortest time of several runs, since other work on the machine only adds to it.

        A schedule far from the fastest runs only once: most are, some by a factor of a hundred.
        """
        self.measured += 1
        self.told(self.measured)
        built = self.built.pop(str(each.artifact_path))
        device = tvm.device("cpu" if each.device_type == "llvm" else str(each.device_type), 0)
        function, infos = str(each.args_info), [info.as_json() for info in each.args_info]
        (args,) = local_runner.default_alloc_argument(device, infos, 1)
        once = float(built.mod.time_evaluator("main", device, number=1, repeat=1)(*args).min)
        if once > FAR * self.fastest.get(function, once):
            return [once]
        timer = built.mod.time_evaluator("main", device, number=1, repeat=REPEATS, min_repeat_ms=SHORTEST_RUN_MS)
        fastest = float(timer(*args).min)
        self.fastest[function] = min(fastest, self.fastest.get(function, fastest))
        return [fastest]


def _or_reason(attempt: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return a result and None, or None and why there is none: the search proposes what fails, and learns from it."""
    try:
        return attempt(), None
    except Exception as error:  # noqa: BLE001 - whatever TVM raises
        return None, str(error)


# ---- workarounds


def _import_tensor_intrinsics() -> None:
    """Import TVM's tensor intrinsics in seconds instead of half a minute."""
    # They are Python that TVM parses at import, each function with inspect.stack(), which looks up the source of every
    # frame on the stack: half a minute. The parser needs only the frames.
    with replaced(inspect, "stack", _frames):
        import tvm.s_tir.tensor_intrin  # noqa: F401 - imported for what it registers


def _frames(context: int = 1) -> list[inspect.FrameInfo]:
    """Return the stack as `inspect.stack` does, without sources."""
    walk = traceback.walk_stack(sys._getframe(1))
    return [
        inspect.FrameInfo(frame, frame.f_code.co_filename, line, frame.f_code.co_name, None, None)
        for frame, line in walk
    ]
