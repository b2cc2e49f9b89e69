"""The models of `benchmarks.workloads.held_out`: `auto` against torch's modes, each compiled in its own process.

    python -m benchmarks held-out --out FOLDER --max-minutes 20

On each visible GPU one model at a time, with 16 cores of its own. The processes of a model stay alive, and are timed
in turn. FOLDER/held_out.jsonl has a record for each compile and each timing, written as it is known; the same command
continues where it ended, with the caches in `work`. FOLDER/held_out.md is the page.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.analysis.held_out import Records, write_page
from benchmarks.execution.records import append
from benchmarks.execution.turns import Job, Process
from benchmarks.execution.ways import WAYS, Way
from benchmarks.workloads.drawn import DRAWS, MODELS
from benchmarks.workloads.held_out import BY_NAME, Scale

Say = Callable[[str], None]
CORES = 16  # for each GPU
CHECK_S, SAMPLE_LIMIT_S, BUILD_S = 240.0, 60.0, 240.0
STARTS_S: Mapping[str, float] = {"max-autotune": 150.0, "auto-full": 200.0}  # left, or such a compile does not begin
START_S = 60.0  # for others


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments: which models and ways, the time, the folders, and how much is timed."""

    models: tuple[str, ...]
    ways: tuple[str, ...]
    out: Path
    work: Path
    device: str
    scale: Scale = "full"
    dtype: str = "bfloat16"
    rounds: int = 40
    max_s: float = float("inf")
    began: float = field(default_factory=time.monotonic)

    @property
    def records(self) -> Path:
        """The file of records."""
        return self.out / "held_out.jsonl"

    @property
    def left_s(self) -> float:
        """The seconds left."""
        return self.max_s - (time.monotonic() - self.began)


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU, "" for none, and the cores of its processes."""

    gpu: str
    cores: tuple[int, ...]


def places(device: str) -> list[Place]:
    """Return a place for each visible GPU, with 16 cores each or an equal share; one with all cores on a CPU."""
    cores = sorted(os.sched_getaffinity(0))
    if device == "cpu":
        return [Place("", tuple(cores))]
    import torch

    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = named or [str(at) for at in range(torch.cuda.device_count())]
    each = min(CORES, max(len(cores) // len(gpus), 1))
    return [Place(gpu, tuple(cores[at * each : (at + 1) * each])) for at, gpu in enumerate(gpus)]


def measure(asked: Asked, say: Say) -> bool:
    """Measure what the records lack, write the page, and return whether all is done."""
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.work.mkdir(parents=True, exist_ok=True)
    study, found = _Study(asked, say), places(asked.device)
    study.note({"record": "environment", **_environment(asked, found)})
    left = [name for name in asked.models if not study.known().done(name, asked.ways)]
    say(f"{len(left)} of {len(asked.models)} models to measure on {len(found)} places")
    waiting = iter(left)
    with ThreadPoolExecutor(len(found)) as pool:
        for work in [pool.submit(study.serve, place, waiting) for place in found]:
            work.result()
    write_page(asked.records, asked.out / "held_out.md", [MODELS[name] for name in asked.models])
    return all(study.known().done(name, asked.ways) for name in asked.models)


def _environment(asked: Asked, found: Sequence[Place]) -> dict[str, Any]:
    """Return what the figures depend on."""
    import torch

    from backend_kwargs.options.machine import installed_version
    from backend_kwargs.trial import environment

    packages = {name: installed_version(name) or "" for name in ("transformers", "timm", "torch_geometric")}
    return {
        **environment(torch.device(asked.device)),
        "scale": asked.scale,
        "gpus": len(found) if asked.device != "cpu" else 0,
        "cores": len(found[0].cores),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **packages,
    }


@dataclass
class _Study:
    asked: Asked
    say: Say
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, record: Mapping[str, Any]) -> None:
        with self.lock:
            append(self.asked.records, [record])

    def known(self) -> Records:
        with self.lock:
            return Records.read(self.asked.records)

    def serve(self, place: Place, waiting: Iterator[str]) -> None:
        """Measure one model after the other at this place, until none waits or the time ends."""
        following = self.group(place, waiting)
        while (group := following) is not None:
            following = None
            try:
                group.compile()
                if place.gpu:  # is built while this one is checked and timed; without a GPU that would be on its cores
                    following = self.group(place, waiting)
                group.compare()
            except Exception as error:  # noqa: BLE001 - a fault of the study must not lose the other models
                self.note({"record": "fault", "model": group.model, "reason": repr(error)[:500]})
                self.say(f"{group.model}: {error!r}")
            finally:
                group.end()
            following = following or self.group(place, waiting)

    def group(self, place: Place, waiting: Iterator[str]) -> "_Group | None":
        """Return the next model with its processes, which begin to build it; None if none waits or the time ends."""
        with self.lock:
            name = next(waiting, None)
        if name is None:
            return None
        if self.asked.left_s < START_S:
            self.say(f"{name}: not begun, {self.asked.left_s:.0f} s are left")
            return self.group(place, waiting)
        return _Group(self, name, place).begin()


@dataclass
class _Group:
    """The processes of one model."""

    study: _Study
    model: str
    place: Place
    wanted: list[Way] = field(default_factory=list)
    built: dict[str, tuple[Process, bool]] = field(default_factory=dict)  # with whether its caches are empty
    running: dict[str, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asked = self.study.asked
        self.work = self.asked.work / self.model
        self.work.mkdir(parents=True, exist_ok=True)

    def begin(self) -> "_Group":
        """Start the processes of all ways that are asked for, which build the model."""
        known = self.study.known()
        for way in WAYS.values():
            if way.name in self.asked.ways and not known.failed(self.model, way.name):
                self.wanted.append(way)
        for way in self.wanted:
            cold = not (known.compiled(self.model, way.name) and (self.folder(way.name) / "inductor").exists())
            if cold:
                shutil.rmtree(self.folder(way.name), ignore_errors=True)  # of a run that was cut
            self.built[way.name] = Process(self.job(way.name)), cold
        return self

    def say(self, text: str) -> None:
        self.study.say(f"{self.model}: {text}")

    def compile(self) -> None:
        """Make the first calls of all ways that are asked for, those from caches at the same time."""
        again = [way for way, (_, cold) in self.built.items() if not cold]
        self.start(again)
        for stage in sorted({way.stage for way in self.wanted}):
            self.start([way.name for way in self.wanted if way.stage == stage and way.name not in again])

    def compare(self) -> None:
        """Check and time what runs, if eager does."""
        if "eager" in self.running and len(self.running) > 1:
            self.check()
            self.time()

    # ---- first calls

    def folder(self, way: str) -> Path:
        return self.work / way

    def start(self, ways: Sequence[str]) -> None:
        """Make the first calls of some ways at the same time, and note them."""
        started: dict[str, tuple[Process, bool]] = {}
        for way in ways:
            if self.asked.left_s < STARTS_S.get(way, START_S):
                self.say(f"{way} is not begun, {self.asked.left_s:.0f} s are left")
                continue
            started[way] = self.built.pop(way)
        built = {way: process.answer(BUILD_S) for way, (process, _) in started.items()}
        for way, answer in built.items():
            if answer["status"] == "built":
                started[way][0].tell(do="first_call")
        began = time.monotonic()
        for way, (process, cold) in started.items():
            answer = built[way]
            if answer["status"] == "built":
                limit_s = WAYS[way].limit_s - (time.monotonic() - began)
                answer = process.answer(min(limit_s, max(self.asked.left_s, 1.0)))
            self.begun(way, process, cold=cold, beside=len(started) - 1, answer=answer)

    def job(self, way: str) -> Job:
        return Job(
            self.model,
            way,
            self.asked.scale,
            self.asked.device,
            self.asked.dtype,
            str(self.folder(way)),
            str(self.work / "reference.pt"),
            self.place.cores,
            self.place.gpu,
        )

    def begun(self, way: str, process: Process, *, cold: bool, beside: int, answer: Mapping[str, Any]) -> None:
        """Note a first call; the time of the whole run is no fault of the way."""
        if answer["status"] != "timeout" or self.asked.left_s > 1:
            about = {"model": self.model, "way": way, "cold": cold, "beside": beside}
            self.study.note({"record": "compile", **about, **answer})
        if answer["status"] == "pass":
            self.running[way] = process
            won = ", ".join(race["winner"] for race in answer["races"])
            self.say(f"{way} first call {answer['first_call_s']:.1f} s{'' if cold else ', from its caches'} {won}")
        else:
            process.kill()
            shutil.rmtree(self.folder(way), ignore_errors=True)  # the next try is as cold
            self.say(f"{way} {answer['status']}: {answer.get('reason', '')[-300:]}")

    # ---- checks and times

    def check(self) -> None:
        """Compare the results of each way with eager's; what fails to run is not timed."""
        for way in ("eager", *(way for way in tuple(self.running) if way != "eager")):
            answer = self.running[way].ask(CHECK_S, do="check")
            self.study.note({"record": "check", "model": self.model, "way": way, **answer})
            if answer["status"] not in ("pass", "fail_accuracy"):
                self.drop(way, answer)
            if answer["status"] != "pass":
                self.say(f"{way} {answer['status']}: {answer['reason'][:200]}")

    def drop(self, way: str, answer: Mapping[str, Any]) -> None:
        self.running.pop(way).kill()
        self.study.note({"record": "compile", "model": self.model, "way": way, "cold": False, **answer})

    def time(self) -> None:
        """Time all calls in turn, and note the samples."""
        owners: dict[str, str] = {}
        repeats: dict[str, int] = {}
        graphs: dict[str, int] = {}
        for way in tuple(self.running):
            answer = self.running[way].ask(CHECK_S, do="prepare")
            if answer["status"] != "pass":
                self.drop(way, answer)
                continue
            repeats |= answer["repeats"]
            graphs[way] = answer["graphs"]
            owners |= dict.fromkeys(answer["repeats"], way)
        samples = self.rounds(owners)
        whole = len(next(iter(samples.values()), []))
        known = {"rounds": whole, "ways": list(self.running), "repeats": repeats, "graphs": graphs}
        self.study.note({"record": "timing", "model": self.model, "samples": samples, **known})
        medians = ", ".join(f"{name} {sorted(each)[whole // 2] * 1e3:.3f}" for name, each in samples.items() if whole)
        self.say(f"ms: {medians}")

    def rounds(self, owners: Mapping[str, str]) -> dict[str, list[float]]:
        """Return the samples of each call, one for each round; a way that fails is left out."""
        from backend_kwargs.trial import order

        samples: dict[str, list[float]] = {name: [] for name in owners}
        for done in range(self.asked.rounds):
            for name in order(list(samples), done):
                if owners[name] not in self.running:
                    continue
                answer = self.running[owners[name]].ask(SAMPLE_LIMIT_S, do="sample", name=name)
                if answer["status"] == "pass":
                    samples[name].append(answer["seconds"])
                else:
                    self.say(f"{name} {answer['status']}: {answer['reason'][:200]}")
                    self.drop(owners[name], answer)
            samples = {name: found for name, found in samples.items() if owners[name] in self.running}
        return samples

    def end(self) -> None:
        for process in (*self.running.values(), *(process for process, _ in self.built.values())):
            process.kill()


def names(text: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the names in a text, all known ones for ""; raise if one is unknown."""
    from backend_kwargs.errors import unknown

    asked = tuple(name for name in text.split(",") if name)
    for name in asked:
        if name not in known:
            raise unknown(what, name, known)
    return asked or tuple(known)


def models_named(text: str) -> tuple[str, ...]:
    """Return the models in a text such as "olmoe,gin_train", of a draw such as "drawn", or for "" all held out."""
    return tuple(DRAWS[text]) if text in DRAWS else names(text, list(MODELS), "model") if text else tuple(BY_NAME)


def ways_named(text: str) -> tuple[str, ...]:
    """Return the ways in a text such as "default,auto", all for ""; eager is always among them, as the reference."""
    asked = names(text, list(WAYS), "way")
    return tuple(way for way in WAYS if way in asked or way == "eager")


def listed() -> str:
    """Return the models, one a line."""
    return "\n".join(f"{row.name}: {row.what} ({row.kind})" for row in MODELS.values())
