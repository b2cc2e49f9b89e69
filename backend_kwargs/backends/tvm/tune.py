"""MetaSchedule's search, in this process, and its records, which later processes reuse.

Each search writes its own directory below `work_dir` and the target's name, in TVM's format, and those of the target
are all read, line by line: so processes may share a `work_dir`, and a killed one leaves at most one incomplete last
line, which is skipped.
"""

import inspect
import json
import logging
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord, Workload
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

WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"
FINISHED = "finished"  # a file with each function's number of trials, written when a search has ended
FAILED_S = 1e9  # a time of MetaSchedule's above this means a failed run
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
    known = Known.read(_directory(settings, target))
    nothing_known = not settings.trials and not known.trials
    if nothing_known and settings.work_dir and any(Path(settings.work_dir).rglob(WORKLOADS)):
        why = f"{settings.work_dir!r} has no results of a search for this target, and nothing is tuned"
        warn_once(f"TVM option 'work_dir': {why}; also write {TUNING}, once.")
    measured = _search(mod, settings, target, known, ours) if settings.trials else 0
    with known.database:
        return tvm.relax.transform.MetaScheduleApplyDatabase()(mod), measured


# ---- known results


def _directory(settings: TVMOptions, target: Target) -> Path | None:
    """Return the folder of a target's results: TVM would use results for any target, by the function alone."""
    if not settings.work_dir:
        return None
    described = {name: value for name, value in target.export().items() if name != "host"}
    key = digest(described, 12, sort_keys=True)
    return Path(settings.work_dir) / f"{target.kind.name}-{key}"


@dataclass
class Known:
    """The best schedules of all searches, and each function's number of trials in searches that ended."""

    database: ms.database.MemoryDatabase = field(default_factory=ms.database.MemoryDatabase)
    trials: dict[int, int] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path | None) -> "Known":
        """Read every search below `directory`; broken records are skipped."""
        known = cls()
        if directory and directory.is_dir():
            for search in sorted(path.parent for path in directory.rglob(WORKLOADS)):
                text = "".join(_lines(search / FINISHED))
                stats = [file.stat() for file in (search / WORKLOADS, search / RECORDS) if file.is_file()]
                stamp = tuple((each.st_size, each.st_mtime_ns) for each in stats)
                known.add(*_records(search, stamp), int(text) if text.isdigit() else 0)
        return known

    def add(self, workloads: Iterable[Workload], records: Iterable[TuningRecord], trials: int) -> None:
        """Add the best records; `trials` is each workload's number of trials, 0 if the search was interrupted."""
        for workload in workloads:
            key = tvm_ffi.structural_hash(workload.mod)
            self.trials[key] = max(trials, self.trials.get(key, 0))
        for each in records:
            workload = self.database.commit_workload(each.workload.mod)
            self.database.commit_tuning_record(
                TuningRecord(each.trace, workload, each.run_secs, each.target, each.args_info)
            )


@lru_cache(maxsize=1024)
def _records(search: Path, stamp: object) -> tuple[list[Workload], list[TuningRecord]]:
    """Return a search's workloads, and the record of the fastest schedule for each.

    `stamp` is the sizes and times of its files: each part of each graph asks for them.
    """
    workloads = [_parsed(line, Workload.from_json) for line in _lines(search / WORKLOADS)]
    records = [_parsed(line, _timed) for line in _lines(search / RECORDS)]
    timed = sorted((each for each in records if each is not None), key=itemgetter(0))
    best: dict[int, TuningRecord] = {}
    for _, at, record in timed:
        # TVM takes 2 ms to read the schedule of a record, so those of slower ones are not read.
        # One that is broken is left out.
        read = partial(TuningRecord.from_json, record, workloads[at])
        if at not in best and (fastest := _or_reason(read)[0]) is not None:
            best[at] = fastest
    return [w for w in workloads if w is not None], list(best.values())


def _timed(parsed: Any) -> tuple[float, int, Any]:
    """Return a record's seconds, the place of its workload, and the record; raise if it did not run."""
    at, record = parsed
    seconds = [float(each) for each in record[1]]
    if max(seconds) >= FAILED_S:
        raise ValueError("a failed run")
    return sum(seconds) / len(seconds), int(at), record


def _lines(file: Path) -> list[str]:
    """Return the lines of a file, none if there is no file."""
    return file.read_text(errors="replace").splitlines() if file.is_file() else []


def _parsed(line: str, read: Callable[[Any], T]) -> T | None:
    """Return what `read` makes of a line of JSON, None if it is incomplete, or of another TVM."""
    return _or_reason(lambda: read(json.loads(line)))[0]


# ---- the search


def _search(mod: tvm.IRModule, settings: TVMOptions, target: Target, known: Known, ours: Ours) -> int:
    """Search for schedules of those functions that are not searched yet; return the number of measurements."""
    tasks = [task for task in ms.relax_integration.extract_tasks(mod, target) if _is_searched(task)]
    share = _share(settings, tasks)
    tasks = [task for task in tasks if known.trials.get(tvm_ffi.structural_hash(task.dispatched[0]), 0) < share]
    if not tasks:
        return 0
    kept = _directory(settings, target)
    with nullcontext(kept) if kept else tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as parent:
        directory = Path(parent) / f"search-{uuid.uuid4().hex[:12]}"
        directory.mkdir(parents=True)
        database, trials = JSONDatabase(work_dir=str(directory)), min(settings.trials, share * len(tasks))
        with progress("tuning", f"{trials} trials") as tell:
            _import_tensor_intrinsics()
            builder = InProcessBuilder()
            runner = InProcessRunner(builder.kept, lambda at: tell(f"trial {at} of {trials}", at / trials))
            measured = [_measure_ours(task, ours, builder, runner, database) for task in tasks]
            completed = _tune(_slow(tasks, measured), settings, builder, runner, database)
        if why := _why_incomplete(directory, database, share if completed else None):
            warn_once(f"TVM's results cannot be stored in {str(directory)!r}: {why}. They serve this process only.")
        records = database.get_all_tuning_records()
        ran = [each for each in records if max(map(float, each.run_secs or [FAILED_S])) < FAILED_S]
        known.add([each.workload for each in records], ran, share if completed else 0)
    return runner.measured


def _why_incomplete(directory: Path, database: JSONDatabase, trials: int | None) -> str:
    """Write that a search of `trials` has ended, and return why its files are incomplete, "" if they are whole.

    TVM's database does not notice a full disk.
    """
    records = [_parsed(line, lambda parsed: isinstance(parsed, list)) for line in _lines(directory / RECORDS)]
    if records.count(True) < len(database):
        return "TVM wrote only a part of them, as on a full disk"
    try:
        if trials is not None:
            write_whole(directory / FINISHED, str(trials))
    except BackendKwargsError as error:
        return str(error).removesuffix(".")
    return ""


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
    database: JSONDatabase,
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
            database=database,
            cost_model=settings.cost_model,
            measure_callbacks=[ms.measure_callback.AddToDatabase(), ms.measure_callback.UpdateCostModel()],
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
    task: ms.ExtractedTask, ours: Ours, builder: "InProcessBuilder", runner: "InProcessRunner", database: JSONDatabase
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
    workload = database.commit_workload(mod)
    database.commit_tuning_record(TuningRecord(sch.trace, workload, seconds, task.target, args))
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
