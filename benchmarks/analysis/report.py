"""Results as Markdown: each peer over all cases, each case on each clock, and the measurement conditions."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.files import write_whole
from backend_kwargs.trial import Interval, percentile
from benchmarks.analysis import markdown, verdicts
from benchmarks.analysis.auto_tables import choice_tables, real_tables, rewrite_tables
from benchmarks.analysis.real_models import AUTO, MODES, raced_twice, real_models
from benchmarks.analysis.verdicts import AGAINST, CLOCKS, FAST, Against, Clock, Entry, Key, PeerSummary, clock_name
from benchmarks.execution import records
from benchmarks.execution.ceilings import Ceilings
from benchmarks.execution.controls import INJECTED, SLOWED, is_seen
from benchmarks.execution.records import AGAIN, Cell, Results
from benchmarks.workloads.cases import CASES as TABLE

Tables = Mapping[Clock, Mapping[Key, Sequence[Entry]]]

READING = "## Reading"
FAMILIES = {
    "model": "whole models",
    "gemm": "matrix products",
    "norm": "norms, softmax, loss",
    "segment": "parts of models",
}
OVERVIEW = """\
Geometric means over the cases, by {clock}: 1.50x means that a call takes two thirds of eager's time. The best mode is
the fastest of default, reduce-overhead, max-autotune and max-autotune-no-cudagraphs, chosen for each case in hindsight;
`auto` chooses by itself. The physical limit is the time that the case's bytes and operations take at the best rates
measured on this machine; the figure is the median of the cases that have one. "In n": only n cases have a figure."""
LEAST_ROUNDS = 30
MOST_COMMANDS = 6
SUMMARY = """\
A speedup is the paired ratio of rounds in one process; above 1 is faster. If several processes have timed a case, a
peer's row, its ratios and its noise floor are from the latest one with that peer; eager, torch's modes and the controls
are from the latest one with most modes. Geometric means are over the cases that pass, unclipped; one with an asterisk
is over fewer cases than others in its column, so they cannot be compared. "Strongest" is the fastest of the other peers
that a user has without this package, given if the process has all of those that pass; a win, tie or loss is against it,
and a difference within the noise floor is a tie. fast_p is the share of cases that are right and, beyond noise, more
than p times as fast as eager. Worst is the lowest speedup over eager. Compiles have their own processes; those marked ~
share one with other peers, where earlier compiles make later ones cheaper. Memory is the peak over eager's, if both
reach 1 MiB and were measured in the same way. If either is known for fewer cases than pass, the number is given.
Classes of numerics are not compared with each other. A dagger †: launch-bound, device time includes host
gaps; it enters no ratio and no plot."""
CASES = """\
Medians with bootstrap 95 % intervals, untrimmed, then the 20th and 80th percentile of the samples, in the unit of the
time. For a peer compiled several times, the median of the compiles and an interval over all of them. If several
processes have timed a case, a peer's row, its ratios and its noise floor are from the latest one with that peer; eager,
torch's modes and the controls are from the latest one with most modes; times of two processes are not comparable. In
*italics*: within the noise floor, so not significant. A dagger †: launch-bound,
device time includes host gaps, and enters no ratio. Limits use the best ceilings over all runs.
Wall time is that of a loop that keeps each result until the next call has returned; "results dropped" is that of one
that drops it at once. Kernels are those that one call launches or replays."""
OVER = "**over 100 %: a bug of the suite until explained**"
NUMBERS: tuple[tuple[float, float, str], ...] = ((1, 1, "s"), (1e-3, 1e3, "ms"), (0, 1e6, "µs"))


def write_report(files: Sequence[Path], out: Path, *, plots: bool = True) -> Path:
    """Write the report on result files of one device and one torch to `out`, with plots and a page of all cases.

    The text below "## Reading" in an earlier report is kept. Raises BackendKwargsError if a file cannot be read, or if
    the files are of different machines or otherwise must not be pooled.
    """
    results = records.read(*files)
    check_alike(results)
    results.cells.sort(key=_place)
    tables = tables_of(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn: Mapping[str, Path] = {}
    if plots:
        from benchmarks.analysis.plots import draw  # only plots need matplotlib

        drawn = draw(tables, out)
    earlier = out.read_text() if out.exists() else ""
    reading = READING + earlier.partition(f"\n{READING}")[2] if f"\n{READING}" in earlier else f"{READING}\n\nNone yet."
    each = cases_of(out)
    write_whole(out, "\n".join([*_lines(results, tables, drawn, each), "", reading.rstrip(), ""]))
    write_whole(each, "\n".join([_title("Each case", results), "", CASES, *_cases(tables), ""]))
    return out


def _place(cell: Cell) -> int:
    """Return a case's position in the table of cases; unknown cases come last."""
    return next((at for at, name in enumerate(TABLE) if name == cell.case), len(TABLE))


