"""The records of the held-out models: which are done, their ratios, and the bars, each met or missed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from backend_kwargs import trial
from backend_kwargs.files import write_whole
from backend_kwargs.trial import Interval
from benchmarks.analysis.markdown import number, short, table
from benchmarks.execution.ways import AGAIN, BASELINES, CLONE, FULL_S, RAW, WAYS
from benchmarks.workloads.held_out import HeldOut

AUTO, FULL, DEFAULT = "auto", "auto-full", "default"
CLONED, RAW_GRADIENTS = f"reduce-overhead{CLONE}", f"reduce-overhead{RAW}"
LEAST, MEAN, FULL_LEAST, FULL_MEAN = 0.97, 1.05, 0.99, 1.10
MOST_OF_THEM, MOST_MORE_S, MORE_S, FIVE_GRAPHS_S = 0.75, 5.0, 10.0, 30.0
RAW_SINCE = (2, 13)  # the release since which auto's gradients need no copy

HEAD = """\
# Real models that nothing was tuned on

Wall time of a call in a loop that holds its result until the next one has returned; a training step drops its gradients
before the next. Each way is compiled in a process of its own with empty caches, on cores of its own, and the processes
of a model are timed in turn. Results of modes with CUDA graphs are cloned, and so are gradients unless "raw". "Best" is
the fastest of default, reduce-overhead and max-autotune that was tried, the last two cloned, and x is the speedup over
it, with its 95 % interval: above 1 is faster. All results were compared with eager's and with float64's first."""


@dataclass(frozen=True, slots=True)
class Records:
    """The content of a file of records."""

    environments: Sequence[Mapping[str, Any]] = ()
    compiles: Sequence[Mapping[str, Any]] = ()
    checks: Sequence[Mapping[str, Any]] = ()
    timings: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, path: Path) -> "Records":
        """Read a file, which need not exist; a line that an interrupted run has cut is left out."""
        found: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in ("environment", "compile", "check", "timing")}
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            found.get(record.get("record"), []).append(record)
        return cls(*found.values())

    def of(self, kind: str, model: str, way: str) -> list[Mapping[str, Any]]:
        """Return the records of one compile or check, oldest first."""
        return [each for each in getattr(self, kind) if (each["model"], each["way"]) == (model, way)]

    def compiled(self, model: str, way: str) -> bool:
        """Return whether the first call is known."""
        return any(each["status"] == "pass" for each in self.of("compiles", model, way))

    def failed(self, model: str, way: str) -> bool:
        """Return whether the latest try has failed, which is final."""
        tries = self.of("compiles", model, way)
        return bool(tries) and tries[-1]["status"] != "pass"

    def done(self, model: str, ways: Sequence[str]) -> bool:
        """Return whether one timing has all ways of a model, except those that failed."""
        needed = {way for way in ways if not self.failed(model, way)}
        return any(each["model"] == model and needed <= {*each["ways"]} for each in self.timings)


@dataclass(frozen=True)
class Model:
    """One model with what is known of it: samples by call, from its latest timing."""

    row: HeldOut
    records: Records
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, row: HeldOut, records: Records) -> "Model":
        """Return a model with its timing of the most ways, the latest of these."""
        timings = sorted((t for t in records.timings if t["model"] == row.name), key=lambda t: len(t["ways"]))
        return cls(row, records, timings[-1]["samples"] if timings and timings[-1]["rounds"] else {})

    def right(self, call: str) -> bool:
        """Return whether a call was timed and its results were right."""
        checks = self.records.of("checks", self.row.name, way_of(call))
        return call in self.samples and bool(checks) and checks[-1]["status"] == "pass"

    def ms(self, call: str) -> float | None:
        """Return the median of a call in milliseconds."""
        return median(self.samples[call]) * 1e3 if self.right(call) else None

    @cached_property
    def best(self) -> str:
        """The fastest mode whose results stay, of those that were tried; "" unless default and CUDA graphs were."""
        tried = all(self.right(call) or self.why_not(way_of(call)) for call in BASELINES[:2])
        timed = {call: median(self.samples[call]) for call in BASELINES if self.right(call)}
        return min(timed, key=lambda call: timed[call]) if timed and tried else ""

    def over(self, call: str, other: str) -> Interval | None:
        """Return the speedup of a call over another one, None if one of them has no time."""
        if not (self.right(call) and self.right(other)):
            return None
        return trial.ratio_interval(self.samples[other], self.samples[call])

    def over_best(self, call: str) -> float | None:
        """Return the speedup of a call over the best mode."""
        found = self.over(call, self.best)
        return found.median if found else None

    def first_s(self, way: str) -> float | None:
        """Return the seconds of the first call with empty caches."""
        found = [each for each in self.records.of("compiles", self.row.name, way) if each["status"] == "pass"]
        return next((float(each["first_call_s"]) for each in reversed(found) if each["cold"]), None)

    def why_not(self, way: str) -> str:
        """Return why a way has no time, "" if it has or was not tried."""
        for kind in ("checks", "compiles"):
            if (found := self.records.of(kind, self.row.name, way)) and found[-1]["status"] != "pass":
                return f"{found[-1]['status']}: {found[-1]['reason']}"
        return ""

    def won(self, way: str) -> str:
        """Return the winners of a way's races, each once."""
        found = [each for each in self.records.of("compiles", self.row.name, way) if each.get("races")]
        return ", ".join(dict.fromkeys(race["winner"] for race in found[-1]["races"])) if found else ""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its text, its figure, whether it is met (None: nothing was measured), and on how many models."""

    text: str
    figure: str
    met: bool | None
    count: int
    of: int

    def __str__(self) -> str:
        word = {True: "met", False: "missed", None: "not measured"}[self.met]
        part = "" if self.count == self.of else f" (on {self.count} of {self.of} models)"
        return f"- {self.text}: **{word}**{f', {self.figure}' if self.figure else ''}{part}."


def way_of(call: str) -> str:
    """Return the way that a call belongs to."""
    return DEFAULT if call == AGAIN else call.partition("+")[0]


def read_models(path: Path, rows: Sequence[HeldOut]) -> list[Model]:
    """Return these models, with what a file holds of them."""
    records = Records.read(path)
    return [Model.of(row, records) for row in rows]


# ---- the bars


def bars(models: Sequence[Model], torch_version: str) -> list[Bar]:
    """Judge the bars of the issue."""
    return [*_of_speed(models), *_of_first_calls(models), *_of_kinds(models, torch_version)]


def _of_speed(models: Sequence[Model]) -> Iterator[Bar]:
    for call, words, least, mean in (
        (AUTO, "default settings", LEAST, MEAN),
        (FULL, f'effort="full", budget_s={FULL_S:.0f}', FULL_LEAST, FULL_MEAN),
    ):
        found = {of.row.name: ratio for of in models if (ratio := of.over(call, of.best))}
        ratios = {name: ratio.median for name, ratio in found.items()}
        below = [f"{name} {_ratio(ratio)}" for name, ratio in found.items() if ratio.high < least]
        figure = ", ".join(below) or (f"the least is {min(ratios.values()):.3f}x" if ratios else "")
        count = len(ratios), len(models)
        met = not below if ratios else None
        yield Bar(f"{words}, no interval below {least}x of the best mode", figure, met, *count)
        whole = geometric_mean(ratios.values()) if ratios else None
        met = None if whole is None else whole >= mean
        yield Bar(f"{words}, geometric mean at least {mean:.2f}x", number(whole, "{:.3f}x"), met, *count)


def _of_first_calls(models: Sequence[Model]) -> Iterator[Bar]:
    pairs = {of.row.name: (of.first_s(AUTO), of.first_s(DEFAULT)) for of in models}
    more = {name: auto - default for name, (auto, default) in pairs.items() if auto and default}
    middle = sorted(more.values())[int(MOST_OF_THEM * len(more))] if more else None
    figure, met = number(middle, "{:+.1f} s"), None if middle is None else middle <= MOST_MORE_S
    text = f"first call, at most default's and {MOST_MORE_S:.0f} s for {MOST_OF_THEM:.0%} of them"
    yield Bar(text, figure, met, len(more), len(models))
    text = f"first call, at most default's and {MORE_S:.0f} s for all"
    above = [f"{name} {each:+.1f} s" for name, each in more.items() if each > MORE_S]
    figure = ", ".join(above) or (f"at most {max(more.values()):+.1f} s" if more else "")
    yield Bar(text, figure, not above if more else None, len(more), len(models))


def _of_kinds(models: Sequence[Model], torch_version: str) -> Iterator[Bar]:
    raw = tuple(int(part) for part in torch_version.split("+", maxsplit=1)[0].split(".")[:2]) >= RAW_SINCE
    other, words = (RAW_GRADIENTS, "raw gradients") if raw else (CLONED, "gradients cloned")
    training = [of for of in models if of.row.training]
    ratios = {of.row.name: found.median for of in training if (found := of.over(AUTO, other))}
    figure = ", ".join(f"{name} {ratio:.3f}x" for name, ratio in ratios.items())
    met = all(ratio >= LEAST for ratio in ratios.values()) if ratios else None
    text = f"training steps, at least {LEAST}x of reduce-overhead with {words}"
    yield Bar(text, figure, met, len(ratios), len(training))
    several = [of for of in models if of.row.kind == "graphs"]
    for of in several:
        seconds, ratio = of.first_s(AUTO), of.over_best(AUTO)
        met = None if seconds is None or ratio is None else seconds <= FIVE_GRAPHS_S and ratio >= LEAST
        figure = f"{number(seconds, '{:.1f} s')}, {number(ratio, '{:.3f}x')}" if met is not None else ""
        text = f"{of.row.name} of {of.row.graphs} graphs, first call at most {FIVE_GRAPHS_S:.0f} s, at least {LEAST}x"
        yield Bar(text, figure, met, 1, 1)


# ---- the page


def page(models: Sequence[Model], environments: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page: the bars, the loops, the first calls, what copies take, and what failed."""
    about = environments[-1] if environments else {}
    said = (f"{name} {value}" for name, value in about.items() if name != "record" and value not in (None, ""))
    yield from [HEAD, "", ", ".join(said), ""]
    yield from ["## Bars", "", *map(str, bars(models, str(about.get("torch", "0.0"))))]
    yield from ["", "## Loops, medians in ms", ""]
    calls = ("eager", *BASELINES, AUTO, FULL)
    yield from table(["model", *calls[:-2], "best", AUTO, "x best", FULL, "x best"], [_loop(of) for of in models])
    yield from ["", "## First calls with empty caches, in seconds", ""]
    ways = [way for way in WAYS if way != "eager"]
    yield from table(["model", *ways, "auto kept", "auto-full kept"], [_first(of, ways) for of in models])
    yield from ["", "## Training steps, medians in ms: what copies take", ""]
    head = ["model", "gradients cloned", "raw", "copies", AUTO, "x cloned", "x raw"]
    yield from table(head, [_training(of) for of in models if of.row.training])
    yield from ["", *_models_and_failures(models)]


