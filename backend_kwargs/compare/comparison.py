"""A comparison: its rows as data, as text and as a page, and `--fail-below`, which judges it."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from backend_kwargs import trial
from backend_kwargs.errors import unknown
from backend_kwargs.facts.decision import EAGER
from backend_kwargs.interval import Interval
from backend_kwargs.options.option import Options
from backend_kwargs.page import document as page
from backend_kwargs.page import figures, fragment, is_loud, noise_of, pays_back, tradeoffs_of
from backend_kwargs.page.figures import (
    between,
    count_of,
    environment_of,
    error_of,
    interval_of,
    measured_on,
    now,
    ratio,
    seconds_of,
)
from backend_kwargs.report import Graph, Race
from backend_kwargs.report.decisions import places_of, race_of, warnings_of
from backend_kwargs.report.document import graph_of, warnings_on
from backend_kwargs.tables import as_text
from backend_kwargs.trial import Accuracy, Status

Mode = Literal["inference", "training"]
Progress = Callable[[str, str, float], None]

VERSION = 1
MEANINGLESS = 0.5  # of an output's size: a larger error is not one of precision
COLUMNS = ("backend", "speedup", "95 %", "latency", "compile", "memory", "graphs", "accuracy", "")
# Labels of candidates that are modes of torch.compile, besides all whose backend is "inductor".
TEMPLATES = ("", ":default", ":cudagraphs", ":max_autotune", ":max_autotune_no_cudagraphs")
MODES = ("default", "inductor", *(f"tmpl-inductor{template}" for template in TEMPLATES))
WITH_MODE = re.compile(r"(tmpl-)?inductor\[mode=[\w-]+\]")
CHEAPEST = "Of the candidates whose intervals overlap the fastest one's, it compiled in the least time."
KINDS: Mapping[str, Literal["output", "gradient"]] = {"output": "output", "gradients": "gradient"}  # by a path's begin
KINDS_OF_ROWS = {trial.GENERATED: "with its wrapper", trial.AROUND: "torch"}
MOST_RESULTS = 5000  # tensors on a page


@dataclass(frozen=True)
class Candidate:
    """One way to run the model: a label, and `torch.compile`'s `backend` (None: eager), `mode` and `options`."""

    label: str
    backend: Callable[..., object] | str | None = None
    mode: str | None = None
    options: Options | None = None


@dataclass
class Row:
    """The result of one candidate; it has a latency if it ran, also with wrong results ("fail_accuracy").

    `graphs` is the number of graphs that its backend compiled: more than 1 means graph breaks. `compile_s` is the time
    of the first call in seconds, `cache` whether Inductor's cache was hit ("warm", "cold", "" if unknown). `samples`
    are seconds per call, `speedup` is over the baseline, and `latency` is that of the baseline divided by it.
    `peak_bytes` is the memory of one call beyond what was allocated before (on CUDA: before the compile). `verdict` is
    "baseline", "within noise" or ""; `tuning` is "tuned" or "untuned" if TVM has kernels, else ""; `report` is the text
    of `bk.report` for a backend of this package, and `made` the graphs of that report, which only a page shows, as it
    does `kernels`: those of one call by time.
    """

    label: str
    backend: str
    status: Status = "pass"
    reason: str = ""
    graphs: int = 0
    compile_s: float | None = None
    cache: str = ""
    latency: Interval | None = None
    speedup: Interval | None = None
    peak_bytes: int | None = None
    accuracy: Accuracy | None = None
    verdict: str = ""
    tuning: str = ""
    samples: list[float] = field(default_factory=list)
    report: str = ""
    made: tuple[Graph, ...] = field(default=(), repr=False)
    kernels: tuple[trial.KernelTime, ...] = field(default=(), repr=False)

    @property
    def passed(self) -> bool:
        """Return whether the backend itself ran it, with right results."""
        return self.status == "pass"

    @property
    def right(self) -> bool:
        """Return whether it ran with right results, on the backend or on a fallback."""
        return self.latency is not None and self.status != "fail_accuracy"


