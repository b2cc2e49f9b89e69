"""How well `auto` chooses: the regret of its winner, and how often a fresh race chooses another one.

    python -m benchmarks regret --out FOLDER --models gin_train,qwen3_decode

Each race has a process and caches of its own. Then one process compiles every candidate that any race compiled, or
skipped for want of time, and times all of them interleaved, at length. FOLDER/regret.jsonl has a record for each model;
the same command continues where it ended.
"""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from backend_kwargs.facts.decision import EAGER
from backend_kwargs.files import write_whole
from backend_kwargs.trial import Interval, ratio_interval
from benchmarks.analysis.markdown import number, table
from benchmarks.execution import process
from benchmarks.execution.process import Tell
from benchmarks.execution.records import append
from benchmarks.execution.turns import Job, Process, step
from benchmarks.execution.ways import WAYS
from benchmarks.workloads.drawn import MODELS
from benchmarks.workloads.held_out import Scale

NOISE = 0.02  # two candidates that differ by less are the same choice
MOST_FLIPS, MOST_REGRET = 0.1, 0.02
UNTRIED = ("it is predicted to exceed the budget", "the budget of", "its tuning was interrupted")
TIMING_S = 20.0
HEAD = f"""\
Regret is the time of a race's winner over that of the best candidate, less 1, all timed at length in one process; the
median of fresh races. Flips are those whose winner differs from the most frequent one by more than {NOISE:.0%}, beyond
the noise of the timing."""
LONGEST_S = 600.0  # to compile and time all candidates of a model


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments: the models, how many races of each, where, and for how long all of them."""

    models: tuple[str, ...]
    races: int
    out: Path
    device: str
    scale: Scale
    rounds: int
    max_s: float

    @property
    def records(self) -> Path:
        """The file of records."""
        return self.out / "regret.jsonl"


# ---- judging


def winner_of(race: Mapping[str, Any]) -> str:
    """Return a candidate's key: its options, or "eager"."""
    return EAGER if race["winner"] == EAGER else key_of(race["options"])


def key_of(options: Mapping[str, Any]) -> str:
    """Return options as a key."""
    return json.dumps(dict(options), sort_keys=True)


