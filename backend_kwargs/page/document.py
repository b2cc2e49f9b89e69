"""The data of a page: what `-o FILE.json` writes, a page contains, and `--against` reads; versioned, with a schema.

Every part is optional, and an absent one leaves no trace on the page. All text is plain text, times are in seconds,
sizes in bytes, ratios above 1 are faster. Files may come from anyone: each list and text has a limit.

Also what follows from its figures: points to choose among, when compiling pays, what changed since an older report.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from backend_kwargs.errors import BackendKwargsError, error_text
from backend_kwargs.interval import Interval, widest

VERSION = 1
LONGEST = 32 << 20  # bytes of a document

Name = Annotated[str, Meta(max_length=500)]
Text = Annotated[str, Meta(max_length=8000)]
Seconds = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0, le=10**15)]


class Part(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What every part of a document is: immutable, named fields, no unknown ones."""


class Speedup(Part, frozen=True):
    """A speedup `over` something that has a name, such as "eager"."""

    over: Name
    ratio: Interval


class Verdict(Part, frozen=True):
    """Which candidate to use, how sure that is, and what it costs.

    `speedups` has the most important first: over the best mode of torch, then over eager. `clear` is whether the winner
    is better beyond the noise. Where there is no winner, the first line of `text` replaces the sentence; other text is
    a remark. `provisional` is what its race has left open, "" if nothing. `pays_back_calls` is the number of calls
    after which the time to compile is saved, against `pays_back_over`. `error_bound` is the largest `error` that was
    allowed. `paste` is the code that uses the winner.
    """

    winner: Name = ""
    text: Text = ""
    clear: bool = True
    provisional: Text = ""
    speedups: Annotated[tuple[Speedup, ...], Meta(max_length=20)] = ()
    latency: Interval | None = None
    error: float | None = None
    error_bound: float | None = None
    compile_s: Seconds | None = None
    pays_back_calls: Count | None = None
    pays_back_over: Name = ""
    peak_bytes: Count | None = None
    other_peak_bytes: Count | None = None
    other_peak_of: Name = ""
    paste: Text = ""


class Warned(Part, frozen=True):
    """What a reader must know before trusting a figure; `where` is the graph, candidate or rank."""

    text: Text
    kind: Literal["noise", "cut", "fell back", "break", "shared device", "ranks", "failed", "advice", "other"] = "other"
    where: Name = ""


class Candidate(Part, frozen=True):
    """A candidate that was compared: how it ended, and what it takes; `error` is that of its worst result."""

    name: Name
    status: Name = "pass"
    reason: Text = ""
    won: bool = False
    speedup: Interval | None = None
    compile_s: Seconds | None = None
    peak_bytes: Count | None = None
    error: float | None = None


class Row(Candidate, frozen=True):
    """A candidate of a comparison; without a `speedup` it was not timed, and `reason` says why.

    `note` is "baseline", "within noise" or another short remark; `error` is in the unit of `bound`; `cache` is "warm"
    or "cold"; `graphs` counts what its backend compiled.
    """

    note: Name = ""
    latency: Interval | None = None
    cache: Name = ""
    bound: float | None = None
    graphs: Count | None = None


class Speedups(Part, frozen=True):
    """Candidates timed against each other; `noise` is the baseline (`over`) against itself.

    `note` says what is to be known to read the table.
    """

    title: Name = ""
    over: Name = ""
    noise: Interval | None = None
    rows: Annotated[tuple[Row, ...], Meta(max_length=2000)] = ()
    note: Text = ""


class Span(Part, frozen=True):
    """A part of a race, in seconds since it began."""

    kind: Literal["compile", "check", "time"]
    start: Seconds
    end: Seconds


class Lane(Candidate, frozen=True):
    """A candidate of a race: what it spent time on, and how it ended.

    `seconds` is the time of a call; `speedup` is over `against`, the leader of that time.
    """

    spans: Annotated[tuple[Span, ...], Meta(max_length=500)] = ()
    seconds: Seconds | None = None
    against: Name = ""
    predicted_s: Seconds | None = None


class Lead(Part, frozen=True):
    """From when a candidate led a race, in seconds since it began."""

    name: Name
    since: Seconds


class Race(Part, frozen=True):
    """The race of one graph; `cut_s` is the budget that ended it early, 0 if none did.

    `provisional` is what it has left open, "" if nothing. `estimated` is whether the spans were reconstructed from
    durations, since the record has no times of day.
    """

    graph: Name = ""
    winner: Name = ""
    seconds: Seconds = 0.0
    cut_s: Seconds = 0.0
    provisional: Text = ""
    estimated: bool = False
    lanes: Annotated[tuple[Lane, ...], Meta(max_length=500)] = ()
    leads: Annotated[tuple[Lead, ...], Meta(max_length=500)] = ()


class Point(Part, frozen=True):
    """What a candidate costs: `time` in the unit of its `Tradeoffs`."""

    name: Name
    time: Ratio
    compile_s: Seconds | None = None
    error: float | None = None
    peak_bytes: Count | None = None
    won: bool = False