def _loop(of: Model) -> list[str]:
    times = [number(of.ms(call), "{:.3f}") for call in ("eager", *BASELINES)]
    mine = [each for call in (AUTO, FULL) for each in (number(of.ms(call), "{:.3f}"), _ratio(of.over(call, of.best)))]
    return [of.row.name, *times, of.best, *mine]


def _first(of: Model, ways: Sequence[str]) -> list[str]:
    return [of.row.name, *(number(of.first_s(way), "{:.1f}") for way in ways), of.won(AUTO), of.won(FULL)]


def _ratio(found: Interval | None) -> str:
    return f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}]" if found else ""


def _training(of: Model) -> list[str]:
    cloned, raw = of.ms(CLONED), of.ms(RAW_GRADIENTS)
    copies = None if cloned is None or raw is None else cloned - raw
    times = [number(each, "{:.3f}") for each in (cloned, raw, copies, of.ms(AUTO))]
    return [of.row.name, *times, *(_ratio(of.over(AUTO, other)) for other in (CLONED, RAW_GRADIENTS))]


def _models_and_failures(models: Sequence[Model]) -> Iterator[str]:
    again = [found for of in models if (found := of.over(AGAIN, DEFAULT))]
    if again:
        apart = max(abs(found.median - 1) for found in again)
        yield f"- default beside itself, timed in the same process: at most {apart:.1%} apart."
    for of in models:
        yield f"- {of.row.name}: {of.row.what} ({of.row.kind})." + ("" if of.samples else " Not timed.")
        for way in WAYS:
            if why := of.why_not(way):
                yield f"  - {way}: {short(why, 200)}"


def write_page(records: Path, out: Path, rows: Sequence[HeldOut]) -> None:
    """Write the page of a file of records of these models."""
    write_whole(out, "\n".join(page(read_models(records, rows), Records.read(records).environments)) + "\n")