def cases_of(out: Path) -> Path:
    """Return the path of the page with each case's table."""
    return out.with_name(f"{out.stem}_cases.md")


def check_alike(results: Results) -> None:
    """Raise if results must not be pooled: of several devices, releases of torch, sizes or dtypes."""
    if not results.environments:
        raise BackendKwargsError("report requires JSON lines of `run --out`, got files without any.")
    fields = [(field, str(each.get(field))) for field in ("device_name", "torch") for each in results.environments]
    for cell in results.cells:
        fields += [("l2", cell.l2), ("scale", cell.scale), (f"dtype of {verdicts.name(cell)}", cell.dtype)]
    found: dict[str, set[str]] = {}
    for field, value in fields:
        found.setdefault(field, set()).add(value)
    for field, values in found.items():
        if len(values) > 1:
            raise BackendKwargsError(f"A report is of one {field}, got {sorted(values)}: report these files apart.")


def ceilings_of(results: Results) -> Ceilings | None:
    """Return the best of each ceiling over all runs, which are of one kind of device; None if none were measured."""
    return Ceilings.best([Ceilings.from_json(each) for each in results.ceilings]) if results.ceilings else None


def tables_of(results: Results) -> Tables:
    """Return the tables of each case for the clocks that timed any peer; wall time if none did.

    Times with results dropped are a column, or have their own tables in older files, where no results were kept.
    """
    tables = {clock: verdicts.entries(results.cells, clock, ceilings_of(results)) for clock in CLOCKS}
    timed = {clock: found for clock, found in tables.items() if any(entry.time for entry in _entries(found))}
    if "wall" in timed:
        timed.pop("dropped", None)
    return timed or {"wall": tables["wall"]}


def _title(what: str, results: Results) -> str:
    environment = results.environments[-1]
    return f"# {what} on {environment['device_name']}, torch {environment['torch']}"


def _lines(results: Results, tables: Tables, drawn: Mapping[str, Path], each: Path) -> Iterator[str]:
    yield _title("Benchmarks", results)
    yield from ["", *_overview(*next(iter(tables.items()))), ""]
    yield f"[Each case]({each.name}). [Each peer](#summary). [What to make of it](#reading)."
    yield from ["", "## Summary", "", SUMMARY]
    for clock, found in tables.items():
        yield from _summary(clock, found)
    for title, path in drawn.items():
        yield from ["", f"![{title}]({path.name})"]
    yield from real_tables(real_models(results.cells))
    yield from rewrite_tables(raced_twice(results.cells))
    yield from choice_tables(results.cells)
    yield from ["", "## Controls", "", *_controls(tables)]
    yield from ["", "## Measured with", "", *_measured_with(results)]


# ---- tables


