"""One run of the suite: its cases, shard and deadline; each group of cells is on disk before the next starts."""

import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from backend_kwargs.errors import BackendKwargsError, warn_once
from backend_kwargs.harness.trial import UnavailableError
from backend_kwargs.keys import digest
from benchmarks.execution import process, records, roofline, worker
from benchmarks.execution.ceilings import Ceilings
from benchmarks.execution.process import Outcome
from benchmarks.execution.records import Cell, Compile
from benchmarks.execution.worker import Clock, Compiled, Job
from benchmarks.workloads import peers
from benchmarks.workloads.case import Case, Mode, Work
from benchmarks.workloads.peers import MODELS, Peer

Suite = Literal["smoke", "dev", "start", "full", "models"]
Say = Callable[[str, float], None]
ROUNDS = {"smoke": 5, "dev": 30, "start": 30, "full": 30, MODELS: 30}
CEILING_ROUNDS = {"smoke": 3}
HEADLINE_COMPILES = 3
PAIRS = 5  # first calls of a stored decision and of its winner alone, in turn
SHARED = "all"  # the folder for compiled code of groups that share one cache
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. None means that the case, the suite or the device decides.

    `compiles` is how often each peer is compiled and timed: 3 times for a headline. Each compile has its own process,
    `jobs` at a time for peers that time nothing meanwhile, `tuners` for those that time kernels, then autos one by one;
    the peers of `ahead` groups compile before the first of these groups is timed. With `fewer_compiles`, modes that
    tune the same kernels tune them once, and nothing compiles a second time to learn what that takes with stored code:
    those compile times are not reported. `beside` compiles only in the timing process; with `one_cache` all share one
    cache, so that compile times are not reported. `shard` is (i, n), from 1; `also` are files whose groups count as
    done. `step_s` limits one peer's compile, or the timing of a group; `budget_s` the run.
    """

    cases: tuple[Case, ...]
    out: Path
    device: str = "cpu"
    suite: Suite = "full"
    globs: tuple[str, ...] = ("*",)
    modes: tuple[Mode, ...] = ()
    dtype: torch.dtype | None = None
    scale: str | None = None
    l2: Literal["cold", "warm"] = "cold"
    clocks: tuple[Clock, ...] = ("events", "wall")
    rounds: int | None = None
    compiles: int | None = None
    beside: bool | None = None
    jobs: int = 1
    tuners: int = 1
    ahead: int = 1
    fewer_compiles: bool = False
    budget_s: float = float("inf")
    step_s: float = 300.0
    shard: tuple[int, int] = (1, 1)
    resume: bool = False
    also: tuple[Path, ...] = ()
    ceilings: bool = True
    extra: tuple[Peer, ...] = ()
    one_cache: bool = False

    def __post_init__(self) -> None:
        if self.one_cache and self.beside is False:
            raise BackendKwargsError("--one-cache excludes --apart: a fresh compile finds nothing of its peers'.")
        if self.one_cache and (self.compiles or 1) > 1:
            raise BackendKwargsError(
                f"--one-cache excludes --compiles {self.compiles}: what is compiled once is there for all."
            )
        if self.clocks == ("events",) and self.device == "cpu":
            raise BackendKwargsError("--timer events requires a GPU: on a CPU the wall's clock is the only one.")
        if (self.fewer_compiles or max(self.jobs, self.tuners, self.ahead) > 1) and not self.apart:
            raise BackendKwargsError(
                "--jobs, --tuners, --ahead and --fewer-compiles need --apart: with --beside, peers compile in turn."
            )

    @property
    def where(self) -> Path:
        """Return the folder of compiled code and of the processes' output."""
        return self.out.with_suffix(".cache")

    def compiles_of(self, case: Case) -> int:
        """Return the number of fresh compiles for a case."""
        if self.one_cache:
            return 1
        if self.compiles is not None:
            return self.compiles
        return HEADLINE_COMPILES if self.suite == "full" and case.headline else 1

    @property
    def apart(self) -> bool:
        """Return whether each compile has its own process."""
        beside = self.suite not in ("full", MODELS) if self.beside is None else self.beside
        return not (beside or self.one_cache)