def candidates_of(races: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of the candidates worth timing, by key: those that ran, and those there was no time for."""
    found = {EAGER: EAGER, key_of({}): "default"}
    for race in races:
        found.setdefault(winner_of(race), race["winner"])
        for row in race["rows"]:
            worth = row["status"] == "pass" or row["reason"].startswith(UNTRIED)
            if worth and row["name"] != EAGER and not row["compiler"] and "precision" not in row["options"]:
                found.setdefault(key_of(row["options"]), row["name"])
    return found


def judged(winners: Sequence[str], samples: Mapping[str, Sequence[float]]) -> tuple[Interval | None, float | None]:
    """Return the regret of the median winner, and the share that differs from the most frequent one beyond noise.

    `samples` are those of each candidate, paired by round; None if a winner has none.
    """
    if not winners or any(winner not in samples for winner in winners):
        return None, None
    best = best_of(samples)
    usual = Counter(winners).most_common(1)[0][0]
    regrets = sorted((ratio_interval(samples[winner], samples[best]) for winner in winners), key=lambda r: r.median)
    middle = regrets[(len(regrets) - 1) // 2]
    apart = [ratio_interval(samples[winner], samples[usual]) for winner in winners if winner != usual]
    flips = sum(each.low > 1 + NOISE or each.high < 1 - NOISE for each in apart)
    return Interval(middle.median - 1, middle.low - 1, middle.high - 1), flips / len(winners)


def best_of(samples: Mapping[str, Sequence[float]]) -> str:
    """Return the candidate with the least median."""
    return min(samples, key=lambda key: median(samples[key]))


# ---- measuring


def measure(asked: Asked, say: Tell) -> bool:
    """Measure the models that the records lack, write the page, and return whether none is left."""
    asked.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    done = {record["model"] for record in read(asked.records)}
    left = [name for name in asked.models if name not in done]
    for name in left:
        if time.monotonic() - began > asked.max_s:
            say(f"{name}: not begun")
            break
        append(asked.records, [{"record": "regret", "model": name, **_of_model(asked, name, say)}])
        done.add(name)
    write_whole(asked.out / "regret.md", "\n".join(page(read(asked.records))) + "\n")
    return done >= {*asked.models}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, which need not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _of_model(asked: Asked, name: str, say: Tell) -> dict[str, Any]:
    races: list[dict[str, Any]] = []
    firsts: list[float] = []
    processes = [Process(_job(asked, name, asked.out / "work" / name / str(at))) for at in range(asked.races)]
    try:
        built = [each.answer(LONGEST_S) for each in processes]  # before the first race, which they would slow
        if failed := [each for each in built if each["status"] != "built"]:
            return {"status": failed[0]["status"], "reason": failed[0]["reason"]}
        for at, raced in enumerate(processes):
            answer = raced.ask(WAYS["auto"].limit_s, do="first_call")
            if answer["status"] != "pass":
                return {"status": answer["status"], "reason": answer["reason"]}
            if len(answer["races"]) != 1:
                found = len(answer["races"])
                return {"status": "unavailable", "reason": f"{found} races: the regret is that of one graph"}
            races += answer["races"]
            firsts.append(answer["first_call_s"])
            say(f"{name}: race {at + 1} chose {races[-1]['winner']}, first call {firsts[-1]:.1f} s")
            raced.kill()
    finally:
        for each in processes:
            each.kill()
    names, cache = candidates_of(races), asked.out / "work" / name / "0"
    outcome = process.run(timed, _job(asked, name, cache), list(names), asked.rounds, step_s=LONGEST_S, heard=say)
    shutil.rmtree(asked.out / "work" / name, ignore_errors=True)
    winners = [winner_of(race) for race in races]
    known = {"status": outcome.status, "reason": outcome.reason, "first_calls": firsts, "winners": winners}
    return {**known, "names": names, "samples": outcome.value or {}, "races": races}


def _job(asked: Asked, name: str, folder: Path) -> Job:
    dtype = "bfloat16" if asked.device != "cpu" else "float32"
    return Job(name, "auto", asked.scale, asked.device, dtype, str(folder), "")


def timed(tell: Tell, job: Job, keys: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Return the samples of each candidate that runs, compiled in this process with the caches of a race."""
    os.environ |= {name: value for name, value in job.environment.items() if name.startswith(("TOR", "TRI", "HF"))}
    import torch

    from backend_kwargs.trial import interleave

    row = MODELS[job.model]
    model, args = row.build(torch.device(job.device), getattr(torch, job.dtype), job.scale)
    calls: dict[str, Callable[[], object]] = {}
    for key in keys:
        tell(f"{job.model}: compiles {key}")
        compiled = _compiled(model, key)

        def call(compiled: Any = compiled) -> object:
            return step(compiled, model, args, "plain", training=row.training)

        try:
            call()
            calls[key] = call
        except Exception as error:  # noqa: BLE001 - a candidate that fails alone has no time
            tell(f"{job.model}: {key} fails: {error!r}"[:300])
    device = torch.device(job.device)
    return interleave(calls, rounds=rounds, device=device, budget_s=TIMING_S * max(len(calls), 1) / 4)


def _compiled(model: Any, key: str) -> Any:
    from backend_kwargs import make_backend
    from backend_kwargs.harness.trial import isolated

    if key == EAGER:
        return model
    options = json.loads(key)
    copies = {"clone_outputs": True} if options.get("triton.cudagraphs") else {}  # as auto does
    return isolated(model, backend=make_backend("tmpl-inductor", {**options, **copies}))


# ---- the page


def page(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page: regret and flips of each model, and whether the bars are met."""
    rows, regrets, flips, count = [], [], 0.0, 0
    for record in records:
        winners = record.get("winners", [])
        regret, flipped = judged(winners, record.get("samples", {}))
        if regret is not None and flipped is not None:
            regrets.append(regret.median)
            flips += flipped * len(winners)
            count += len(winners)
        rows.append(_row(record, regret, flipped))
    yield from ["# How well auto chooses", "", HEAD, ""]
    yield from table(["model", "winners", "best candidate", "regret", "flips", "first call, s"], rows)
    yield ""
    if count:
        share, middle = flips / count, median(regrets)
        yield f"- flip rate at most {MOST_FLIPS:.0%}: **{_met(share <= MOST_FLIPS)}**, {share:.0%} of {count} races."
        yield f"- median regret at most {MOST_REGRET:.0%}: **{_met(middle <= MOST_REGRET)}**, {middle:.1%}."
    if left := len(rows) - len(regrets):
        yield f"- {left} of {len(rows)} models are not among these: a race or a winner failed."


def _met(met: bool) -> str:
    return "met" if met else "missed"


def _row(record: Mapping[str, Any], regret: Interval | None, flipped: float | None) -> list[str]:
    if regret is None:
        return [record["model"], f"{record['status']}: {record['reason']}", "", "", "", ""]
    names = record["names"]
    chosen = Counter(names[winner] for winner in record["winners"])
    winners = ", ".join(f"{name} {times}" for name, times in chosen.most_common())
    figure = f"{regret.median:.1%} [{regret.low:.1%}, {regret.high:.1%}]"
    firsts = number(median(record["first_calls"]), "{:.1f}")
    return [record["model"], winners, names[best_of(record["samples"])], figure, number(flipped, "{:.0%}"), firsts]
