"""The suite's processes: compile one peer, time all peers of a case together, measure the device."""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch._inductor import config

from backend_kwargs.harness.trial import UnavailableError, learn, start_inductor
from backend_kwargs.trial import Status, interleave, synchronize
from backend_kwargs.trial.memory import environment as environment_of
from benchmarks.execution import controls, device_timer, process
from benchmarks.execution.ceilings import measure_ceilings
from benchmarks.execution.controls import BASELINE, Slowed
from benchmarks.execution.process import Tell, taking_turns
from benchmarks.execution.records import Cell, Compile
from benchmarks.execution.study import CaseStudy
from benchmarks.execution.trial import PeerTrial, cache_at, kernels_per_call, restart_workers
from benchmarks.workloads import peers
from benchmarks.workloads.case import Case, Mode
from benchmarks.workloads.peers import Peer

Clock = Literal["events", "wall", "dropped"]
TIMING = "timing"  # the step of a process in which all peers run


@dataclass
class Timed:
    """Results of one timing: seconds per call and calls per sample, by clock and name; peers with exposed launches.

    "dropped" is wall time with results dropped.
    """

    seconds: dict[Clock, dict[str, list[float]]] = field(default_factory=dict)
    repeats: dict[str, dict[Clock, int]] = field(default_factory=dict)
    exposed: set[str] = field(default_factory=set)
    injected: dict[str, float] = field(default_factory=dict)  # the share of work that a control adds

    def names(self) -> list[str]:
        """Return the names of all that was timed."""
        return list(dict.fromkeys(name for found in self.seconds.values() for name in found))

    def of(self, name: str) -> dict[str, Any]:
        """Return the fields of a cell."""
        fields = {"wall_s": "wall", "dropped_s": "dropped", "device_s": "events"}
        found = {field: self.seconds.get(clock, {}).get(name, []) for field, clock in fields.items()}
        return {**found, "repeats": dict(self.repeats.get(name, {})), "exposed": name in self.exposed}


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a compile in its own process; `decided` is an auto's choice in it."""

    compile: Compile = field(default_factory=Compile)
    status: Status = "pass"
    reason: str = ""
    decided: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One case in one mode with its peers: everything that a process needs.

    `cache` is the folder in which each peer has its own cache, or which all share if `one_cache` is set. `apart`: peers
    compile in their own processes first, with results in `compiled`, by peer; those that failed or hung before are not
    tried again. `extra` are peers besides the table's. While a group with a `lock` file is timed, no other group
    compiles or is timed; while an auto with one races, no other races.
    """

    case: Case
    mode: Mode
    dtype: torch.dtype
    device: str
    scale: str
    cache: Path
    globs: tuple[str, ...]
    group_id: str = ""
    rounds: int = 30
    l2: device_timer.L2 = "cold"
    clocks: tuple[Clock, ...] = ("events", "wall")
    run: int = 0
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    extra: tuple[Peer, ...] = ()
    one_cache: bool = False
    apart: bool = False
    lock: Path | None = None

    def study(self) -> CaseStudy:
        """Build the case."""
        _settle(self)
        return CaseStudy.of(self.case, self.mode, torch.device(self.device), self.dtype, self.scale)

    def peers(self) -> list[Peer]:
        """Return the requested peers of the table."""
        found = [peer for peer in peers.peers().values() if peers.wanted(peer.name, self.globs)]
        # A peer requested by name is run wherever it can be.
        return [
            dataclasses.replace(p, cases=("*",), suite="full") if p.name in self.globs else p for p in found
        ] + list(self.extra)

    def folder(self, peer: str) -> Path:
        """Return the folder of a peer's compiled code."""
        return self.cache if self.one_cache else self.cache / "".join(c if c.isalnum() else "_" for c in peer)


def _settle(job: Job) -> None:
    import torch._dynamo.config

    job.cache.mkdir(parents=True, exist_ok=True)
    # Otherwise traces of a template would be written to the user's folder.
    torch._dynamo.config.debug_dir_root = str(job.cache / "debug")
    torch.set_grad_enabled(job.mode != "fwd")


