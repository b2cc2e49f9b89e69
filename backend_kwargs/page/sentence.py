"""What a verdict says in one line, on a page and in Markdown: what to do, and how sure that is, with figures."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from backend_kwargs.facts.decision import DEFAULT, EAGER
from backend_kwargs.interval import Interval
from backend_kwargs.page import figures
from backend_kwargs.page.document import Row, Speedup, Verdict

ITSELF = "the model itself"  # not compiled at all, so without dynamo's guards
SLOWER = "slower than eager"  # a status
FREE = (EAGER, DEFAULT, "inductor")  # what a user keeps unless something is surely faster


class Piece(NamedTuple):
    """A part of the sentence: plain, the name of a candidate, or a figure."""

    text: str
    kind: Literal["", "name", "figure"] = ""


def remark(verdict: Verdict) -> str:
    """Return what follows the sentence: the text beside a winner, without one the lines after its first."""
    return verdict.text if verdict.winner else verdict.text.partition("\n")[2]


def kept(verdict: Verdict) -> Speedup | None:
    """Return what to keep in place of the winner: what is surely faster, or eager or default if that is not clear."""
    faster = [each for each in verdict.speedups if each.ratio.high < 1]
    if faster:
        return min(faster, key=lambda each: each.ratio.median)
    last = verdict.speedups[-1] if verdict.speedups else None
    return last if last and last.over in FREE and _tied(last.ratio) and verdict.winner != EAGER else None


def gained(what: str, rows: Sequence[Row]) -> str:
    """Return how many of several have surely gained over eager, and what became of the others."""
    sure = sorted(row.speedup.median for row in rows if row.speedup and row.speedup.low > 1)
    ends = " to ".join(dict.fromkeys(map(figures.ratio, sure[:1] + sure[-1:])))
    others = Counter("not clear" if row.status == "pass" else row.status for row in rows)
    others["not clear"] -= len(sure)
    first = f"{len(sure)} of {len(rows)} {what} surely gain" + (f": {ends} as fast as eager" if sure else "")
    return "; ".join((first, *(f"{count} {name}" for name, count in (+others).items()))) + "."


def _unsure(verdict: Verdict, noise: Interval | None) -> str:
    """Return why the sentence is not sure, "" if its figures say it, or it is."""
    if verdict.provisional:
        return f"provisional: {verdict.provisional}"
    if verdict.clear or any(each.ratio.low <= 1 for each in verdict.speedups):
        return ""
    within = (
        f"this machine's noise, {figures.between(noise)}" if noise else "the noise of the one before it in its race"
    )
    return f"within {within}"


def _tied(ratio: Interval) -> bool:
    return ratio.low <= 1 <= ratio.high


def sentence(verdict: Verdict, noise: Interval | None = None) -> Iterator[Piece]:
    """Yield the verdict in one line: use the winner, or keep what is faster or costs less, and why it is not sure.

    `noise` is the machine's.
    """
    keep = kept(verdict)
    if not verdict.winner:
        yield Piece(verdict.text.partition("\n")[0] or "No verdict.")
        return
    if keep:
        yield from (*_keep(keep.over), Piece(": "))
        if _tied(keep.ratio):
            yield from (Piece("it is not clear whether "), Piece(verdict.winner, "name"), Piece(" is faster, "))
            yield from (Piece(figures.ratio(keep.ratio.median), "figure"), Piece(f" ({figures.between(keep.ratio)})"))
        else:
            yield from (Piece(verdict.winner, "name"), Piece(" is "), Piece(figures.ratio(keep.ratio.median), "figure"))
            yield Piece(f" as fast ({figures.between(keep.ratio)})")
    else:
        yield from _keep(EAGER) if verdict.winner == EAGER else (Piece("Use "), Piece(verdict.winner, "name"))
        yield from _over(verdict.speedups)
    why = _unsure(verdict, noise)
    yield Piece(f"; {why}." if why else ".")


def _keep(name: str) -> tuple[Piece, ...]:
    return (Piece("Call the model itself"),) if name in (EAGER, ITSELF) else (Piece("Keep "), Piece(name, "name"))


def _over(speedups: Sequence[Speedup]) -> Iterator[Piece]:
    """Yield what the winner is surely faster than, then what it is as fast as."""
    sure, tied = ([each for each in speedups if _tied(each.ratio) is unsure] for unsure in (False, True))
    for at, each in enumerate(sure):
        yield Piece(": " if at == 0 else " and " if at == len(sure) - 1 else ", ")
        yield from (Piece(figures.ratio(each.ratio.median), "figure"), Piece(" as fast as "), Piece(each.over, "name"))
    for at, each in enumerate(tied):
        yield Piece(("; " if sure else ": ") + "not clearly faster or slower than " if at == 0 else " and ")
        yield from (Piece(each.over, "name"), Piece(", "), Piece(figures.ratio(each.ratio.median), "figure"))
        yield Piece(f" ({figures.between(each.ratio)})")
