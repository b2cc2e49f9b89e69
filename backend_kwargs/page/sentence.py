"""What a verdict says in one line, on a page and in Markdown: what to do, and how sure that is, with figures."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from backend_kwargs.facts.decision import DEFAULT, EAGER
from backend_kwargs.interval import Interval
from backend_kwargs.page import figures
from backend_kwargs.page.document import Speedup, Verdict

ITSELF = "the model itself"  # not compiled at all, so without dynamo's guards
FREE = (EAGER, DEFAULT, "inductor")  # what a user keeps unless something is surely faster


class Piece(NamedTuple):
    """A part of the sentence: plain, the name of a candidate, or a figure."""

    text: str
    kind: Literal["", "name", "figure"] = ""


def sentence(verdict: Verdict) -> list[Piece]:
    """Return the verdict in one line: use the winner, or keep what is faster or costs less."""
    return [*_sentence(verdict)]


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


def how_sure(verdict: Verdict, noise: Interval | None = None) -> tuple[str, str]:
    """Return how sure the sentence is, and why; `noise` is the machine's."""
    if verdict.provisional:
        return "Provisional", verdict.provisional
    keep, tied = kept(verdict), [each for each in verdict.speedups if _tied(each.ratio)]
    sure = [each for each in verdict.speedups if each not in tied]
    if keep and keep not in tied:
        return "Clear", f"{keep.over} is faster than {verdict.winner}: the interval lies below 1"
    if tied and sure and not keep:
        over = _listed([each.over for each in tied])
        return f"Clear over {_listed([each.over for each in sure])}", f"not over {over}: the interval contains 1"
    if tied:
        return "Not clear", "the interval contains 1"
    if noise:
        return _word(
            verdict
        ), f"{'beyond' if verdict.clear else 'within'} this machine's noise, {figures.between(noise)}"
    above = "each interval lies above 1" if len(sure) > 1 else "the interval lies above 1"
    return _word(verdict), above if verdict.clear else "the winner and the one before it in the race are within noise"


def _word(verdict: Verdict) -> str:
    return "Clear" if verdict.clear else "Not clear"


def _tied(ratio: Interval) -> bool:
    return ratio.low <= 1 <= ratio.high


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _sentence(verdict: Verdict) -> Iterator[Piece]:
    keep = kept(verdict)
    if not verdict.winner:
        yield Piece(verdict.text.partition("\n")[0] or "No verdict.")
    elif keep:
        yield from (*_keep(keep.over), Piece(": "))
        if _tied(keep.ratio):
            yield from (Piece("it is not clear whether "), Piece(verdict.winner, "name"), Piece(" is faster, "))
            yield from (Piece(figures.ratio(keep.ratio.median), "figure"), Piece(f" ({figures.between(keep.ratio)})."))
        else:
            yield from (Piece(verdict.winner, "name"), Piece(" is "), Piece(figures.ratio(keep.ratio.median), "figure"))
            yield Piece(f" as fast ({figures.between(keep.ratio)}).")
    else:
        yield from _keep(EAGER) if verdict.winner == EAGER else (Piece("Use "), Piece(verdict.winner, "name"))
        yield from _over(verdict.speedups)


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
    yield Piece(".")
