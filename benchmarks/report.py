"""Results as Markdown: each peer over all cases, each case by both clocks, and what they were measured with."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.measure import Interval, percentile
from benchmarks import records, verdicts
from benchmarks.ceilings import Ceilings
from benchmarks.controls import SLOWED
from benchmarks.records import AGAIN, Results
from benchmarks.verdicts import AGAINST, CLOCKS, FAST, Clock, Entry, Key, Summary

Tables = Mapping[Clock, Mapping[Key, Sequence[Entry]]]

READING = "## Reading"
TITLES: dict[Clock, str] = {"device": "Device time, cold L2", "wall": "Wall time"}
LEAST_ROUNDS = 30
SUMMARY = """\
A speedup is the paired ratio of rounds in one process, above 1 is faster; geometric means are over the cases that pass,
unclipped. "Strongest" is the fastest of the other peers that a user has without this package, and a win, tie or loss is
against it: inside the group's noise floor is a tie. fast_p is the share of cases that are right and more than p times
as fast as eager. Worst is the lowest speedup over eager. Memory is the peak over eager's. Classes of numerics are not
compared with each other."""
CASES = """\
Medians with bootstrap 95 % intervals, nothing trimmed. Where a peer was compiled several times, the median of the
compiles and an interval over all of them. In *italics*: within the noise floor, so that it shows nothing."""
OVER = "**over 100 %: a bug of the suite until explained**"
NUMBERS: tuple[tuple[float, float, str], ...] = ((1, 1, "s"), (1e-3, 1e3, "ms"), (0, 1e6, "µs"))


def write_report(files: Sequence[Path], out: Path, *, plots: bool = True) -> Path:
    """Write the report of result files of one device and one torch to `out`, and its plots beside it.

    What stands below "## Reading" in an earlier report is kept. Raises BackendKwargsError where a file cannot be read
    or the files are of different machines.
    """
    results = records.read(*files)
    _check_one_machine(results)
    tables = tables_of(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn: Mapping[str, Path] = {}
    if plots:
        from benchmarks.plots import draw  # matplotlib is asked for here alone

        drawn = draw(tables, out)
    reading = _reading(out)
    out.write_text("\n".join([*_lines(results, tables, drawn), "", reading.rstrip(), ""]))
    return out


def _check_one_machine(results: Results) -> None:
    if not results.environments:
        raise BackendKwargsError("report wants JSON lines of `run --out`, got files without any.")
    for field in ("device_name", "torch"):
        found = sorted({str(environment.get(field)) for environment in results.environments})
        if len(found) != 1:
            raise BackendKwargsError(f"A report is of one {field}, got {found}: report these files apart.")


def _reading(out: Path) -> str:
    earlier = out.read_text() if out.exists() else ""
    return READING + earlier.partition(f"\n{READING}")[2] if f"\n{READING}" in earlier else f"{READING}\n\nNone yet."


def ceilings_of(results: Results) -> Ceilings | None:
    """Return the best of each ceiling over all runs, which are of one kind of device; None where none were measured."""
    return Ceilings.best([Ceilings.from_json(each) for each in results.ceilings]) if results.ceilings else None


def tables_of(results: Results) -> Tables:
    """Return the tables of each case by the clocks that any peer was timed by; the wall's where none was."""
    tables = {clock: verdicts.entries(results.cells, clock, ceilings_of(results)) for clock in CLOCKS}
    timed = {clock: found for clock, found in tables.items() if any(entry.time for entry in _entries(found))}
    return timed or {"wall": tables["wall"]}


def _lines(results: Results, tables: Tables, drawn: Mapping[str, Path]) -> Iterator[str]:
    environment = results.environments[-1]
    yield f"# Benchmarks on {environment['device_name']}, torch {environment['torch']}"
    yield from ["", "## Summary", "", SUMMARY]
    for clock, found in tables.items():
        yield from _summary(clock, found)
    for title, path in drawn.items():
        yield from ["", f"![{title}]({path.name})"]
    yield from ["", "## Controls", "", *_controls(tables)]
    yield from ["", "## Cases", "", CASES]
    yield from _cases(tables)
    yield from ["", "## Measured with", "", *_measured_with(results)]


# ---- tables


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _summary(clock: Clock, tables: Mapping[Key, Sequence[Entry]]) -> Iterator[str]:
    head = ["peer", "cases", "pass", *(f"x {what}" for what in AGAINST), *(f"fast_{p}" for p in FAST)]
    head += ["wins/ties/losses", "worst", "compile cold, warm", "memory"]
    for numerics, found in verdicts.summaries(tables).items():
        yield from ["", f"### {TITLES[clock]}, {numerics}", ""]
        yield from _table(head, (_summary_row(summary) for summary in found))


def _summary_row(of: Summary) -> list[str]:
    return [
        of.peer,
        f"{of.cases}" + (f" (+{of.unavailable} unavailable)" if of.unavailable else ""),
        f"{of.passed / of.cases:.0%}" if of.cases else "",
        *(_number(of.geomeans.get(what), "{:.2f}") for what in AGAINST),
        *(_number(of.fast.get(p), "{:.0%}") for p in FAST),
        "/".join(str(of.marks[mark]) for mark in ("win", "tie", "loss")) if sum(of.marks.values()) else "",
        f"{of.worst[0]:.2f} {of.worst[1]}" if of.worst else "",
        _compile(of.cold_s, of.warm_s),
        _number(of.memory, "{:.2f}"),
    ]


