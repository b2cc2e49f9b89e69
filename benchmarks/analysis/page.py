"""Results as the page that `compare` and `tune` write too: one verdict over all cases, then each case."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from backend_kwargs.facts.decision import Decision, RaceRow
from backend_kwargs.files import write_whole
from backend_kwargs.page import changes, pays_back, read_document, to_html
from backend_kwargs.page import document as page
from backend_kwargs.page.figures import count_of, duration, environment_of, error_of, interval_of, seconds_of
from backend_kwargs.page.figures import ratio as ratio_text
from backend_kwargs.report.decisions import graph_of, race_of
from backend_kwargs.trial import Interval
from benchmarks.analysis import verdicts
from benchmarks.analysis.report import check_alike, tables_of
from benchmarks.analysis.verdicts import Entry, Key, clock_name
from benchmarks.execution import records
from benchmarks.execution.controls import BASELINE
from benchmarks.execution.records import Results

ALL = "All cases"
USABLE = ("mode", "clone", "template", "auto")  # kinds of peers among which a user chooses
MODE_KINDS = ("mode", "clone")
MOST_CASES = 0.8  # what passes in fewer is not named beside the winner
BEST_MODE = "the fastest mode of torch for each case"
SHOWN = ("torch", "device_name", "cuda", "triton", "driver", "cpu", "cpus", "python", "backend_kwargs", "revision")
RULE = (
    "The winner is the fastest of those that pass in every case and whose results stay: without CUDA graphs, or "
    "with results copied, by the caller where a name ends in +clone. The next call overwrites those of the "
    "others. Means are geometric, over the cases that a peer passes, as many as its note says; their intervals "
    "cover the measurement, not the choice of cases. Peers of one case may be of several processes: they are "
    "compared by their speedups over eager, each in its own. The winner of a case is, among those whose intervals "
    "overlap the fastest one's, the one that compiles in the least time."
)
NONE_FITS = "No backend passes in every case with results that stay: use the winner of each case, below."
CLOCK = "{clock}, medians with 95 % intervals; of several compiles, their median. The band is eager timed twice."


def write_page(files: Sequence[Path], out: Path, *, against: Path | None = None) -> None:
    """Write result files of one device and one torch as a page; raise as `write_report` does."""
    import msgspec

    old = read_document(against) if against else None
    document = document_of(records.read(*files))
    if old:
        document = msgspec.structs.replace(document, changes=changes(old, document))
    write_whole(out, to_html(document))


def document_of(results: Results) -> page.Document:
    """Return results of one device and one torch as a document."""
    check_alike(results)
    clock, tables = next(iter(tables_of(results).items()))
    shown = {what: [entry for entry in table if entry.cell.kind != "control"] for what, table in tables.items()}
    where = results.environments[-1]
    means = _means([*shown.values()])
    best = _best(means)
    decided = [*_decided(shown)]
    return page.Document(
        title=f"Benchmarks on {where['device_name']}",
        subtitle=f"{len(shown)} cases, torch {where['torch']}",
        made=str(max((each.get("time", "") for each in results.environments), default="")),
        by="python -m benchmarks",
        environment=environment_of({name: where.get(name) for name in SHOWN}),
        verdict=_verdict(best, means, shown),
        warnings=tuple(_warnings(means, shown)),
        speedups=(_overview(means, best), *(_case(what, table) for what, table in shown.items())),
        races=tuple(race_of(decision, decision.facts) for _, decision in decided),
        tradeoffs=_tradeoffs(means, best),
        graphs=tuple(_graph(entry, decision) for entry, decision in decided),
        notes=(CLOCK.format(clock=clock_name(clock, shown)),),
    )


# ---- one peer over all cases


class Mean:
    """A peer over the cases that it passes: its geometric mean over eager, and medians of its costs."""

    def __init__(self, entries: Sequence[Entry], cases: int) -> None:
        self.entries, self.cases, self.cell = entries, cases, entries[0].cell
        self.passed = [entry for entry in entries if entry.cell.passed and "eager" in entry.speedups]
        self.speedup = mean_of([entry.speedups["eager"] for entry in self.passed])
        self.compile_s = records.middle([entry.cold_s for entry in self.passed])
        self.peak_bytes = records.middle([entry.peak_bytes for entry in self.passed])

    @property
    def usable(self) -> bool:
        """Whether its results stay, and it passes in every case."""
        return self.cell.kind in USABLE and stays(self.cell) and len(self.passed) == self.cases


def stays(cell: records.Cell) -> bool:
    """Return whether the next call does not overwrite a peer's results."""
    return cell.kind == "clone" or not (cell.options.get("triton.cudagraphs") or cell.kind == "graph")


