"""Compilers for whole models on one CPU thread: each alone, and `auto` with all of them as candidates.

    python -m benchmarks compilers --models bert,resnet18 --budget-s 560 --out FOLDER

Each model has its own process on one core, in which all candidates are compiled, checked, and timed interleaved, as in
a plain loop. TVM tunes at the same time in another process, on another core. Each record is written as soon as it is
measured; the page contains all records in the folder. A model is one of MODELS, or any that `backend-kwargs compare`
accepts.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.files.atomic_write import write_whole
from benchmarks.analysis.compilers import AUTO, AUTO_BF16, EAGER, TUNED, UNTUNED, write_page
from benchmarks.execution import process
from benchmarks.execution.process import Tell

MODELS: Mapping[str, str] = {
    "bert": "transformers:BertModel?num_hidden_layers=4&batch=1&tokens=128",
    "resnet18": "timm:resnet18?batch=1",
    "vit_tiny": "timm:vit_tiny_patch16_224?batch=1",
    "mobilenetv3": "timm:mobilenetv3_large_100?batch=1",
    "efficientnet_b0": "timm:efficientnet_b0?batch=1",
    "graphsage": "benchmarks.workloads.nets.graphs:graph_sage",
    "wav2vec2": "transformers:Wav2Vec2Model?num_hidden_layers=4&batch=1",
}
# Fast compilers come first, so that a slow one takes no time from others. "default" is torch's own.
BACKENDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "openvino-native": ("openvino-native", {}),
    "onnxruntime": ("onnxruntime", {}),
    UNTUNED: ("tmpl-tvm", {}),
    "freezing": ("tmpl-inductor:freezing", {}),
    "default": ("inductor", {}),
    "max_autotune+freezing": ("tmpl-inductor:max_autotune+freezing", {}),
}
# Raced along with eager, and with freezing as default. Fewer with bf16: the others seldom win, and bf16 is raced last.
RACING = "tmpl-inductor:auto"
CANDIDATES = ("openvino-native", "onnxruntime", "tmpl-tvm", "max_autotune")
CANDIDATES_BESIDE_BF16 = ("openvino-native", "onnxruntime")
MAX_ERROR = 1e-2
# Shares of a model's seconds: of a race, of the timing at the end; and those kept for what follows a candidate.
RACE, TIMING = 0.15, 0.08
KEPT = {AUTO: 0.36, AUTO_BF16: 0.12, TUNED: 0.12}
KEPT_BEFORE_AUTO = 0.58
MOST = 0.2  # of all seconds for one compiler
MEASURING_S = 90  # of the process that compares tuned and untuned kernels
SEARCHES = (16, 64, 1_000_000)  # trials for each part: first a few for all parts; the last is ended by its time


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments: the models, the seconds for each, the seconds of tuning, the folder of records."""

    models: tuple[str, ...]
    budget_s: float
    tune_s: float
    rounds: int
    out: Path


class TooLongError(Exception):
    """A compile exceeded its share of the seconds."""


@dataclass
class Allowance:
    """Ends a candidate's compile when only the seconds kept for the following ones are left."""

    budget_s: float
    began: float = field(default_factory=time.perf_counter)

    def left(self, share: float) -> float:
        """Return the seconds left, less a share of all."""
        return self.budget_s * (1 - share) - (time.perf_counter() - self.began)

    def start(self, label: str) -> None:
        """Start the clock of a candidate."""
        from backend_kwargs.harness.trial import Trial

        left = self.left(KEPT.get(label, KEPT_BEFORE_AUTO))
        allowed = max(left if label in KEPT else min(left, MOST * self.budget_s), 1.0)

        def end(number: int, frame: FrameType | None) -> None:
            if _runs(Trial.start.__code__, frame):  # an exception there ends only this candidate
                raise TooLongError(f"compiling took longer than the {allowed:.0f} s that its share of the budget left")

        signal.signal(signal.SIGALRM, end)
        # Again each second, since Inductor drops a choice that raises and goes on with the next one.
        signal.setitimer(signal.ITIMER_REAL, allowed, 1.0)

    def stop(self) -> None:
        """Stop it."""
        signal.setitimer(signal.ITIMER_REAL, 0)


