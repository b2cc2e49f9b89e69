"""Markdown: tables, and the figures in their cells."""

from collections.abc import Iterable, Iterator, Sequence

from backend_kwargs.trial import Interval
from benchmarks.analysis import verdicts


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table, its first column aligned left."""
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def short(reason: str, longest: int = 90) -> str:
    """Return a reason, cut to `longest` characters."""
    return reason if len(reason) <= longest else reason[: longest - 3] + "..."


def ratio(found: Interval | None, noise: Interval) -> str:
    """Return a speedup with its interval, in italics within the noise."""
    if not found:
        return ""
    figure = f"{found.median:.2f} [{found.low:.2f}, {found.high:.2f}]"
    return f"*{figure}*" if verdicts.mark(found, noise) == "tie" else figure


def number(value: float | None, form: str) -> str:
    """Return a value in a format, "" if it is unknown."""
    return "" if value is None else form.format(value)


def about(seconds: float | None, fresh: bool) -> str:
    """Return seconds, marked ~ if other compiles may have made them fewer."""
    return "" if seconds is None else f"{'' if fresh else '~'}{seconds:.1f} s"