@dataclass(slots=True)
class Progress:
    """The state of a run: groups done before and now, those left, and whether it ended for lack of time."""

    done: int = 0
    total: int = 0
    cells: list[Cell] = field(default_factory=list)
    out_of_time: bool = False


class OutOfTimeError(Exception):
    """The run's budget is spent."""


# ---- what to run


def select(cases: Mapping[str, Case], suite: str, globs: Sequence[str], device: str) -> tuple[Case, ...]:
    """Return the cases of a suite that match globs and that the device can run; raise if a glob matches none at all.

    The suite "full" has all cases except the real models, which have their own suite.
    """
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in cases):
            raise BackendKwargsError(f"No case is called {glob!r}: `python -m benchmarks list` shows all.")
    named = [case for name, case in cases.items() if not globs or any(fnmatchcase(name, glob) for glob in globs)]
    fitting = [case for case in named if device != "cpu" or not case.gpus_only]
    return tuple(case for case in fitting if suite in case.suites or (suite == "full" and MODELS not in case.suites))


def groups(plan: Plan) -> list[Job]:
    """Return the groups of this shard, each timed together, in the order of the table."""
    at, of = plan.shard
    # Every case once, and the START cases first, in case the budget ends early.
    return sorted(_groups(plan), key=lambda job: (job.run, _rank(job.case)))[at - 1 :: of]


def _rank(case: Case) -> int:
    return 0 if "start" in case.suites else 1 if case.group == "model" else 2


def _groups(plan: Plan) -> Iterator[Job]:
    scale = plan.scale or ("full" if plan.device != "cpu" and plan.suite != "smoke" else "smoke")
    for case in plan.cases:
        for mode in (mode for mode in case.modes if not plan.modes or mode in plan.modes):
            for run in range(plan.compiles_of(case)):
                yield Job(
                    case=case,
                    mode=mode,
                    dtype=plan.dtype or case.dtype,
                    device=plan.device,
                    scale=scale,
                    cache=plan.where.absolute(),
                    globs=plan.globs,
                    rounds=plan.rounds or ROUNDS[plan.suite],
                    l2=plan.l2,
                    clocks=plan.clocks,
                    run=run,
                    extra=plan.extra,
                    one_cache=plan.one_cache,
                    apart=plan.apart,
                )


def key_of(job: Job) -> str:
    """Return the key that identifies a group in a later run."""
    asked = (f"{job.case.name}@{job.case.version}", job.mode, str(job.dtype), job.scale, job.l2, f"run{job.run}")
    asked += (*(["one-cache"] if job.one_cache else []), *(["apart"] if job.apart else []))
    return " ".join((*asked, *job.clocks, str(job.rounds), ",".join((*job.globs, *(p.name for p in job.extra)))))


# ---- running it


def run(plan: Plan, say: Say = lambda doing, fraction: None) -> Progress:
    """Run what the file lacks; every finished group is in the file, whatever happens next.

    Raises BackendKwargsError if the file exists and `resume` is not set.
    """
    return _Run(plan, say, time.monotonic() + plan.budget_s).go()


