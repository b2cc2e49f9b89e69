"""What follows from the figures of a document: points to choose among, when compiling pays, what an old report had."""

import math
from collections.abc import Iterator
from typing import Literal

from backend_kwargs.interval import Interval
from backend_kwargs.page.document import Change, Changes, Document, Point, Row, Speedups, Tradeoffs, Warned

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
    for title, group in after.items():
        found += _of_rows(title, before.get(title, Speedups()), group)
    for title in before.keys() - after.keys():
        found += (Change("lost", row.name, title) for row in before[title].rows)
    rows = sum(len(group.rows) for group in after.values())
    touched = {(each.group, each.name) for each in found if each.kind not in ("winner", "lost")}
    return Changes(old.title, old.made, rows - len(touched), tuple(_differs(old, new)), tuple(found))


def _of_rows(title: str, before: Speedups, after: Speedups) -> Iterator[Change]:
    # Of rows with one name, one that was timed: the other was skipped.
    timed = [sorted(each.rows, key=lambda row: row.speedup is not None) for each in (before, after)]
    old, new = ({row.name: row for row in rows} for rows in timed)
    was, now = (next((row.name for row in each.rows if row.won), "") for each in (before, after))
    if before.rows and was != now:
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
    if not old.speedup or not new.speedup or old.note == new.note == "baseline":
        return None
    least = max((noise.high for noise in noises if noise), default=1.0)
    if new.speedup.low > old.speedup.high and new.speedup.median > old.speedup.median * least:
        return "faster"
    if new.speedup.high < old.speedup.low and new.speedup.median * least < old.speedup.median:
        return "slower"
    return None


def _differs(old: Document, new: Document) -> Iterator[str]:
    for name in COMPARED:
        was, now = old.environment.get(name), new.environment.get(name)
        if name in old.environment and name in new.environment and was != now:
            yield f"{name} was {was}, and is {now}"
    for group in new.speedups:
        was_over = next((each.over for each in old.speedups if each.title == group.title), group.over)
        if was_over != group.over:
            yield f"speedups were over {was_over}, and are over {group.over}: they are not compared"