def _overview(clock: Clock, tables: Mapping[Key, Sequence[Entry]]) -> Iterator[str]:
    """Yield one line for the models, and one for each family of kernels."""
    families: dict[str, list[Mapping[str, Entry]]] = {}
    for (case, *_), entries in tables.items():
        group = TABLE[case].group if case in TABLE else "others"
        by_peer = {entry.cell.peer: entry for entry in entries if entry.time and not entry.exposed}
        families.setdefault(FAMILIES.get(group, group), []).append(by_peer)

    def speedup(peers: Sequence[str], cases: Sequence[Mapping[str, Entry]]) -> str:
        best = [
            [of[peer].speedups["eager"].median for peer in peers if peer in of and "eager" in of[peer].speedups]
            for of in cases
        ]
        known = [max(each) for each in best if each]
        return f"{math.exp(sum(map(math.log, known)) / len(known)):.2f}x" + _in(len(known), len(cases)) if known else ""

    def share(cases: Sequence[Mapping[str, Entry]]) -> str:
        known = [of[AUTO].share.median for of in cases if AUTO in of and of[AUTO].share]
        return f"{percentile(known, 0.5):.0f} %" + _in(len(known), len(cases)) if known else ""

    head = [
        "speedup over eager",
        "cases",
        "default",
        "best of torch's four modes",
        "`auto`",
        "`auto` of the physical limit",
    ]
    rows = (
        [name, str(len(of)), *(speedup(p, of) for p in (MODES[:1], MODES, [AUTO])), share(of)]
        for name, of in families.items()
    )
    yield from markdown.table(head, sorted(rows, key=lambda row: -int(row[1])))
    name = clock_name(clock, tables)
    yield from ["", OVERVIEW.format(clock=f"{name[0].lower()}{name[1:]}")]


def _summary(clock: Clock, tables: Mapping[Key, Sequence[Entry]]) -> Iterator[str]:
    head = ["peer", "cases", "pass", *(f"x {what}" for what in AGAINST), *(f"fast_{p}" for p in FAST)]
    head += ["wins/ties/losses", "worst", "compile cold, warm", "memory"]
    for numerics, found in verdicts.summaries(tables).items():
        yield from ["", f"### {clock_name(clock, tables)}, {numerics}", ""]
        most = {what: max(of.counts[what] for of in found) for what in AGAINST}
        yield from markdown.table(head, (_summary_row(summary, most) for summary in found))


def _summary_row(of: PeerSummary, most: Mapping[Against, int]) -> list[str]:
    return [
        of.peer,
        f"{of.cases}" + (f" (+{of.unavailable} unavailable)" if of.unavailable else ""),
        f"{of.passed / of.cases:.0%}" if of.cases else "",
        *(markdown.number(of.geomeans.get(w), "{:.2f}" if of.counts[w] == most[w] else r"{:.2f}\*") for w in AGAINST),
        *(markdown.number(of.fast.get(p), "{:.0%}") for p in FAST),
        "/".join(str(of.marks[mark]) for mark in ("win", "tie", "loss")) if sum(of.marks.values()) else "",
        f"{of.worst[0]:.2f} {of.worst[1]}" if of.worst else "",
        _compile(of.cold_s, of.warm_s, of.fresh) + _in(of.compiled, of.passed),
        markdown.number(of.memory, "{:.2f}") + _in(of.peaks, of.passed),
    ]


def _cases(tables: Tables) -> Iterator[str]:
    for what in next(iter(tables.values()), {}):
        case, mode, dtype, _, scale = what
        of = ", ".join(word for word in (mode, dtype, scale if scale != "full" else "") if word)
        yield from ["", f"## {case} ({of})"]
        for clock, found in tables.items():
            yield from ["", f"{clock_name(clock, found)}. {_preface(found[what])}".rstrip(), ""]
            yield from _case_table(clock, found[what])