@dataclass
class _Run:
    plan: Plan
    say: Say
    deadline: float
    method: str = process.METHODS[0]
    known: Ceilings | None = None
    progress: Progress = field(default_factory=Progress)
    lock: threading.Lock = field(default_factory=threading.Lock)
    compiling: int = 0

    def go(self) -> Progress:
        held = self._held()
        jobs = groups(self.plan)
        left = [job for job in jobs if key_of(job) not in held.groups]
        self.progress.total, self.progress.done = len(jobs), len(jobs) - len(left)
        shared = self.plan.where / SHARED
        if not self.plan.out.exists():  # otherwise its content was compiled by the interrupted run
            shutil.rmtree(shared, ignore_errors=True)  # of another run, with old decisions
        self.plan.where.mkdir(parents=True, exist_ok=True)
        try:
            if left:
                self._describe(held)
            for at in range(0, len(left), self.plan.ahead):
                self._groups(left[at : at + self.plan.ahead], held)
            shutil.rmtree(shared, ignore_errors=True)
        except OutOfTimeError:
            self.progress.out_of_time = True
        return self.progress

    def _held(self) -> records.Results:
        if not self.plan.out.exists():
            return records.read(*self.plan.also)
        if not self.plan.resume:
            raise BackendKwargsError(f"{str(self.plan.out)!r} is there already: give --resume, or another --out.")
        return records.read(self.plan.out, *self.plan.also)

    def _process(self, target: Callable[..., Any], *args: Any, doing: str) -> Outcome:
        outcome = process.run(
            target,
            *args,
            step_s=self.plan.step_s,
            deadline=self.deadline,
            log=self.plan.where / "log.txt",
            heard=lambda step: self._say(f"{doing} {step}"),
            method=self.method,
            preload="benchmarks.execution.preload_models" if self.plan.suite == MODELS else process.PRELOAD,
        )
        if outcome.out_of_time:
            raise OutOfTimeError
        return outcome

    def _say(self, doing: str) -> None:
        self.say(doing, self.progress.done / max(self.progress.total, 1))

    def _describe(self, held: records.Results) -> None:
        """Write the environment and the ceilings of this process: the first two lines of a run."""
        self._say("environment")
        found = self._process(worker.environment, self.plan.device, doing="environment")
        if not found.passed:
            # In a child process: a server that has initialized CUDA cannot fork a process that uses it.
            self.method = process.METHODS[1]
            found = self._process(worker.environment, self.plan.device, doing="environment")
        if not found.passed:
            raise BackendKwargsError(f"Cannot run on {self.plan.device!r}: {found.reason}")
        here = {**found.value, **about()}
        _check_continues(here, held.environments)
        lines = [{"record": "environment", "version": records.VERSION, **here}]
        if self.plan.ceilings:
            self._say("ceilings")
            rounds = CEILING_ROUNDS.get(self.plan.suite, 30)
            measured = self._process(worker.ceilings, self.plan.device, rounds, doing="ceilings")
            if measured.passed:
                self.known = Ceilings.from_json(measured.value)
            values = measured.value or {"status": measured.status, "reason": measured.reason}
            lines.append({"record": "ceilings", **values})
        records.append(self.plan.out, lines)

    def _groups(self, jobs: Sequence[Job], held: records.Results) -> None:
        """Compile the peers of several groups, then time the groups, each alone on its device."""
        placed = [self._placed(job) for job in jobs]
        placed = self._compiled(placed, held) if self.plan.apart else placed
        with ThreadPoolExecutor(len(placed)) as pool:
            list(pool.map(self._group, placed))

    def _placed(self, job: Job) -> Job:
        # Named after the group, so that a resumed run finds the code of an interrupted one.
        folder = SHARED if job.one_cache else digest(key_of(job).encode(), 16)
        lock = self.plan.where.absolute() / "timing.lock" if self.plan.ahead > 1 else None
        return replace(job, cache=job.cache / folder, lock=lock)

    def _group(self, job: Job) -> None:
        doing = f"{job.case.name} {job.mode}"
        self._say(doing)
        cells = self._timed(job, doing)
        # A peer that ran out of memory next to the others gets a second try with only the baselines.
        crowded = [c.peer for c in cells if c.status == "oom" and job.compiled.get(c.peer, Compiled()).status == "pass"]
        if crowded and any(cell.passed and cell.peer not in peers.BASELINES for cell in cells):
            cells = [cell for cell in cells if cell.peer not in crowded]
            beside = [name for name in peers.BASELINES if peers.wanted(name, job.globs)]
            cells += self._timed(replace(job, globs=(*beside, *crowded)), doing)
        cells = [self._limited(cell) for cell in cells]
        ids = sorted({cell.group_id for cell in cells})
        with self.lock:
            records.append(self.plan.out, [*map(records.line_of, cells), records.group_line(key_of(job), ids)])
            self.progress.cells += cells
            self.progress.done += 1
        if not job.one_cache:
            shutil.rmtree(job.cache, ignore_errors=True)

    def _compiled(self, jobs: Sequence[Job], held: records.Results) -> list[Job]:
        """Compile each peer in its own processes, peers with equal options once; each result is on disk at once.

        Eager's memory is measured in the same way; it is unknown if that fails.
        """
        wanted = [one for job in jobs for one in _compiles(job)]
        # Compiles by another machine are reported, but cannot be reused here.
        there = [one for one in wanted if not one.peer.compiles or one.job.folder(one.peer.name).is_dir()]
        made = {one.key: _read_compiled(held.compiles[one.key]) for one in there if one.key in held.compiles}

        def note(one: _Compile, found: Compiled, **seconds: Any) -> None:
            made[one.key] = replace(found, compile=replace(found.compile, **seconds))
            with self.lock:
                records.append(self.plan.out, [{"record": "compile", "key": one.key, **asdict(made[one.key])}])

        def cold(one: _Compile) -> None:
            note(one, self._compile_once(one.job, one.peer.name, cold=True))

        def tuned(one: _Compile) -> None:
            first = peers.TUNED_AS[one.peer.name]
            after = first if one.job.folder(first).is_dir() else ""
            note(one, self._compile_once(one.job, one.peer.name, cold=True, after=after))

        def warm(one: _Compile) -> None:
            found = made[one.key]
            if self.plan.suite == MODELS and found.decided:
                alone = replace(one.job, extra=(*one.job.extra, peers.winner(found.decided, one.peer)))
                # Cold compiles first: they must not find graphs that a race has compiled.
                both = [(self._warm_s(one.job, one.peer.name), self._warm_s(alone, peers.WINNER)) for _ in range(PAIRS)]
                seconds = {
                    "warm_s": records.middle(warm for warm, _ in both),
                    "alone_s": records.middle(its for _, its in both),
                }
            else:
                seconds = {"warm_s": self._warm_s(one.job, one.peer.name)}
            note(one, found, **seconds)

        left = [one for one in wanted if one.key not in made]
        tuners = [one for one in left if peers.tunes(one.peer)]
        autos = [one for one in tuners if one.peer.kind == "auto"]
        again = [one for one in tuners if self.plan.fewer_compiles and one.peer.name in peers.TUNED_AS]
        modes = [one for one in tuners if one not in autos and one not in again]
        self._stage((cold, [one for one in left if one not in tuners], self.plan.jobs), (cold, modes, self.plan.tuners))
        self._stage((tuned, again, self.plan.tuners))
        # An auto decides by its timing, so nothing else of this shard runs meanwhile, except for the start of the next.
        self._stage((cold, autos, min(self.plan.ahead, 2)))
        warm_left = [one for one in wanted if one.key in made and self._wants_warm(one, made[one.key])]
        self._stage((warm, warm_left, self.plan.jobs))
        kept = [one for one in wanted if one.peer.compiles or made[one.key].status == "pass"]
        return [replace(job, compiled={one.peer.name: made[one.key] for one in kept if one.job is job}) for job in jobs]

    def _wants_warm(self, one: "_Compile", made: Compiled) -> bool:
        there = made.status == "pass" and made.compile.warm_s is None and one.job.folder(one.peer.name).is_dir()
        # For real models the modes' warm compiles would take minutes, and no goal uses them.
        there = there and not self.plan.fewer_compiles and not one.job.run
        return there and (self.plan.suite != MODELS or one.peer.kind == "auto")

    def _stage(self, *parts: tuple[Callable[["_Compile"], None], list["_Compile"], int]) -> None:
        """Call a function on each of a list, so many at a time; several lists in parallel if groups compile ahead."""

        def do(part: tuple[Callable[[_Compile], None], list[_Compile], int]) -> None:
            what, them, count = part
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(what, them))

        with ThreadPoolExecutor(len(parts) if self.plan.ahead > 1 else 1) as stages:
            list(stages.map(do, parts))

    def _warm_s(self, job: Job, name: str) -> float | None:
        return self._compile_once(job, name, cold=False).compile.warm_s

    def _compile_once(self, job: Job, name: str, *, cold: bool, after: str = "") -> Compiled:
        doing = f"{job.case.name} {job.mode}, compile {'cold' if cold else 'warm'}"
        with self.lock:
            beside, self.compiling = self.compiling, self.compiling + 1
        try:
            outcome = self._process(worker.compile_peer, job, name, cold, after, doing=doing)
        finally:
            with self.lock:
                self.compiling -= 1
        made = outcome.value if outcome.passed else Compiled(Compile(fresh=True), outcome.status, outcome.reason)
        return replace(made, compile=replace(made.compile, beside=beside))

    def _timed(self, job: Job, doing: str) -> list[Cell]:
        """Time a group; a peer that hangs or crashes the process is left out, and the others run again."""
        job = replace(job, compiled=dict(job.compiled), group_id=f"{job.case.name}/{job.mode}/{uuid.uuid4().hex[:12]}")
        while True:
            if not job.apart and not job.one_cache:  # compile times are reported, so they start without a cache
                shutil.rmtree(job.cache, ignore_errors=True)
            outcome = self._process(worker.time_group, job, doing=f"{doing},")
            if outcome.passed:
                return list(outcome.value)
            failed = Compiled(status=outcome.status, reason=outcome.reason)
            if outcome.at in ("", worker.TIMING) or job.compiled.get(outcome.at) == failed:
                return [_lost(job, peer, outcome) for peer in job.peers()]
            job = replace(job, compiled={**job.compiled, outcome.at: failed})

    def _limited(self, cell: Cell) -> Cell:
        if cell.work and self.known:
            found = roofline.limit(Work(**cell.work), self.known)
            cell.limit_s, cell.bound = (found.seconds, found.bound) if found else (None, "")
        return cell


