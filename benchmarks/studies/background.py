"""Loops of held-out models: eager, a race in the first call, and a race in the background, in one run.

    python -m benchmarks background --models qwen3_decode,convnextv2_tiny --seconds 180 --out FOLDER

Each loop has a process and caches of its own, one after another on the same device. It waits for the device after each
call. FOLDER/background.jsonl has a record for each model; the table shows the bars.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.analysis.markdown import table
from benchmarks.execution.process import Tell
from benchmarks.execution.records import append
from benchmarks.workloads.held_out import BY_NAME, Scale

ROOT = Path(__file__).parents[2]
WAYS: Mapping[str, Mapping[str, Any] | None] = {"eager": None, "foreground": {}, "background": {"race": "background"}}
BASELINE_S, TAIL = 20.0, 0.2  # a loop to compare with; the share of a loop's time whose median counts
LIMIT_S = 300.0  # for building, the first call and the end of a process
LEAST_S, FOREGROUNDS = 60.0, 2  # the winner serves within both
MOST_P99, WITHIN = 1.5, 1.03
MOST_PAUSES, LONGEST_PAUSE_S = 12, 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """One loop: the model, the way, for how long, and its folder."""

    model: str
    way: str
    seconds: float
    scale: Scale
    device: str
    folder: str
    share: float

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its process: cold caches, nothing downloaded."""
        return {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{self.folder}/inductor",
            "TRITON_CACHE_DIR": f"{self.folder}/triton",
            "BACKEND_KWARGS_STORE": f"{self.folder}/decisions",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments: the models, the seconds of the loop in the background, where, and its share."""

    models: tuple[str, ...]
    seconds: float
    out: Path
    device: str
    scale: Scale
    share: float = 0.05


# ---- a process


def loop(job: Job) -> dict[str, Any]:
    """Call the model in a loop; return the first call's seconds, those of each later call, and the timelines."""
    import torch

    from backend_kwargs import make_backend
    from benchmarks.execution.turns import step

    row = BY_NAME[job.model]
    dtype = torch.float32 if job.device == "cpu" else torch.bfloat16
    model, args = row.build(torch.device(job.device), dtype, job.scale)
    options = WAYS[job.way]
    if options is None:
        compiled: Any = model
    else:
        shared = {"background_share": job.share} if options else {}
        compiled = torch.compile(model, backend=make_backend("tmpl-inductor:auto", {**options, **shared}))
    wait = torch.get_device_module(job.device).synchronize
    call = partial(step, compiled, model, args, "plain", training=row.training)
    began = time.perf_counter()
    held = call()
    wait()
    first_s = time.perf_counter() - began
    starts, calls = [], []
    ends = (began if job.way == "background" else time.perf_counter()) + job.seconds
    while (start := time.perf_counter()) < ends:
        held = call()
        wait()
        starts.append(start - began)
        calls.append(time.perf_counter() - start)
    del held
    return {"first_call_s": first_s, "starts": starts, "calls": calls, "races": _timelines(began)}


def _timelines(began: float) -> list[dict[str, Any]]:
    """Return what the races of this process show: their winners, and events in seconds since the first call began."""
    from backend_kwargs.compile_records import records

    found = []
    for record in records():
        timeline, decision = record.facts.background, record.facts.decided
        events = [] if timeline is None else [asdict(each) for each in timeline.events]
        shift = 0.0 if timeline is None else timeline.began - began
        events = [{**each, "at_s": each["at_s"] + shift} for each in events]
        won = "" if decision is None else decision.winner
        found.append({"winner": won, "ended": bool(timeline and timeline.ended), "events": events})
    return found


# ---- all processes of a model


def measure(asked: Asked, say: Tell) -> str:
    """Measure each model, and return the table of all; a model whose process failed has its reason in it."""
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in asked.models:
        try:
            found = {way: _run(asked, name, way, say) for way in WAYS}
            judged = judge(found)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            say(f"{name}: {error}")
            judged = {"fault": str(error)[-300:]}
        append(asked.out / "background.jsonl", [{"record": "background", "model": name, **judged}])
        rows.append((name, judged))
        say(f"{name}: {shown(judged)}")
    return page(rows)


def _run(asked: Asked, name: str, way: str, say: Tell) -> dict[str, Any]:
    folder = asked.out / "work" / name / way
    if folder.exists():
        import shutil

        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    seconds = asked.seconds if way == "background" else min(BASELINE_S, asked.seconds)
    job = Job(name, way, seconds, asked.scale, asked.device, str(folder), asked.share)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.studies.background", json.dumps(asdict(job))],
        env=job.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds + LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{way} ended with {done.returncode}: {done.stderr[-1500:]}")
    found: dict[str, Any] = json.loads((folder / "loop.json").read_text(encoding="utf-8"))
    say(f"{name}: {way}: first call {found['first_call_s']:.1f} s, {len(found['calls'])} calls")
    return found


# ---- judging


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def judge(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of the bars from the loops of one model."""
    eager, foreground, background = (found[way] for way in WAYS)
    switches = [
        event["at_s"] for race in background["races"] for event in race["events"] if "takes over" in event["what"]
    ]
    served_s = max(switches, default=background["first_call_s"])
    limit_s = max(LEAST_S, FOREGROUNDS * foreground["first_call_s"])
    # Of the end of the loop, in which no race goes on, if it has ended.
    after = [c for at, c in zip(background["starts"], background["calls"], strict=True) if at > served_s]
    last = after[int((1 - TAIL) * len(after)) :] or background["calls"][-1:]
    longer_than = MOST_P99 * percentile(eager["calls"], 0.99)
    pauses = [
        (at, seconds)
        for at, seconds in zip(background["starts"], background["calls"], strict=True)
        if seconds > longer_than
    ]
    told = [e["at_s"] for race in background["races"] for e in race["events"] if e["pause_s"]]
    untold = [(at, s) for at, s in pauses if not any(at <= each <= at + s + 0.05 for each in told)]
    raced = [race for race in background["races"] if race["events"]]
    return {
        "eager_ms": 1e3 * median(eager["calls"]),
        "foreground_first_s": foreground["first_call_s"],
        "background_first_s": background["first_call_s"],
        "foreground_winner": [race["winner"] for race in foreground["races"]],
        "background_winner": [race["winner"] for race in background["races"]],
        "ended": bool(raced) and all(map(_ended, raced)),
        "served_s": served_s,
        "limit_s": limit_s,
        "foreground_ms": 1e3 * median(foreground["calls"]),
        "background_ms": 1e3 * median(last),
        "p99_ms": 1e3 * percentile(background["calls"], 0.99),
        "eager_p99_ms": 1e3 * percentile(eager["calls"], 0.99),
        "pauses": len(pauses),
        "longest_pause_s": max((s for _, s in pauses), default=0.0),
        "untold_pauses": untold[:20],
        "untold": len(untold),
        "events": [race["events"] for race in background["races"]],
    }


def _ended(race: Mapping[str, Any]) -> bool:
    failed = any(event["what"].startswith("the race failed") for event in race["events"])
    return bool(race["ended"]) and not failed


def bars(judged: Mapping[str, Any]) -> dict[str, bool]:
    """Return which bars are met."""
    return {
        "a race that ended": judged["ended"],
        "winner in time": judged["served_s"] <= judged["limit_s"],
        "median": judged["background_ms"] <= WITHIN * judged["foreground_ms"],
        "p99": judged["p99_ms"] <= MOST_P99 * judged["eager_p99_ms"],
        "pauses": judged["pauses"] <= MOST_PAUSES and judged["longest_pause_s"] <= LONGEST_PAUSE_S,
        "told": not judged["untold"],
    }


def shown(judged: Mapping[str, Any]) -> str:
    """Return the figures of one model in a line."""
    if "fault" in judged:
        return f"failed: {judged['fault']}"
    missed = [name for name, met in bars(judged).items() if not met]
    return (
        f"winner {', '.join(judged['background_winner'])} (foreground {', '.join(judged['foreground_winner'])}) "
        f"serves after {judged['served_s']:.1f} s (limit {judged['limit_s']:.0f}); "
        f"{judged['background_ms']:.3f} ms (foreground {judged['foreground_ms']:.3f}, eager {judged['eager_ms']:.3f}); "
        f"p99 {judged['p99_ms']:.3f} ms (eager {judged['eager_p99_ms']:.3f}); {judged['pauses']} longer calls, at most "
        f"{judged['longest_pause_s']:.2f} s, {judged['untold']} not on the timeline; "
        f"missed: {', '.join(missed) or 'none'}"
    )


def page(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the table of all models."""
    head = ["model", "winner", "serves after", "limit", "ms", "foreground ms", "eager ms", "p99 ms", "eager p99 ms"]
    head += ["longer calls", "longest", "not told", "bars missed"]
    body = []
    for name, each in rows:
        if "fault" in each:
            body.append([name, "failed", *[""] * (len(head) - 2)])
            continue
        figures = [
            f"{each[key]:.3f}" for key in ("background_ms", "foreground_ms", "eager_ms", "p99_ms", "eager_p99_ms")
        ]
        body.append(
            [
                name,
                ", ".join(each["background_winner"]),
                f"{each['served_s']:.1f} s",
                f"{each['limit_s']:.0f} s",
                *figures,
                str(each["pauses"]),
                f"{each['longest_pause_s']:.2f} s",
                str(each["untold"]),
                ", ".join(bar for bar, met in bars(each).items() if not met) or "none",
            ]
        )
    return "\n".join(table(head, body))


if __name__ == "__main__":
    given = Job(**json.loads(sys.argv[1]))
    Path(given.folder, "loop.json").write_text(json.dumps(loop(given)), encoding="utf-8")