def mean_of(found: Sequence[Interval]) -> Interval | None:
    """Return the geometric mean of speedups, with their intervals combined as independent measurements."""
    if not found:
        return None
    middle = math.exp(sum(math.log(each.median) for each in found) / len(found))
    low = math.hypot(*(math.log(each.median / each.low) for each in found)) / len(found)
    high = math.hypot(*(math.log(each.high / each.median) for each in found)) / len(found)
    return Interval(middle, middle * math.exp(-low), middle * math.exp(high))


def _means(tables: Sequence[Sequence[Entry]]) -> list[Mean]:
    by_peer: dict[str, list[Entry]] = {}
    for entry in (entry for table in tables for entry in table):
        if entry.cell.peer != BASELINE:
            by_peer.setdefault(entry.cell.peer, []).append(entry)
    return [Mean(entries, len(tables)) for entries in by_peer.values()]


def _best(means: Sequence[Mean]) -> Mean | None:
    usable = (mean for mean in means if mean.usable and mean.speedup)
    return max(usable, key=lambda mean: mean.speedup.median, default=None)


def _overview(means: Sequence[Mean], best: Mean | None) -> page.Speedups:
    rows = (
        page.Row(
            name=mean.cell.peer,
            note=f"{len(mean.passed)} of {mean.cases} cases" + ("" if stays(mean.cell) else ", results overwritten"),
            won=mean is best,
            speedup=interval_of(mean.speedup),
            compile_s=seconds_of(mean.compile_s),
            peak_bytes=count_of(mean.peak_bytes),
        )
        for mean in means
        if mean.speedup
    )
    return page.Speedups(title=ALL, over=BASELINE, rows=tuple(rows), note=RULE)


def _verdict(best: Mean | None, means: Sequence[Mean], tables: Mapping[Key, Sequence[Entry]]) -> page.Verdict:
    """Return the verdict: the peer with the highest mean over eager, beside the best mode of each case."""
    if best is None:
        return page.Verdict(text=NONE_FITS, clear=False)
    mine = {verdicts.key(entry.cell): entry for entry in best.passed}
    over_mode = mean_of([ratio for what, entry in mine.items() if (ratio := _over_best_mode(entry, tables[what]))])
    over_default = mean_of([entry.speedups["default"] for entry in best.passed if "default" in entry.speedups])
    found = [(verdicts.DEFAULT, over_default), (BASELINE, best.speedup)]
    peer, remarks = best.cell.peer, []
    if best.cell.kind not in MODE_KINDS:
        found.insert(0, (BEST_MODE, over_mode))
    elif over_mode and over_mode.high < 1:
        remarks.append(
            f"{peer} is {ratio_text(over_mode.median)} as fast as {BEST_MODE}, which takes timing all of them."
        )
    remarks += [*_faster_elsewhere(best, means), "Costs are medians over the cases."]
    calls = _calls_to_pay_back(best)
    return page.Verdict(
        winner=peer,
        text=" ".join(remarks),
        clear=all(ratio.low > 1 for _, ratio in found if ratio),
        speedups=tuple(page.Speedup(over=over, ratio=ratio) for over, ratio in found if ratio and over != peer),
        compile_s=seconds_of(best.compile_s),
        pays_back_calls=calls,
        pays_back_over=BASELINE if calls is not None else "",
        peak_bytes=count_of(best.peak_bytes),
        paste=_paste(best.cell),
    )