class Tradeoffs(Part, frozen=True):
    """Points to choose among; `relative` times are multiples of that of `over`, others are seconds per call."""

    relative: bool = False
    over: Name = ""
    points: Annotated[tuple[Point, ...], Meta(max_length=2000)] = ()


class Option(Part, frozen=True):
    """An option that differs from its default, and where it comes from: "auto", "template max_autotune", "user"."""

    name: Name
    value: Text
    default: Text = ""
    source: Name = ""


class Rewrite(Part, frozen=True):
    """How often a rewrite replaced something, and what it costs."""

    name: Name
    count: Count
    costs: Text = ""


class Kernel(Part, frozen=True):
    """A generated or library kernel; `seconds` is of all its calls in one call of the graph."""

    name: Name
    kind: Name = ""
    seconds: Seconds | None = None
    calls: Count = 1


class Source(Part, frozen=True, forbid_unknown_fields=False):  # earlier releases wrote lines
    """A line of a source file."""

    place: Name
    line: Count = 0


class Cause(Part, frozen=True):
    """Why a graph ended early, or was compiled again, and what to change."""

    kind: Literal["break", "recompile"]
    reason: Text
    hint: Text = ""
    source: Source | None = None


class Graph(Part, frozen=True, forbid_unknown_fields=False):  # earlier releases wrote generated code
    """One compiled graph. `ran` says what ran it in place of its backend."""

    name: Name
    function: Name = ""
    backend: Name = ""
    winner: Name = ""
    seconds: Seconds | None = None
    cache: Name = ""
    ran: Text = ""
    options: Annotated[tuple[Option, ...], Meta(max_length=500)] = ()
    rewrites: Annotated[tuple[Rewrite, ...], Meta(max_length=500)] = ()
    kernels: Annotated[tuple[Kernel, ...], Meta(max_length=5000)] = ()
    causes: Annotated[tuple[Cause, ...], Meta(max_length=500)] = ()
    notes: Annotated[tuple[Text, ...], Meta(max_length=200)] = ()


class Result(Part, frozen=True):
    """An output, gradient or changed tensor of a candidate against its bound; `error` is in the unit of `bound`."""

    name: Name
    kind: Literal["output", "gradient", "buffer"] = "output"
    candidate: Name = ""
    error: float | None = None
    bound: float | None = None
    passed: bool = True
    reason: Text = ""


class Change(Part, frozen=True):
    """What differs from an older report. `speedup` is a change beyond noise of the candidate's speedup over `over`.

    A "winner" that flipped has its names in `old` and `new`; others have figures in `before` and `after`.
    """

    kind: Literal["new", "lost", "winner", "faster", "slower", "status"]
    name: Name
    group: Name = ""
    old: Name = ""
    new: Name = ""
    before: Interval | None = None
    after: Interval | None = None


class Changes(Part, frozen=True):
    """What differs from an older report, and how many rows do not; `differs` has what makes them hard to compare."""

    title: Name = ""
    made: Name = ""
    same: Count = 0
    differs: Annotated[tuple[Text, ...], Meta(max_length=100)] = ()
    changes: Annotated[tuple[Change, ...], Meta(max_length=5000)] = ()


class Document(Part, frozen=True):
    """All that a page shows, in its order; `made` is a time in ISO 8601, `by` what made it.

    `version` has a factory, since `omit_defaults` leaves out plain defaults.
    """

    title: Name
    version: Annotated[int, Meta(ge=VERSION, le=VERSION)] = msgspec.field(default_factory=lambda: VERSION)
    subtitle: Text = ""
    made: Name = ""
    by: Name = ""
    environment: Annotated[dict[Name, Text | int | float | bool | None], Meta(max_length=200)] = {}
    verdict: Verdict | None = None
    warnings: Annotated[tuple[Warned, ...], Meta(max_length=1000)] = ()
    speedups: Annotated[tuple[Speedups, ...], Meta(max_length=1000)] = ()
    races: Annotated[tuple[Race, ...], Meta(max_length=1000)] = ()
    tradeoffs: Tradeoffs | None = None
    graphs: Annotated[tuple[Graph, ...], Meta(max_length=1000)] = ()
    accuracy: Annotated[tuple[Result, ...], Meta(max_length=5000)] = ()
    changes: Changes | None = None
    notes: Annotated[tuple[Text, ...], Meta(max_length=500)] = ()

    @property
    def noise(self) -> Interval | None:
        """How far the widest baseline is from itself, None if none was timed twice."""
        return widest(group.noise for group in self.speedups)

    @property
    def doubts(self) -> tuple[Warned, ...]:
        """What a reader must know before trusting a figure."""
        return tuple(each for each in self.warnings if each.kind != "advice")

    @property
    def advice(self) -> tuple[Warned, ...]:
        """What a reader can change."""
        return tuple(each for each in self.warnings if each.kind == "advice")