def _runs(code: CodeType, frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


# ---- in a model's process


def race(tell: Tell, spec: str, budget_s: float, rounds: int, scratch: Path, core: int) -> dict[str, Any]:
    """Return the record of one model: every candidate alone, and the races."""
    import backend_kwargs as bk

    allowance = Allowance(budget_s)
    model, inputs = _settled(spec, scratch, core)
    shared = {"freezing": True, "budget_s": RACE * budget_s}
    bf16 = {"precision": ("bf16",), "max_error": MAX_ERROR, "candidates": _raced(CANDIDATES_BESIDE_BF16)}
    backends = {
        **BACKENDS,
        AUTO: (RACING, {**shared, "candidates": _raced(CANDIDATES), "store": str(scratch / "auto")}),
        AUTO_BF16: (RACING, {**shared, **bf16, "store": str(scratch / "bf16")}),
    }
    made: dict[str, Any] = {EAGER: None}
    lacking = {}
    for label, (name, options) in backends.items():
        try:
            made[label] = name if name == "inductor" else bk.make_backend(name, options)
        except BackendKwargsError as error:
            lacking[label] = str(error)
    return _compared(tell, model, inputs, made, allowance, rounds) | {"lacking": lacking}


def tune(tell: Tell, spec: str, scratch: Path, core: int) -> None:
    """Search for TVM's kernels of a model until the process is ended; the measurements are in `scratch`."""
    import torch

    import backend_kwargs as bk

    model, inputs = _settled(spec, scratch, core)
    for trials in SEARCHES:
        tell(f"searching, {trials} trials for each part")
        searching = bk.make_backend(
            "tmpl-tvm",
            scheduler="meta_schedule",
            trials=trials,
            work_dir=str(scratch / "tuning"),
            seed=trials,  # the same one would measure the same schedules again
        )
        torch.compiler.reset()
        compiled = torch.compile(model, backend=searching)
        with torch.no_grad():
            compiled(**inputs) if isinstance(inputs, Mapping) else compiled(*inputs)


def tuned(tell: Tell, spec: str, rounds: int, scratch: Path, core: int) -> dict[str, Any]:
    """Return the record of the search: tuned and untuned kernels, and eager."""
    import backend_kwargs as bk

    model, inputs = _settled(spec, scratch, core)
    found = bk.make_backend("tmpl-tvm", work_dir=str(scratch / "tuning"))
    backends = {EAGER: None, UNTUNED: bk.make_backend("tmpl-tvm"), TUNED: found}
    return _compared(tell, model, inputs, backends, Allowance(4 * MEASURING_S), rounds)


def _settled(spec: str, scratch: Path, core: int) -> tuple[Any, Any]:
    """Pin this process to a core, and return the model that it measures on one thread."""
    os.sched_setaffinity(0, {core})
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / f"inductor-{os.getpid()}")
    import torch

    from backend_kwargs.harness.models import model_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return model_of(spec)


def _raced(names: Iterable[str]) -> list[str]:
    """Return the candidates that can be raced on this machine."""
    import backend_kwargs as bk

    found = []
    for name in names:
        with suppress(BackendKwargsError):
            bk.make_backend(RACING, candidates=[name])
            found.append(name)
    return found


def _compared(
    tell: Tell,
    model: Any,
    inputs: Any,
    backends: Mapping[str, Any],
    allowance: Allowance,
    rounds: int,
) -> dict[str, Any]:
    """Compile, check and time the candidates interleaved; return the comparison as data."""
    from backend_kwargs.compare import Candidate, compare, to_json

    def progress(label: str, stage: str, fraction: float) -> None:
        allowance.stop()
        if stage != "compiled" and not (stage == "timing" and fraction < 1):
            tell(f"{stage} {label}".strip())
        if stage == "compile":
            allowance.start(label)

    comparison = compare(
        model,
        inputs,
        [Candidate(label, backend) for label, backend in backends.items()],
        rounds=rounds,
        baseline=EAGER,
        budget_s=TIMING * allowance.budget_s,
        cold=False,  # kernels that several candidates share are compiled once
        max_error=MAX_ERROR,
        progress=progress,
    )
    return {"comparison": to_json(comparison)}


# ---- the processes


def measure(asked: Asked, say: Tell) -> None:
    """Measure the models one after the other, write their records, and the page of all in the folder."""
    asked.out.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    for name in asked.models:
        with _scratch() as scratch, ThreadPoolExecutor(2) as pool:
            works = [pool.submit(_race, asked, name, scratch, cores[0], say)]
            if asked.tune_s:
                works.append(pool.submit(_tune, asked, name, scratch, cores[-1], say))
            for work in works:
                work.result()
    write_page(asked.out)


def _race(asked: Asked, name: str, scratch: Path, core: int, say: Tell) -> None:
    began, spec = time.perf_counter(), MODELS.get(name, name)
    outcome = process.run(
        race,
        spec,
        asked.budget_s,
        asked.rounds,
        scratch,
        core,
        step_s=asked.budget_s,
        deadline=time.monotonic() + asked.budget_s,
        log=_log(asked, name),
        heard=lambda step: say(f"{name}: {step}"),
    )
    _write(asked, name, "race", began, outcome, {"budget_s": asked.budget_s})


def _tune(asked: Asked, name: str, scratch: Path, core: int, say: Tell) -> None:
    began, spec, log = time.perf_counter(), MODELS.get(name, name), _log(asked, f"{name}_tuned")
    say(f"{name}: tuning with TVM for {asked.tune_s:.0f} s")
    searched = process.run(tune, spec, scratch, core, step_s=asked.tune_s, log=log)
    if searched.status not in ("timeout", "pass"):
        _write(asked, f"{name}_tuned", "tuned", began, searched, {"tune_s": asked.tune_s})
        return
    outcome = process.run(tuned, spec, asked.rounds, scratch, core, step_s=4 * MEASURING_S, log=log)
    _write(asked, f"{name}_tuned", "tuned", began, outcome, {"tune_s": asked.tune_s})


def _log(asked: Asked, name: str) -> Path:
    return asked.out / f"{_file_of(name)}.txt"


def _file_of(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)


def _write(
    asked: Asked, name: str, kind: str, began: float, outcome: process.Outcome, settings: Mapping[str, Any]
) -> None:
    record = {
        "model": name.removesuffix("_tuned") if kind == "tuned" else name,
        "kind": kind,
        "status": outcome.status,
        "reason": f"{outcome.reason} (at: {outcome.at})" if outcome.reason else "",
        "seconds": time.perf_counter() - began,
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        **settings,
        **(outcome.value or {}),
    }
    record["spec"] = MODELS.get(record["model"], record["model"])
    write_whole(asked.out / f"{_file_of(name)}.json", json.dumps(record, indent=1) + "\n")


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)