def compile_peer(tell: Tell, job: Job, name: str, cold: bool, after: str = "") -> Compiled:
    """Compile one peer and return its cost.

    `cold` empties its cache first. `after` is a peer whose cache it starts with instead, so that its seconds are none
    of a cold compile.
    """
    tell(name)
    study = job.study()
    study.prepare()
    peer = next(peer for peer in job.peers() if peer.name == name)
    folder = job.folder(peer.cache or name)
    if cold:
        shutil.rmtree(folder, ignore_errors=True)
    if after:
        shutil.copytree(job.folder(after), folder)
    with config.patch(compile_threads=1):  # its workers start below, with the cache of this compile
        _start_compilers([peer], job)
    if peers.uses_inductor(peer):
        restart_workers(folder)
    trial = PeerTrial(study, peer, folder)
    with process.alone(job.lock, partial(tell, name)) if peer.kind == "auto" else contextlib.nullcontext():
        tell(f"{name}: first call")
        trial.attempt(trial.build)
    if trial.passed:
        tell(f"{name}: kernels")
        with contextlib.suppress(Exception):  # a profiler that cannot start is not the peer's fault
            trial.compiled.kernels = kernels_per_call(trial.step, study.device)
    made = trial.compiled
    measured = {"cold_s": made.cold_s} if cold else {"cold_s": None, "warm_s": made.cold_s}
    seconds: dict[str, Any] = {"cold_s": None} if after else measured
    return Compiled(dataclasses.replace(made, fresh=True, **seconds), trial.status, trial.reason, trial.decided)


def time_group(tell: Tell, job: Job) -> list[Cell]:
    """Compile and check each peer, time all interleaved on both clocks, check again; return their cells."""
    with taking_turns(job.lock, partial(tell, TIMING)) as alone:
        return _time_group(tell, job, alone)


def _time_group(tell: Tell, job: Job, alone: Callable[[], None]) -> list[Cell]:
    trials = _started(tell, job)
    tell(TIMING)
    alone()
    racing = {trial.peer.name: trial for trial in trials if trial.passed}
    timed = _time(job, racing)
    for trial in racing.values():
        if trial.passed:
            trial.attempt(trial.finish)
    cells = [_cell(job, trial, timed) for trial in trials]
    baseline = next((cell for cell in cells if cell.peer == BASELINE and cell.passed), None)
    beside = [name for name in timed.names() if name not in racing]
    return cells + ([_control(baseline, name, timed) for name in beside] if baseline else [])


def _started(tell: Tell, job: Job) -> list[PeerTrial]:
    """Return a trial of each peer, compiled, checked, and with its kernels counted if it passed."""
    study = job.study()
    own = peers.hand_written(study.problem.peers)
    chosen = [*job.peers(), *(peer for name, peer in own.items() if peers.wanted(name, job.globs))]
    trials = [PeerTrial(study, peer, job.folder(peer.name)) for peer in chosen]
    learn(study, trials)
    _start_compilers([trial.peer for trial in trials if trial.passed], job)
    shares = peers.sharing(chosen)
    for trial in (trial for trial in trials if trial.passed):
        tell(trial.peer.name)
        _start(trial, job, shares[trial.peer.name])
    _share(trials, shares)
    for trial in (trial for trial in trials if trial.passed and trial.compiled.kernels is None):
        with contextlib.suppress(Exception):  # a profiler that cannot start is not the peer's fault
            trial.compiled = dataclasses.replace(trial.compiled, kernels=kernels_per_call(trial.step, study.device))
    return trials


def _start(trial: PeerTrial, job: Job, first: str) -> None:
    made = job.compiled.get(trial.peer.name) or job.compiled.get(first)
    if made is not None and made.status != "pass":
        trial.end(made.status, made.reason)
        return
    trial.cache = job.folder(first)
    trial.attempt(trial.start)
    if job.one_cache:
        trial.forget_seconds()
    if made is not None:
        trial.compiled = made.compile
    if not trial.passed:
        # A sticky device error would be reported for every later peer; it ends the process with this one.
        synchronize(trial.study.device)


def _share(trials: list[PeerTrial], shares: Mapping[str, str]) -> None:
    made = {trial.peer.name: trial.compiled for trial in trials}
    for trial in trials:
        if (first := shares[trial.peer.name]) != trial.peer.name and trial.passed:
            trial.compiled = dataclasses.replace(made[first], shares=first)