def parse(content: bytes, what: str = "the report") -> Document:
    """Return the document in JSON, or raise BackendKwargsError: the content may come from anyone."""
    if len(content) > LONGEST:
        raise BackendKwargsError(f"Cannot read {what}: it is longer than {LONGEST} bytes.")
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != VERSION:
            raise BackendKwargsError(
                f"Cannot read {what}: its layout has version {version}, this release reads {VERSION}: make it again."
            )
        return msgspec.json.decode(content, type=Document)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BackendKwargsError(f"Cannot read {what}: {error_text(error)}.") from None


class _Versioned(Struct):
    version: int = 0


def checked(document: Document) -> Document:
    """Return the document as who parses its JSON gets it; raise BackendKwargsError if a value breaks the schema."""
    return parse(msgspec.json.encode(document), "a document that was just made")


def schema() -> dict[str, Any]:
    """Return the JSON schema of a document."""
    found = msgspec.json.schema(Document)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "backend-kwargs report"} | found


# Figures of an environment that make two reports hard to compare.
COMPARED = ("torch", "device_name", "cuda", "triton", "threads", "mode", "dtype")


LOUD = 1.05  # a machine on which a call differs from itself by more is noisy


def is_loud(noise: Interval | None) -> bool:
    """Return whether a call that was timed against itself shows a noisy machine."""
    return noise is not None and noise.reach > LOUD


def noise_of(over: str, noise: Interval | None) -> Iterator[Warned]:
    """Yield that the machine is noisy, if it is: `noise` is what was timed against itself."""
    if noise and is_loud(noise):
        text = f"A noisy machine: timed against itself, {over} is at {noise.low:.2f}x to {noise.high:.2f}x."
        yield Warned(text=text, kind="noise")


def pays_back(
    compile_s: float | None, call_s: float | None, other_compile_s: float, other_call_s: float | None
) -> int | None:
    """Return after how many calls a candidate has saved the time that it compiles longer; None if never, or unknown."""
    if compile_s is None or not call_s or not other_call_s or call_s >= other_call_s:
        return None
    return max(0, math.ceil((compile_s - other_compile_s) / (other_call_s - call_s)))


def tradeoffs_of(speedups: Speedups) -> Tradeoffs | None:
    """Return the candidates with right results as points to choose among; None if there are fewer than two."""
    points = tuple(
        Point(row.name, row.latency.median, row.compile_s, row.error, row.peak_bytes, row.won)
        for row in speedups.rows
        if row.status == "pass" and row.latency and row.latency.median > 0
    )
    return Tradeoffs(points=points) if len(points) > 1 else None


def changes(old: Document, new: Document) -> Changes:
    """Return what differs between two reports beyond noise; groups match by title, candidates by name."""
    before, after = ({group.title: group for group in each.speedups} for each in (old, new))
    if len(before) == len(after) == 1:
        before = dict(zip(after, before.values(), strict=True))
    found: list[Change] = []
    for title in {**after, **before}:
        found += _of_rows(title, before.get(title, Speedups()), after.get(title, Speedups()))
    rows = sum(len(group.rows) for group in after.values())
    touched = {(each.group, each.name) for each in found if each.kind not in ("winner", "lost")}
    return Changes(old.title, old.made, rows - len(touched), tuple(_differs(old, new)), tuple(found))


def _of_rows(title: str, before: Speedups, after: Speedups) -> Iterator[Change]:
    # Of rows with one name, one that was timed: the other was skipped.
    timed = [sorted(each.rows, key=lambda row: row.speedup is not None) for each in (before, after)]
    old, new = ({row.name: row for row in rows} for rows in timed)
    was, now = (next((row.name for row in each.rows if row.won), "") for each in (before, after))
    if before.rows and after.rows and was != now:
        yield Change("winner", title or "the winner", title, was, now)
    for name, row in new.items():
        if name not in old:
            yield Change("new", name, title, after=row.speedup)
        elif row.status != old[name].status:
            yield Change("status", name, title, old[name].status, row.status, old[name].speedup, row.speedup)
        elif before.over == after.over and (kind := _beyond_noise(old[name], row, before.noise, after.noise)):
            yield Change(kind, name, title, before=old[name].speedup, after=row.speedup)
    yield from (Change("lost", name, title, before=row.speedup) for name, row in old.items() if name not in new)


def _beyond_noise(old: Row, new: Row, *noises: Interval | None) -> Literal["faster", "slower"] | None:
    """Return the direction of a change that neither the intervals nor either machine's noise explains."""
    was, now, least = old.speedup, new.speedup, max((noise.high for noise in noises if noise), default=1.0)
    if not was or not now or old.note == new.note == "baseline":
        return None
    if now.low > was.high and now.median > was.median * least:
        return "faster"
    return "slower" if now.high < was.low and now.median * least < was.median else None


def _differs(old: Document, new: Document) -> Iterator[str]:
    for name in COMPARED:
        was, now = old.environment.get(name), new.environment.get(name)
        if name in old.environment and name in new.environment and was != now:
            yield f"{name} was {was}, and is {now}"
    for group in new.speedups:
        was_over = next((each.over for each in old.speedups if each.title == group.title), group.over)
        if was_over != group.over:
            yield f"speedups were over {was_over}, and are over {group.over}: they are not compared"