@dataclass
class Comparison:
    """The rows in the order of the candidates, and what is needed to interpret them.

    `noise` is the interval of the baseline against itself, timed twice; None if nothing was timed. `itself` are the
    samples of the model itself, without torch.compile, whether it is a candidate or not. `disturbed` says which timings
    other work has changed, "" if none.
    """

    rows: list[Row]
    environment: dict[str, Any]
    noise: Interval | None
    baseline: str | None
    mode: Mode
    notes: list[str]
    itself: list[float] = field(default_factory=list)
    disturbed: str = ""

    def over_itself(self, row: Row) -> Interval | None:
        """Return a row's speedup over the model itself, None unless that is surely below 1."""
        if not row.samples or len(row.samples) != len(self.itself):
            return None
        ratio = trial.ratio_interval(self.itself, row.samples)
        beyond = self.noise is None or not trial.within_noise(ratio, self.noise)
        return ratio if ratio.high < 1 and beyond else None

    def _repr_html_(self) -> str:
        return fragment(document_of(self, "Comparison"))

    def __str__(self) -> str:
        return "\n".join([as_text(COLUMNS, map(cells, self.rows)), "", *self.reading()])

    def reading(self) -> list[str]:
        """Return the lines that explain the table: where it was measured, and against what."""
        where = f"{self.mode} on {self.environment['device_name']}, torch {self.environment['torch']}"
        base = self.baseline
        over = f"Speedup is over {base}, with the 95 % interval of its median; latency is that of {base} divided by it."
        warm = "warm: Inductor's cache already had the code." if any(row.cache == "warm" for row in self.rows) else ""
        held = any(row.peak_bytes is not None for row in self.rows)
        memory = "Memory is the peak during one call, beyond what was allocated before it." if held else ""
        about = filter(None, ("" if base is None else over, warm, memory, self.disturbed))
        return [where, *about, *self.notes]


def cells(row: Row) -> tuple[str, ...]:
    """Return a row's cells in the order of COLUMNS."""
    speedup = row.speedup if row.latency else None
    return (
        row.label,
        figures.ratio(speedup.median if speedup else None),
        figures.between(speedup),
        figures.duration(row.latency.median if row.latency else None),
        f"{figures.duration(row.compile_s)}{' warm' if row.cache == 'warm' else ''}",
        figures.size(row.peak_bytes),
        str(row.graphs or ""),
        row.status,
        ", ".join(filter(None, (_beyond(row) or row.reason or row.verdict, row.tuning))),
    )


def _beyond(row: Row) -> str:
    """Return the error, the limit and the remedy of a result that is only less precise, or ""."""
    error, bound = (row.accuracy.error, row.accuracy.bound) if row.accuracy else (None, None)
    if row.status != "fail_accuracy" or error is None or bound is None or error > MEANINGLESS:
        return ""
    return f"error {error:.1e}, above the limit {bound:.1e}: raise --max-error to accept it"