def _preface(table: Sequence[Entry]) -> str:
    limit = table[0].limit
    rounds = min((entry.rounds for entry in table if entry.rounds), default=0)
    sentences = [_floors([entry.noise.high for entry in table])]
    if limit:
        bound = "fits in the L2, not scored" if not limit.scored else f"bound by {limit.bound}"
        sentences.append(f"Limit {_time(limit.seconds)}, {bound}.")
    if rounds:
        few = f", fewer than {LEAST_ROUNDS}" if rounds < LEAST_ROUNDS else ""
        sentences.append(f"{rounds} rounds{few}.")
    repeats = [entry.repeats for entry in table if entry.repeats]
    if max(repeats, default=1) > 1:
        sentences.append(f"A sample is the mean of up to {max(repeats)} calls.")
    shared = [entry.cell.one_cache for entry in table]
    if any(shared):
        sentences.append(f"{'Peers' if all(shared) else 'Some peers'} shared one cache: no compile times.")
    return " ".join(sentences)


def _floors(highs: Sequence[float]) -> str:
    low, high = (f"±{bound - 1:.1%}" if math.isfinite(bound) else "unknown" for bound in (min(highs), max(highs)))
    if low == high:
        return "No noise floor." if low == "unknown" else f"Noise floor {low}."
    return f"Noise floors {low} to {high}."


def _case_table(clock: Clock, table: Sequence[Entry]) -> Iterator[str]:
    columns: dict[str, Callable[[Entry], str]] = {"peer": lambda e: e.cell.peer, "time": _time_or_status}
    columns["p20, p80"] = _spread
    if any(entry.dropped for entry in table):
        columns["results dropped"] = lambda e: _interval(e.dropped) if e.dropped else ""
    if clock == "device" and any(entry.share for entry in table):
        columns["of the limit"] = _share
    columns |= {f"x {what}": lambda e, what=what: markdown.ratio(e.speedups.get(what), e.noise) for what in AGAINST}
    columns |= {
        "compile cold, warm": _compiled,
        "peak": lambda e: "" if e.peak_bytes is None else f"{e.peak_bytes / 2**20:.0f} MiB",
    }
    if any(entry.kernels is not None for entry in table):
        columns["kernels"] = lambda e: markdown.number(e.kernels, "{}")
    yield from markdown.table(list(columns), ([show(entry) for show in columns.values()] for entry in table))


# ---- one figure


def _time_or_status(entry: Entry) -> str:
    if entry.time:
        return _interval(entry.time) + (" †" if entry.exposed else "")
    return f"{entry.cell.status}({markdown.short(entry.cell.reason)})" if entry.cell.reason else entry.cell.status


def _interval(time: Interval) -> str:
    times, unit = _scale(time.median)
    return f"{time.median * times:.4g} {unit} [{time.low * times:.4g}, {time.high * times:.4g}]"


def _spread(entry: Entry) -> str:
    if not entry.time or not entry.spread:
        return ""
    times, _ = _scale(entry.time.median)
    return ", ".join(f"{seconds * times:.4g}" for seconds in entry.spread)


def _time(seconds: float) -> str:
    times, unit = _scale(seconds)
    return f"{seconds * times:.4g} {unit}"


def _scale(seconds: float) -> tuple[float, str]:
    return next((times, unit) for least, times, unit in NUMBERS if seconds >= least)


def _share(entry: Entry) -> str:
    if entry.limit and not entry.limit.scored:
        return "L2"
    if not entry.share:
        return ""
    figure = f"{entry.share.median:.1f} % [{entry.share.low:.1f}, {entry.share.high:.1f}]"
    return f"{figure} {OVER}" if entry.over else figure


def _compiled(entry: Entry) -> str:
    shares = entry.cell.compile.shares
    return f"as {shares}" if shares else _compile(entry.cold_s, entry.warm_s, entry.fresh)


def _in(count: int, passed: int) -> str:
    return f" in {count}" if 0 < count < passed else ""


def _compile(cold: float | None, warm: float | None, fresh: bool) -> str:
    if cold is None:
        return ""
    return f"{markdown.about(cold, fresh)}, {f'{warm:.1f} s' if warm is not None else '-'}"


