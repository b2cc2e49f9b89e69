"""The page of compilers on one CPU thread: speedups on whole models, and those of `auto` over the best of them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from backend_kwargs import trial
from backend_kwargs.files.atomic_write import write_whole
from backend_kwargs.interval import Interval

EAGER, UNTUNED, TUNED = "eager", "tmpl-tvm", "tmpl-tvm, tuned"
SINGLES = ("default", "freezing", "max_autotune+freezing", UNTUNED, "openvino-native", "onnxruntime")
AUTO, AUTO_BF16 = "auto", "auto, bf16"
PAGE = "compilers.md"
LEFT = "fell_back"  # the status of a candidate whose graph runs in eager
LEAST_AUTO, LEAST_BF16, LEAST_UNTUNED, LEAST_TUNED = 0.97, 1.4, 0.9, 1.0
READING = """\
Inference in a plain loop, `out = model(x)`, one thread each, random weights. Each candidate's results were checked on
fresh inputs before and after timing; the rounds are interleaved. A figure is the median of eager's time over the
candidate's in the same round, with its bootstrap 95 % interval. `auto` has `freezing=True` and races the other
compilers; `auto, bf16` also has `precision=("bf16",)` and `max_error=1e-2`, and races OpenVINO and ONNX Runtime. What
each raced is below. `tmpl-tvm` is untuned, its parameters are not frozen."""


@dataclass(frozen=True, eq=False)
class Measured:
    """The record of one model's process, and what was timed in it."""

    record: Mapping[str, Any]

    @property
    def model(self) -> str:
        """Return the model's name."""
        return str(self.record["model"])

    @cached_property
    def rows(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the rows by label."""
        candidates = self.record.get("comparison", {}).get("candidates", ())
        return {row["label"]: row for row in candidates}

    def why_not(self, label: str) -> str:
        """Return why a candidate has no valid figure, or ""."""
        lacking = self.record.get("lacking", {}).get(label)
        row = self.rows.get(label)
        if lacking or row is None:
            return lacking or self.record.get("reason") or "not measured"
        accuracy = row["accuracy"] or {}
        # A tuned graph may run in eager: that is a result of tuning, not a failure.
        if row["status"] not in (("pass", LEFT) if label == TUNED else ("pass",)) or not row["samples"]:
            return f"{row['status']}: {row['reason']}".rstrip(": ")
        if label != AUTO_BF16 and accuracy.get("bound") is not None:
            return f"fail_accuracy: error {accuracy['error']:.1e}"
        return ""

    def over(self, label: str, base: str = EAGER) -> Interval | None:
        """Return the speedup of a candidate over another, paired by rounds, or None if one was not measured."""
        if self.why_not(label) or self.why_not(base):
            return None
        return trial.ratio_interval(self.rows[base]["samples"], self.rows[label]["samples"])

    @property
    def best(self) -> str:
        """Return the fastest single compiler, or eager if none ran."""
        timed = {label: over.median for label in SINGLES if (over := self.over(label))}
        return max(timed, key=lambda label: timed[label], default=EAGER)


def read(folder: Path) -> tuple[list[Measured], list[Measured]]:
    """Return the records of a folder: of races, and of tuned kernels."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found = [Measured(record) for record in records if record.get("kind") in ("race", "tuned")]
    return [m for m in found if m.record["kind"] == "race"], [m for m in found if m.record["kind"] == "tuned"]


def picked_for_all(races: Sequence[Measured]) -> tuple[str, float]:
    """Return the single compiler with the largest geometric mean over all models; if it fails on one, eager counts."""
    means = {
        label: geometric_mean([over.median if (over := race.over(label)) else 1.0 for race in races])
        for label in SINGLES
    }
    best = max(means, key=lambda label: means[label])
    return best, means[best]


def write_page(folder: Path) -> None:
    """Write the page of all records in the folder."""
    races, tuned = read(folder)
    write_whole(folder / PAGE, page(races, tuned))


def page(races: Sequence[Measured], tuned: Sequence[Measured]) -> str:
    """Return the tables and the goals, as Markdown."""
    commands = dict.fromkeys(str(each.record["command"]) for each in (*races, *tuned))
    return "\n".join(
        [
            "# Compilers on one CPU thread",
            "",
            *_where(races or tuned),
            READING,
            "",
            *_speedups(races),
            "",
            "## Bars",
            "",
            *_bars(races, tuned),
            "",
            "## What failed",
            "",
            *(_failures([*races, *tuned]) or ["Nothing."]),
            "",
            "## What `auto` chose",
            "",
            *_choices(races),
            "",
            "## Commands",
            "",
            *(f"    {command}" for command in commands),
            "",
        ]
    )


def _where(measured: Sequence[Measured]) -> list[str]:
    found = next((each.record["comparison"]["environment"] for each in measured if each.rows), None)
    return [f"{found['cpu']}, torch {found['torch']}, Python {found['python']}.", ""] if found else []


def _shown(over: Interval | None) -> str:
    return f"{over.median:.2f}x [{over.low:.2f}, {over.high:.2f}]" if over else "-"


def _speedups(races: Sequence[Measured]) -> list[str]:
    labels = [*SINGLES, AUTO, AUTO_BF16]
    lines = [f"| over eager | {' | '.join(race.model for race in races)} |", f"|---|{'---|' * len(races)}"]
    lines += [f"| `{label}` | {' | '.join(_shown(race.over(label)) for race in races)} |" for label in labels]
    lines.append(f"| eager, ms | {' | '.join(_milliseconds(race) for race in races)} |")
    lines.append(f"| error of `{AUTO_BF16}` | {' | '.join(_error(race) for race in races)} |")
    return lines


def _milliseconds(race: Measured) -> str:
    return "-" if race.why_not(EAGER) else f"{race.rows[EAGER]['latency']['median'] * 1e3:.3g}"


def _error(race: Measured) -> str:
    accuracy = (race.rows.get(AUTO_BF16) or {}).get("accuracy") or {}
    return f"{accuracy['error']:.1e}" if accuracy.get("error") is not None else "-"


def _bars(races: Sequence[Measured], tuned: Sequence[Measured]) -> list[str]:
    lines = ["| model | best single | `auto` over it | `auto, bf16` over it | `auto, bf16` over `auto` |"]
    lines.append("|---|---|---|---|---|")
    for race in races:
        ratios = (race.over(AUTO, race.best), race.over(AUTO_BF16, race.best), race.over(AUTO_BF16, AUTO))
        lines.append(f"| {race.model} | {race.best} | {' | '.join(map(_shown, ratios))} |")
    over_best = [race.over(AUTO, race.best) for race in races]
    least = _judged(_medians(over_best), LEAST_AUTO, min)
    lines += ["", f"- `auto` over the best single one, least of all models: {least}", *_gain(races)]
    over_best = [race.over(AUTO_BF16, race.best) for race in races]
    mean = _judged(_medians(over_best), LEAST_BF16, geometric_mean)
    lines.append(f"- `auto, bf16` over the best single one, geometric mean: {mean}")
    over_auto = _medians(race.over(AUTO_BF16, AUTO) for race in races)
    lines.append(f"- `auto, bf16` over `auto`, geometric mean: {_judged(over_auto, LEAST_BF16, geometric_mean)}")
    untuned = _medians(race.over(UNTUNED) for race in races)
    lines.append(f"- TVM untuned over eager, least of all models: {_judged(untuned, LEAST_UNTUNED, min)}")
    return lines + (_tuned(tuned) if tuned else [])


def _gain(races: Sequence[Measured]) -> list[str]:
    """Return `auto`'s gain over the best single compiler picked for all."""
    raced = {race: over.median for race in races if (over := race.over(AUTO))}
    if not raced:
        return []
    name, mean = picked_for_all([*raced])
    own = geometric_mean(raced.values())
    picked = f"the best single one picked for all, `{name}`: {mean:.2f}x"
    return [f"- `auto` over eager: {own:.2f}x; {picked}. So `auto` gains {own / mean:.2f}x (geometric means)."]


def _tuned(tuned: Sequence[Measured]) -> list[str]:
    least = _judged(_medians(each.over(TUNED) for each in tuned), LEAST_TUNED, min)
    lines = [f"- TVM tuned over eager, least of all models: {least}", ""]
    lines += ["| model | tuned for | untuned over eager | tuned over eager | faster tuned |", "|---|---|---|---|---|"]
    for each in tuned:
        faster = {"pass": "TVM", LEFT: "eager"}.get(each.rows.get(TUNED, {}).get("status", ""), "-")
        ratios = f"{_shown(each.over(UNTUNED))} | {_shown(each.over(TUNED))} | {faster}"
        lines.append(f"| {each.model} | {each.record['tune_s']:.0f} s | {ratios} |")
    return lines


def _medians(ratios: Iterable[Interval | None]) -> list[float]:
    return [ratio.median for ratio in ratios if ratio]


def _judged(values: Sequence[float], least: float, figure: Callable[[Sequence[float]], float]) -> str:
    if not values:
        return "not measured."
    found = figure(values)
    met = "met" if found >= least else "not met"
    return f"{found:.2f}x over {len(values)} models; the goal of {least:g}x is {met}."


def _failures(measured: Sequence[Measured]) -> list[str]:
    lines = []
    for each in measured:
        labels = (EAGER, *SINGLES, AUTO, AUTO_BF16) if each.record["kind"] == "race" else (EAGER, UNTUNED, TUNED)
        lines += [f"- {each.model}, `{label}`: {why}" for label in labels if (why := each.why_not(label))]
    return lines


def _choices(races: Sequence[Measured]) -> list[str]:
    lines = []
    for race in races:
        for label in (AUTO, AUTO_BF16):
            if text := (race.rows.get(label) or {}).get("report"):
                lines += [f"### {race.model}, {label}", "", "```text", text.strip(), "```", ""]
    return lines[:-1]