def fastest(comparison: Comparison) -> Row | None:
    """Return the row with the highest speedup over the baseline, None if none exceeds the noise.

    Among rows whose intervals overlap the highest one's, it is the one that compiled in the least time. Rows that fell
    back are left out, since their backend did not run.
    """
    able = [row for row in comparison.rows if row.status in ("pass", "unknown") and not row.verdict]
    faster = [(row, row.speedup) for row in able if row.speedup and row.speedup.low > 1]
    if not faster:
        return None
    best = max((speedup for _, speedup in faster), key=lambda speedup: speedup.median)
    return min((row for row, speedup in faster if speedup.high >= best.low), key=lambda row: row.compile_s or 0.0)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain JSON values: seconds, bytes, raw samples, and the version of the layout."""
    return {
        "version": VERSION,
        "environment": comparison.environment,
        "mode": comparison.mode,
        "baseline": comparison.baseline,
        "noise": dataclasses.asdict(comparison.noise) if comparison.noise else None,
        "notes": list(comparison.notes),
        "candidates": [_row_json(row) for row in comparison.rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    spread = {f"p{q}": trial.percentile(row.samples, q / 100) for q in (20, 80)} if row.samples else {}
    fields = dataclasses.asdict(dataclasses.replace(row, made=()))
    del fields["made"], fields["kernels"]
    if row.latency:
        fields["latency"] |= spread
    return fields


# ---- as a page


def document_of(
    comparison: Comparison, title: str, paste: Sequence[str] = (), notes: Sequence[str] = ()
) -> page.Document:
    """Return the page of a comparison; `paste` are the lines that compile with the winner."""
    best = fastest(comparison)
    speedups = page.Speedups(
        over=comparison.baseline or "",
        noise=interval_of(comparison.noise),
        rows=tuple(_row(row, won=row is best) for row in comparison.rows),
    )
    where = comparison.environment
    raced = [*_raced(comparison)]
    return page.Document(
        title=title,
        subtitle=f"{comparison.mode} {measured_on(where)}",
        made=now(),
        by="backend-kwargs compare",
        environment=environment_of(where),
        verdict=verdict_of(comparison, "\n".join(paste)),
        warnings=tuple({each.text: each for each in reversed([*_warnings(comparison)])}.values())[::-1],
        speedups=(speedups, *places_of(raced)),
        races=tuple(race_of(*each) for each in raced),
        tradeoffs=tradeoffs_of(speedups),
        graphs=tuple(_graphs(comparison, best)),
        accuracy=tuple(each for row in comparison.rows for each in _results(row))[:MOST_RESULTS],
        notes=(*notes, *comparison.reading()[1:]),
    )


def speedup_over(row: Row, other: Row) -> Interval | None:
    """Return a row's speedup over another one's, round by round; None unless both were timed."""
    if not row.samples or len(row.samples) != len(other.samples):
        return None
    return trial.ratio_interval(other.samples, row.samples)


def is_mode(row: Row) -> bool:
    """Return whether a candidate is a mode of torch.compile, which a user has without this package."""
    return row.backend == "inductor" or row.label in MODES or bool(WITH_MODE.fullmatch(row.label))


def best_mode(comparison: Comparison, but: Row | None = None) -> Row | None:
    """Return the fastest mode of torch with right results, other than `but`."""
    modes = (row for row in comparison.rows if row is not but and row.right and is_mode(row) and row.latency)
    return min(modes, key=lambda row: row.latency.median if row.latency else 0.0, default=None)


def verdict_of(comparison: Comparison, paste: str = "") -> page.Verdict:
    """Return what to use, with its speedups and costs, and the lines to `paste` for it."""
    best = fastest(comparison)
    if best is None or best.latency is None:
        return page.Verdict(text=_without_winner(comparison), clear=False)
    if itself := comparison.over_itself(best):
        return page.Verdict(
            text=f"Call the model itself: {best.label} is {ratio(itself.median)} as fast ({between(itself)})."
        )
    baseline = next(row for row in comparison.rows if row.label == comparison.baseline)
    mode = best_mode(comparison, best)
    others = [other for other in (mode, baseline) if other and other is not best]
    found = [(other.label, interval_of(speedup_over(best, other))) for other in others]
    ratios, noise = [of for _, of in found if of], comparison.noise
    noisy = any(noise and trial.within_noise(of, noise) for of in ratios)
    accuracy = best.accuracy
    other_s = baseline.latency.median if baseline.latency else None
    calls = pays_back(best.compile_s, best.latency.median, baseline.compile_s or 0.0, other_s)
    return page.Verdict(
        winner=best.label,
        text=CHEAPEST if any(of.low <= 1 for of in ratios) else "",
        clear=not noisy and all(of.low > 1 for of in ratios),
        speedups=tuple({label: page.Speedup(over=label, ratio=of) for label, of in found if of}.values()),
        latency=interval_of(best.latency),
        error=error_of(accuracy.error) if accuracy else None,
        error_bound=error_of(accuracy.bound or accuracy.allowed) if accuracy else None,
        compile_s=seconds_of(best.compile_s),
        pays_back_calls=calls,
        pays_back_over=baseline.label if calls is not None else "",
        peak_bytes=count_of(best.peak_bytes),
        other_peak_bytes=count_of(baseline.peak_bytes),
        other_peak_of=baseline.label if baseline.peak_bytes is not None else "",
        paste=paste,
    )


def _without_winner(comparison: Comparison) -> str:
    """Return what to do where no candidate is surely faster than the baseline."""
    if comparison.baseline is None:
        return "Nothing to use yet: no candidate ran, for the reasons in the table."
    keep, noise = comparison.baseline, comparison.noise
    kept = "Call the model itself" if keep == EAGER else f"Keep {keep}"
    if len(comparison.rows) == 1:
        return f"{kept}: no other candidate was given."
    timed = [(row, row.speedup) for row in comparison.rows if row.passed and row.label != keep and row.speedup]
    if not timed:
        return f"{kept}: no other candidate passed, for the reasons in the table."
    row, of = max(timed, key=lambda each: each[1].median)
    nearest = f"the next, {row.label}, is {ratio(of.median)} as fast ({between(of)})"
    if of.high < 1 and not row.verdict:
        return f"{kept}, which is the fastest: {nearest}."
    first = f"{kept}: nothing is faster beyond the noise; {nearest}."
    if noise is None or not is_loud(noise):
        return first
    return f"{first}\nNot clear: {keep} differs from itself by {between(noise)}. Time it again on an idle machine."


def _warnings(comparison: Comparison) -> Iterator[page.Warned]:
    if others := comparison.environment.get("others"):
        yield page.Warned(text=f"The device is shared: {others}.", kind="shared device")
    yield from noise_of(comparison.baseline or "", comparison.noise)
    if comparison.disturbed:
        yield page.Warned(text=comparison.disturbed, kind="noise")
    for row in comparison.rows:
        if row.status == "fell_back":
            yield page.Warned(text=row.reason, kind="fell back", where=row.label)
        elif row.status == "fail_accuracy":
            yield page.Warned(text=f"wrong results: {row.reason}", kind="failed", where=row.label)
        if row.graphs > 1 and not row.made:
            text = f"It compiled {row.graphs} graphs: the model is broken into parts, or was compiled again."
            yield page.Warned(text=text, kind="break", where=row.label)
        yield from warnings_on(row.made, row.label)
    for race, name in _raced(comparison):
        yield from warnings_of(race, name)


def _row(row: Row, *, won: bool) -> page.Row:
    accuracy = row.accuracy
    return page.Row(
        name=row.label,
        status=row.status,
        reason=row.reason,
        note=", ".join(filter(None, (row.verdict, row.tuning))),
        won=won,
        speedup=interval_of(row.speedup),
        latency=interval_of(row.latency),
        compile_s=seconds_of(row.compile_s),
        cache=row.cache,
        peak_bytes=count_of(row.peak_bytes),
        error=error_of(accuracy.error) if accuracy else None,
        bound=error_of(accuracy.bound or accuracy.allowed) if accuracy else None,
        graphs=row.graphs or None,
    )


def _graphs(comparison: Comparison, best: Row | None) -> Iterator[page.Graph]:
    """Yield the graphs of the winner, or else of the fastest."""
    known = [row for row in comparison.rows if row.made and row.right and row.latency]
    known.sort(key=lambda row: (row is not best, row.latency.median if row.latency else 0.0))
    for row in known[:1]:
        for own in map(graph_of, row.made):
            yield msgspec.structs.replace(own, backend=row.label, kernels=_kernels(row, own) or own.kernels)


def _kernels(row: Row, graph: page.Graph) -> tuple[page.Kernel, ...]:
    """Return the kernels of a call by time, which are those of its graph if it has only one."""
    kinds = {kernel.name: kernel.kind for kernel in graph.kernels} | KINDS_OF_ROWS
    return tuple(
        page.Kernel(
            name=each.name, kind=kinds.get(each.name, "library"), seconds=seconds_of(each.seconds), calls=each.calls
        )
        for each in row.kernels
        if len(row.made) == 1
    )


def _raced(comparison: Comparison) -> Iterator[tuple[Race, str]]:
    """Yield the races of `auto`, each with the name of its graph."""
    for row in comparison.rows:
        for graph in row.made:
            if graph.race and graph.race.rows:
                yield graph.race, f"{row.label}, graph {graph.compile_id}"


def _results(row: Row) -> Iterator[page.Result]:
    """Yield each tensor that was checked, the nearest to its bound first."""
    leaves = row.accuracy.leaves if row.accuracy else ()
    for leaf in sorted(leaves, key=lambda leaf: (leaf.passed, -(leaf.error or 0.0) / (leaf.bound or 1.0))):
        begins = leaf.name.partition("[")[0].partition(".")[0]
        yield page.Result(
            name=leaf.name,
            kind=KINDS.get(begins, "buffer"),
            candidate=row.label,
            error=error_of(leaf.error),
            bound=error_of(leaf.bound),
            passed=leaf.passed,
            reason="" if leaf.passed else row.reason,
        )


# ---- `--fail-below`

DEFAULT = "default"  # as `--fail-below` calls torch.compile without a mode
DEFAULTS = ("default", "inductor", "tmpl-inductor", "tmpl-inductor:default")  # candidates that are that


@dataclass(frozen=True, slots=True)
class Judged:
    """Whether the lower end of the interval reaches the limit, and the sentence that says so."""

    passed: bool
    text: str


def label_of(over: str, labels: Sequence[str]) -> str:
    """Return the label of what `over` names, DEFAULT if no candidate is that; raise for another name."""
    if over in labels:
        return over
    if over == DEFAULT:
        return next((label for label in DEFAULTS if label in labels), DEFAULT)
    raise unknown("name of --fail-below", over, [*labels, DEFAULT], otherwise="It is one of --backends, or 'default'.")


def judge(comparison: Comparison, over: str, least: float) -> Judged:
    """Judge the fastest candidate with right results, other than eager and `over`, by its speedup over `over`."""
    rows = {row.label: row for row in comparison.rows}
    if not rows[over].samples:
        return Judged(False, f"{over} was not timed ({rows[over].status}), so that no speedup over it can be judged.")
    ran = (row for row in comparison.rows if row.status in ("pass", "unknown") and row.samples)
    able = [row for row in ran if row.backend != "eager" and row.label != over]
    fastest = min(able, key=lambda row: row.latency.median if row.latency else 0.0, default=None)
    speedup = speedup_over(fastest, rows[over]) if fastest else None
    if fastest is None or speedup is None:
        return Judged(False, f"No candidate besides {over} and eager passed, so that no speedup can be judged.")
    passed = speedup.low >= least
    limit = f"at least {least:g}x is asked for" if passed else f"its lower end is below {least:g}x"
    return Judged(passed, f"{fastest.label} is {speedup.as_ratio(3)} over {over}: {limit}.")