def _start_compilers(chosen: list[Peer], job: Job) -> None:
    """Start Inductor's compile processes and headers now, so that no peer's time includes it."""
    if any(map(peers.uses_inductor, chosen)):
        with cache_at(job.cache.parent / "start"):
            start_inductor(torch.device(job.device))


def _time(job: Job, racing: Mapping[str, PeerTrial]) -> Timed:
    """Time on each clock, with the baseline's controls; a peer that fails is dropped from all.

    Wall time is measured twice: with each result kept until the next call returns, and with results dropped at once.
    """
    device = torch.device(job.device)
    calls = {name: trial.step for name, trial in racing.items()}
    timed = Timed()
    events = "events" in job.clocks and device.type != "cpu"
    if BASELINE in calls:
        added = controls.timed(calls[BASELINE], controls.Timer(device, events, job.l2))
        timed.injected = {name: call.injected for name, call in added.items() if isinstance(call, Slowed)}
        calls |= added

    def failed(name: str, error: Exception) -> None:
        if name in racing:
            racing[name].fail(error)
        synchronize(device)

    def repeated(clock: Clock, name: str, calls: int) -> None:
        timed.repeats.setdefault(name, {})[clock] = calls

    settings: dict[str, Any] = {"rounds": job.rounds, "device": device, "failed": failed}
    clocks: tuple[Clock, ...] = ("wall", "dropped") if "wall" in job.clocks or device.type == "cpu" else ()
    for clock in clocks:
        found = interleave(calls, hold=clock == "wall", repeated=partial(repeated, clock), **settings)
        timed.seconds[clock] = found
        calls = {name: call for name, call in calls.items() if name in found}
    if events:
        timed.seconds["events"] = device_timer.device_times(
            calls, l2=job.l2, repeated=partial(repeated, "events"), exposed=timed.exposed.add, **settings
        )
    return timed


def _cell(job: Job, trial: PeerTrial, timed: Timed) -> Cell:
    study, peer = trial.study, trial.peer
    work = study.problem.work if job.mode == job.case.modes[0] else None
    figures = ("rmse", "reference_rmse", "max_error", "cosine")
    return cell_of(
        job,
        peer,
        numerics=_numerics(trial),
        status=trial.status,
        reason=trial.reason,
        **(timed.of(peer.name) if trial.passed else {}),
        compile=trial.compiled,
        accuracy={name: getattr(trial.accuracy, name, None) for name in figures},
        work=dataclasses.asdict(work) if work else None,
        options=_options(peer),
        decided=trial.decided,
    )


def cell_of(job: Job, peer: Peer, **fields: Any) -> Cell:
    """Return the cell of a peer in a job; `fields` are the results."""
    return Cell(
        case=job.case.name,
        case_version=job.case.version,
        mode=job.mode,
        dtype=str(job.dtype).removeprefix("torch."),
        peer=peer.name,
        kind=peer.kind,
        group_id=job.group_id,
        l2=job.l2,
        scale=job.scale,
        one_cache=job.one_cache,
        run=job.run,
        **fields,
    )


def _numerics(trial: PeerTrial) -> str:
    study = trial.study
    try:
        return peers.numerics(trial.peer, study.unit, module=isinstance(study.problem.fn, torch.nn.Module))
    except UnavailableError:
        return study.unit


def _options(peer: Peer) -> dict[str, Any]:
    try:
        return peers.resolved(peer) if peer.compiles else {}
    except UnavailableError:
        return {}


def _control(cell: Cell, name: str, timed: Timed) -> Cell:
    """Return the cell of a control that was timed with its baseline, `cell`."""
    options = {"injected": timed.injected[name]} if name in timed.injected else {}
    return dataclasses.replace(cell, peer=name, kind="control", compile=Compile(), options=options, **timed.of(name))


def environment(tell: Tell, device: str) -> dict[str, Any]:
    """Return the environment of this process."""
    return environment_of(torch.device(device))


def ceilings(tell: Tell, device: str, rounds: int) -> dict[str, Any]:
    """Measure the device's best rates."""
    with torch.no_grad():
        return measure_ceilings(torch.device(device), rounds).to_json()