def _cases(tables: Tables) -> Iterator[str]:
    for what in next(iter(tables.values()), {}):
        case, mode, dtype, l2, scale = what
        of = ", ".join(word for word in (mode, dtype, scale if scale != "full" else "") if word)
        yield from ["", f"### {case} ({of})"]
        for clock, found in tables.items():
            title = f"Device time, {l2} L2" if clock == "device" else TITLES[clock]
            yield from ["", f"{title}. {_preface(found[what])}".rstrip(), ""]
            yield from _case_table(clock, found[what])


def _preface(table: Sequence[Entry]) -> str:
    noise, limit = table[0].noise, table[0].limit
    rounds = min((entry.rounds for entry in table if entry.rounds), default=0)
    said = [f"Noise floor ±{noise.high - 1:.1%}." if math.isfinite(noise.high) else "No noise floor."]
    if limit:
        bound = "fits in the L2, not scored" if not limit.scored else f"bound by {limit.bound}"
        said.append(f"Limit {_time(limit.seconds)}, {bound}.")
    if rounds:
        few = f", fewer than {LEAST_ROUNDS}" if rounds < LEAST_ROUNDS else ""
        said.append(f"{rounds} rounds{few}.")
    return " ".join(said)


def _case_table(clock: Clock, table: Sequence[Entry]) -> Iterator[str]:
    columns: dict[str, Callable[[Entry], str]] = {"peer": lambda e: e.cell.peer, "time": _time_or_status}
    if clock == "device" and any(entry.share for entry in table):
        columns["of the limit"] = _share
    columns |= {f"x {what}": lambda e, what=what: _speedup(e, what) for what in AGAINST}
    columns |= {"compile cold, warm": _compiled, "peak": lambda e: _bytes(e.peak_bytes)}
    yield from _table(list(columns), ([show(entry) for show in columns.values()] for entry in table))


# ---- one figure


def _time_or_status(entry: Entry) -> str:
    if entry.time:
        return _interval(entry.time)
    return f"{entry.cell.status}({_short(entry.cell.reason)})" if entry.cell.reason else entry.cell.status


def _short(reason: str, longest: int = 90) -> str:
    return reason if len(reason) <= longest else reason[: longest - 3] + "..."


def _interval(time: Interval) -> str:
    times, unit = _scale(time.median)
    return f"{time.median * times:.4g} {unit} [{time.low * times:.4g}, {time.high * times:.4g}]"


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
    said = f"{entry.share.median:.1f} % [{entry.share.low:.1f}, {entry.share.high:.1f}]"
    return f"{said} {OVER}" if entry.over else said


def _speedup(entry: Entry, what: verdicts.Against) -> str:
    found = entry.speedups.get(what)
    if not found:
        return ""
    said = f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"
    return f"*{said}*" if entry.marks[what] == "tie" else said


def _compiled(entry: Entry) -> str:
    shares = entry.cell.compile.shares
    return f"as {shares}" if shares else _compile(entry.cold_s, entry.warm_s)


def _compile(cold: float | None, warm: float | None) -> str:
    return ", ".join(f"{seconds:.1f} s" if seconds is not None else "-" for seconds in (cold, warm)) if cold else ""


def _bytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.0f} MiB"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


# ---- what it rests on


def _controls(tables: Tables) -> Iterator[str]:
    """Say how wide the noise is on each clock, and in how many groups the injected work was seen on the first."""
    for clock, found in tables.items():
        floors = [e.noise.high - 1 for e in _entries(found) if e.cell.peer == AGAIN and e.time]
        middle, widest = (f"{percentile(floors, q):.1%}" if floors else "unknown" for q in (0.5, 1.0))
        yield f"- {TITLES[clock]}: noise floor ±{middle} in the middle of {len(floors)} groups, ±{widest} at most."
    for clock, found in list(tables.items())[:1]:
        slowed = [e for e in _entries(found) if e.cell.peer == SLOWED and e.time]
        seen = sum(e.marks.get("eager") == "loss" for e in slowed)
        yield f"- {TITLES[clock]}: 5 % more work is seen in {seen} of {len(slowed)} groups."
    over = sorted({f"{e.cell.peer} in {e.cell.case}" for e in _entries(tables.get("device", {})) if e.over})
    yield f"- Above 100 % of the limit: {', '.join(over) or 'none'}."


def _entries(tables: Mapping[Key, Sequence[Entry]]) -> list[Entry]:
    return [entry for table in tables.values() for entry in table]


def _measured_with(results: Results) -> Iterator[str]:
    for command in dict.fromkeys(environment.get("command") for environment in results.environments):
        if command:
            yield from ["```", str(command), "```", ""]
    environment = results.environments[-1]
    about = {name: value for name, value in environment.items() if name != "command" and _plain(value)}
    yield from _table(["", "value"], ([name, str(value)] for name, value in about.items()))
    if found := ceilings_of(results):
        yield ""
        rows = ([name, _rate(figure.value, figure.unit), figure.attempt] for name, figure in found.figures.items())
        yield from _table(["ceiling", "best", "attempt"], rows)


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and value != ""


def _rate(value: float, unit: str) -> str:
    if unit == "s":
        return _time(value)
    return f"{value / 1e12:.4g} T{unit}"