def _check_continues(here: Mapping[str, Any], held: Sequence[Mapping[str, Any]]) -> None:
    """Raise if results of another torch or device are in the file; warn if the code had another revision."""
    for name in ("torch", "device_name"):
        if others := sorted({str(each[name]) for each in held if each.get(name)} - {str(here[name])}):
            raise BackendKwargsError(
                f"Cannot go on with results of {name} {', '.join(map(repr, others))}: here it is {here[name]!r}; "
                "give another --out."
            )
    if others := sorted({str(each["revision"]) for each in held if each.get("revision")} - {str(here["revision"])}):
        warn_once(f"Goes on with results of revision {', '.join(others)}: here it is {here['revision']}.")


@dataclass(frozen=True, slots=True)
class _Compile:
    """One peer of one group, to compile in its own processes."""

    job: Job
    peer: Peer
    key: str


def _compiles(job: Job) -> list[_Compile]:
    chosen = [peer for peer in job.peers() if _can_be_had(peer, job)]
    first = peers.sharing(chosen)
    return [_Compile(job, peer, f"{key_of(job)} {peer.name}") for peer in chosen if first[peer.name] == peer.name]


def _can_be_had(peer: Peer, job: Job) -> bool:
    if peers.why_not(peer, job.case, job.mode, job.device):
        return False
    try:
        peers.resolved(peer)
    except UnavailableError:
        return False
    return True


def _read_compiled(line: Mapping[str, Any]) -> Compiled:
    return Compiled(Compile(**line["compile"]), line["status"], line["reason"], line.get("decided"))


def _lost(job: Job, peer: Peer, outcome: Outcome) -> Cell:
    """Return the cell of a peer whose whole group failed."""
    reason = f"at {outcome.at or 'its start'} the group's process ended: {outcome.reason}"
    return worker.cell_of(job, peer, numerics="", status=outcome.status, reason=reason)


# ---- the environment


def about() -> dict[str, Any]:
    """Return the conditions besides torch's environment: revision, package, driver and clocks, command, time."""
    return {
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": _said("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"),
        "backend_kwargs": version("backend-kwargs"),
        "driver": smi("driver_version"),
        "clocks": smi("clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,persistence_mode"),
    }


def smi(fields: str) -> str | None:
    """Return what nvidia-smi says of the first GPU, None if there is none."""
    return _said("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def _said(*command: str) -> str | None:
    """Return the first line that a command prints, None if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