def _calls_to_pay_back(best: Mean) -> int | None:
    """Return the median of the calls that pay back a compile against eager; None if in most cases none do."""
    found = []
    for entry in best.passed:
        if entry.time and entry.cold_s is not None:
            own, eager = entry.time.median, entry.time.median * entry.speedups["eager"].median
            calls = pays_back(entry.cold_s, own, 0.0, eager)
            found.append(math.inf if calls is None else calls)
    middle = median(found) if found else math.inf
    return math.ceil(middle) if math.isfinite(middle) else None


def _faster_elsewhere(best: Mean, means: Sequence[Mean]) -> Iterator[str]:
    """Yield what is surely faster than the winner in the cases that it passes, which are most but not all."""
    own = {verdicts.key(entry.cell): entry.speedups["eager"] for entry in best.passed}
    for mean in means:
        could = mean.cell.kind in USABLE and stays(mean.cell) and MOST_CASES <= len(mean.passed) / mean.cases < 1
        there = mean_of([own[verdicts.key(entry.cell)] for entry in mean.passed]) if could else None
        if there and mean.speedup and mean.speedup.low > there.high:
            yield (
                f"{mean.cell.peer} is faster in the {len(mean.passed)} of {mean.cases} cases that it passes: "
                f"{ratio_text(mean.speedup.median)} as fast as {BASELINE}, there {ratio_text(there.median)}."
            )


def _paste(cell: records.Cell) -> str:
    if cell.kind == "mode" and cell.peer != verdicts.DEFAULT:
        return f'torch.compile(model, mode="{cell.peer}")'
    return f'torch.compile(model, backend="{cell.peer}")' if cell.peer.startswith("tmpl-") else ""


def _over_best_mode(entry: Entry, table: Sequence[Entry]) -> Interval | None:
    """Return the speedup over the fastest mode whose results stay, by both speedups over eager."""
    modes = [
        of.speedups["eager"] for of in table if of.cell.kind in MODE_KINDS and stays(of.cell) and "eager" in of.speedups
    ]
    if not modes or "eager" not in entry.speedups:
        return None
    mode, own = max(modes, key=lambda ratio: ratio.median), entry.speedups["eager"]
    down, up = (math.hypot(math.log(a), math.log(b)) for a, b in _spreads(own, mode))
    middle = own.median / mode.median
    return Interval(middle, middle * math.exp(-down), middle * math.exp(up))


def _spreads(own: Interval, other: Interval) -> tuple[tuple[float, float], tuple[float, float]]:
    return (
        (own.median / own.low, other.high / other.median),
        (own.high / own.median, other.median / other.low),
    )


def _warnings(means: Sequence[Mean], tables: Mapping[Key, Sequence[Entry]]) -> Iterator[page.Warned]:
    for mean in means:
        failed = [entry.cell for entry in mean.entries if entry.cell.status not in ("pass", "unavailable")]
        if failed:
            cases = ", ".join(f"{verdicts.name(cell)} ({cell.status})" for cell in failed)
            yield page.Warned(text=f"does not pass on {cases}", kind="failed", where=mean.cell.peer)
    loud = [verdicts.name(table[0].cell) for table in tables.values() if 1.1 < table[0].noise.high < math.inf]
    if loud:
        text = f"Eager differs from itself by more than 10 % on {', '.join(loud)}."
        yield page.Warned(text=text, kind="noise")


def _tradeoffs(means: Sequence[Mean], best: Mean | None) -> page.Tradeoffs | None:
    points = tuple(
        page.Point(
            name=mean.cell.peer,
            time=1 / mean.speedup.median,
            compile_s=seconds_of(mean.compile_s),
            peak_bytes=count_of(mean.peak_bytes),
            won=mean is best,
        )
        for mean in means
        if mean.speedup and len(mean.passed) == mean.cases
    )
    return page.Tradeoffs(relative=True, over=BASELINE, points=points) if len(points) > 1 else None