# ---- what it rests on


def _controls(tables: Tables) -> Iterator[str]:
    """Yield the noise on each clock, cases where the injected work does not show, and results above the limit."""
    for clock, found in tables.items():
        floors = [e.noise.high - 1 for e in _entries(found) if e.cell.peer == AGAIN and math.isfinite(e.noise.high)]
        middle, widest = (f"{percentile(floors, q):.1%}" if floors else "unknown" for q in (0.5, 1.0))
        title = clock_name(clock, found)
        yield f"- {title}: noise floor ±{middle} in the middle of {len(floors)} groups, ±{widest} at most."
    for clock, found in tables.items():
        slowed = [e for e in _entries(found) if e.cell.peer == SLOWED and e.time]
        shares = [_injected(e) for e in slowed] or [INJECTED]
        unseen = [e for e in slowed if e.marks.get("eager") != "loss"]
        unsized = [
            e for e in slowed if not ("eager" in e.speedups and is_seen(e.speedups["eager"], e.noise, _injected(e)))
        ]
        yield (
            f"- {clock_name(clock, found)}: {min(shares):.1%} to {max(shares):.1%} more work, in {len(slowed)} groups. "
            f"Not seen: {_named(unseen)}. Not at its size: {_named(unsized)}."
        )
    if timed := _entries(tables.get("device", {})):
        over = sorted({f"{e.cell.peer} in {e.cell.case}" for e in timed if e.over})
        yield f"- Above 100 % of the limit by the best ceilings of all runs, beyond noise: {', '.join(over) or 'none'}."
        yield f"- Above 100 % of the limit by the ceilings of its own run: {_by_own_ceilings(timed)}."


def _injected(entry: Entry) -> float:
    return float(entry.cell.options.get("injected", INJECTED))


def _named(entries: Iterable[Entry]) -> str:
    return ", ".join(verdicts.name(e.cell) + (" †" if e.exposed else "") for e in entries) or "none"


def _by_own_ceilings(entries: Iterable[Entry]) -> str:
    """Return how many results exceed the limit by their own run's ceilings, which other runs may exceed."""
    own = [(100 * e.cell.limit_s / e.time.median, e.cell) for e in entries if e.share and e.time and e.cell.limit_s]
    over = [each for each in own if each[0] > 100]
    if not over:
        return f"none of {len(own)} cells"
    share, cell = max(over, key=lambda of: of[0])
    most = f"{cell.peer} in {verdicts.name(cell)} at {share:.1f} %"
    return f"{len(over)} of {len(own)} cells by their medians, at most {most}, as clocks differ between runs"


def _entries(tables: Mapping[Key, Sequence[Entry]]) -> list[Entry]:
    return [entry for table in tables.values() for entry in table]


def _commands(results: Results) -> list[str]:
    """Return the commands as typed; a long list is collapsed."""
    typed = dict.fromkeys(str(each["command"]) for each in results.environments if each.get("command"))
    fenced = ["```", *typed, "```", ""]
    if len(typed) <= MOST_COMMANDS:
        return fenced
    return [f"<details><summary>{len(typed)} commands</summary>", "", *fenced, "</details>", ""]


def _measured_with(results: Results) -> Iterator[str]:
    yield from _commands(results)
    environment = results.environments[-1]
    about = {
        name: value
        for name, value in environment.items()
        if name != "command" and (isinstance(value, str | int | float) and value != "")
    }
    yield from markdown.table(["", "value"], ([name, str(value)] for name, value in about.items()))
    if found := ceilings_of(results):
        yield ""
        rows = ([name, _rate(figure.value, figure.unit), figure.attempt] for name, figure in found.figures.items())
        yield from markdown.table(["ceiling", f"best of {len(results.ceilings)} runs", "attempt"], rows)


def _rate(value: float, unit: str) -> str:
    if unit == "s":
        return _time(value)
    return f"{value / 1e12:.4g} T{unit}"
