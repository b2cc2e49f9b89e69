"""A document as Markdown for a pull request: the verdict, the candidates, warnings and changes."""

import re
from collections.abc import Iterable, Iterator, Sequence

from backend_kwargs.errors import printable, shortened
from backend_kwargs.interval import Interval
from backend_kwargs.page import figures
from backend_kwargs.page.document import Change, Document, Row, Speedups, Verdict
from backend_kwargs.page.sentence import kept, remark, sentence
from backend_kwargs.page.writing import shareable

LONGEST = 200  # characters of a name or a reason
MOST_ROWS, MOST_GROUPS, MOST_LINES = 50, 20, 30
HEAD = ("candidate", "speedup", "95 %", "a call", "compile", "memory", "result")
CHANGED = {
    "new": "is new",
    "lost": "is gone",
    "faster": "became faster",
    "slower": "became slower",
    "status": "has another status",
    "winner": "has another winner",
}


def to_markdown(document: Document) -> str:
    """Return a summary; what comes from users and files is in code spans, where Markdown and HTML do not act."""
    return "\n".join(_lines(shareable(document))) + "\n"


def code(text: str) -> str:
    """Return `text` as a code span in one line, also in a table."""
    shown = shortened(" ".join(printable(text, keep="\n").split()), LONGEST)
    return f"`{shown.replace('`', chr(39)).replace('|', '¦')}`" if shown else ""


def _lines(document: Document) -> Iterator[str]:
    yield f"### {code(document.title)}"
    if document.subtitle:
        yield from ["", code(document.subtitle)]
    if document.verdict:
        yield from ["", *_verdict(document.verdict, document.noise)]
    for group in document.speedups[:MOST_GROUPS]:
        yield from ["", *_table(group)]
    yield from _more("tables", document.speedups, MOST_GROUPS)
    if document.changes:
        yield from ["", "**Since the older report**", ""]
        yield from map(_change, document.changes.changes[:MOST_LINES])
        yield f"- {document.changes.same} rows are the same within noise"
        yield from (f"- {code(each)}" for each in document.changes.differs[:MOST_LINES])
    yield from _bullets("Warnings", ((each.where, each.text) for each in document.warnings))
    yield from _bullets("Notes", (("", each) for each in document.notes))


def _verdict(verdict: Verdict, noise: Interval | None) -> Iterator[str]:
    said = [*sentence(verdict, noise)]
    words = "".join(code(each.text) if each.kind == "name" else each.text for each in said)
    yield f"**{words if verdict.winner else code(said[0].text)}**"
    if ends := [f"{figures.between(each.ratio)} over {code(each.over)}" for each in verdict.speedups]:
        yield f"95 % intervals: {', '.join(ends)}."
    if costs := _costs(verdict):
        yield f"{'; '.join(costs)}."
    if remark(verdict):
        yield code(remark(verdict))
    if verdict.paste and not kept(verdict):
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", verdict.paste))])
        yield from ["", f"{fence}python", *(printable(line) for line in verdict.paste.splitlines()), fence]


def _costs(verdict: Verdict) -> list[str]:
    """Return what the winner costs, if it is to be used."""
    costs = list[str]()
    if kept(verdict):
        return costs
    if verdict.compile_s is not None:
        costs.append(f"It compiles in {figures.duration(verdict.compile_s)}")
    if verdict.pays_back_calls is not None:
        calls = "call" if verdict.pays_back_calls == 1 else "calls"
        over = code(verdict.pays_back_over)
        costs.append(f"paid back after {figures.count(verdict.pays_back_calls)} {calls} against {over}")
    if verdict.error is not None:
        costs.append(f"error {figures.error(verdict.error)}")
    return costs


def _table(group: Speedups) -> Iterator[str]:
    against_itself = f", which is at {figures.between(group.noise)} against itself" if group.noise else ""
    over = f"speedup over {code(group.over)}{against_itself}" if group.over else ""
    yield ", ".join(filter(None, (code(group.title), over if group.title else over.capitalize())))
    yield from ["", f"| {' | '.join(HEAD)} |", f"|---|{'---:|' * (len(HEAD) - 2)}---|"]
    yield from (f"| {' | '.join(_cells(row))} |" for row in group.rows[:MOST_ROWS])
    yield from _more("candidates", group.rows, MOST_ROWS)


def _cells(row: Row) -> Iterator[str]:
    yield f"**{code(row.name)}**" if row.won else code(row.name)
    yield figures.ratio(row.speedup.median) if row.speedup else ""
    yield figures.between(row.speedup) if row.speedup else ""
    yield figures.duration(row.latency.median) if row.latency else ""
    yield figures.duration(row.compile_s) if row.compile_s is not None else ""
    yield figures.size(row.peak_bytes) if row.peak_bytes is not None else ""
    yield ": ".join(filter(None, (code(row.status), code(row.reason or row.note))))


def _change(change: Change) -> str:
    group = f" ({code(change.group)})" if change.group and change.group != change.name else ""
    was_now = (change.old, change.new) if change.old or change.new else (_at(change.before), _at(change.after))
    moved = ": " + " → ".join(code(each) or "none" for each in was_now) if any(was_now) else ""
    return f"- {code(change.name)}{group} {CHANGED[change.kind]}{moved}"


def _at(interval: Interval | None) -> str:
    return f"{figures.ratio(interval.median)} ({figures.between(interval)})" if interval else ""


def _bullets(title: str, lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    found = [f"- {code(where)}: {code(text)}" if where else f"- {code(text)}" for where, text in lines]
    if found:
        yield from ["", f"**{title}**", "", *found[:MOST_LINES], *_more("lines", found, MOST_LINES)]


def _more(what: str, found: Sequence[object], most: int) -> Iterator[str]:
    if len(found) > most:
        yield from ["", f"… and {len(found) - most} more {what}"]