# ---- one case


def _case(what: Key, table: Sequence[Entry]) -> page.Speedups:
    fastest = _winner(table)
    noise = table[0].noise if table and math.isfinite(table[0].noise.high) else None
    return page.Speedups(
        title=verdicts.name(table[0].cell) if table else what[0],
        over=BASELINE,
        noise=interval_of(noise),
        rows=tuple(_row(entry, won=entry is fastest) for entry in table if entry.cell.status != "unavailable"),
    )


def _winner(table: Sequence[Entry]) -> Entry | None:
    """Return the fastest peer whose results stay; of those whose intervals overlap its own, the cheapest to compile."""
    usable = [e for e in table if e.cell.kind in USABLE and stays(e.cell) and "eager" in e.speedups]
    if not usable:
        return None
    least = max((entry.speedups["eager"] for entry in usable), key=lambda ratio: ratio.median).low
    tied = (entry for entry in usable if entry.speedups["eager"].high >= least)
    return min(tied, key=lambda entry: math.inf if entry.cold_s is None else entry.cold_s)


def _row(entry: Entry, *, won: bool) -> page.Row:
    cell = entry.cell
    is_baseline = cell.peer == BASELINE
    speedup = Interval(1.0, 1.0, 1.0) if is_baseline and cell.passed else entry.speedups.get("eager")
    tied = speedup and not is_baseline and verdicts.mark(speedup, entry.noise) == "tie"
    return page.Row(
        name=cell.peer,
        status=cell.status,
        reason=cell.reason,
        note="baseline" if is_baseline else "within noise" if tied else "" if stays(cell) else "results overwritten",
        won=won,
        speedup=interval_of(speedup),
        latency=interval_of(entry.time),
        compile_s=seconds_of(entry.cold_s),
        peak_bytes=count_of(entry.peak_bytes),
        error=error_of(cell.accuracy.get("error")),
    )


def _decided(tables: Mapping[Key, Sequence[Entry]]) -> Iterator[tuple[Entry, Decision]]:
    """Yield what `auto` chose in each case, described by the case's name."""
    for entry in (entry for table in tables.values() for entry in table):
        cell = entry.cell
        if cell.kind == "auto" and cell.decided:
            name = verdicts.name(cell) + ("" if cell.peer.endswith(":auto") else f", {cell.peer}")
            yield entry, decision_of(cell.decided, name)


def decision_of(decided: Mapping[str, object], name: str) -> Decision:
    """Return the decision that a record keeps in short."""
    rows = [_race_row(*row) for row in decided.get("rows") or []]
    for row in rows:
        row.won = row.name == decided["winner"]
    seconds = float(decided.get("seconds") or 0.0)
    return Decision("", "", decided["winner"], dict(decided["options"]), tuple(rows), facts=name, seconds=seconds)


def _race_row(
    name: str,
    status: str,
    seconds: float | None,
    compile_s: float | None = None,
    reason: str = "",
    against: str = "",
    speedup: Sequence[float] | None = None,
) -> RaceRow:
    ratio = Interval(speedup[1], speedup[0], speedup[2]) if speedup else None
    return RaceRow(name, {}, status, reason, seconds, ratio, against, compile_s or 0.0)


def _graph(entry: Entry, decision: Decision) -> page.Graph:
    """Return the options that `auto` chose for a case, with the least that the device needs for a call."""
    import msgspec

    kernels = (f"{entry.kernels} kernels in a call",) if entry.kernels is not None else ()
    return msgspec.structs.replace(graph_of(decision, decision.facts), notes=(*kernels, *_limits(entry)))


def _limits(entry: Entry) -> Iterator[str]:
    limit = entry.limit
    if limit is not None and limit.scored and entry.time is not None and not entry.exposed:
        share = limit.seconds / entry.time.median
        yield f"the device needs at least {duration(limit.seconds)} ({limit.bound}), {share:.0%} of the time"
