"""An audit as a table, and as a page."""

from collections.abc import Iterator, Sequence

from backend_kwargs.fleet.findings import AuditDocument, Finding
from backend_kwargs.interval import Interval
from backend_kwargs.page import document as page
from backend_kwargs.page.values import environment_of, interval_of

COLUMNS = ("model", "graph", "winner", "verdict", "over default", "regret", "flips", "recorded")
WORDS = {"right": "still right"}
IN_SUMMARY = {
    "right": "still right",
    "within noise": "within noise",
    "lost": "lost",
    "fails": "failed",
    "not audited": "not audited",
}
NOISY = 1.02  # a decision that differs from itself by more is timed on a noisy machine
MOST = 1000  # decisions on a page
LOUD = "of {winner} for {graph}: timed against itself it is at {noise}; on an idle machine smaller losses are found"


def row_of(finding: Finding) -> tuple[str, ...]:
    """Return the cells of a decision."""
    default = next((each.ratio for each in finding.against if each.name == "default" and each.ratio), None)
    flips = f"{finding.flips} of {finding.races}" if finding.races else ""
    regret = _percent(finding.regret) if finding.regret else ""
    over = _times(default) if default else ""
    record = f"{_time(finding.recorded_s)}, {finding.record}" if finding.recorded_s else finding.record
    return finding.model, finding.graph, finding.winner, verdict_of(finding), over, regret, flips, record


def verdict_of(finding: Finding) -> str:
    """Return what the audit says of a decision."""
    if finding.verdict == "lost":
        by = f"by {_percent(finding.loss)} " if finding.loss else ""
        return f"lost {by}to {finding.lost_to}"
    words = WORDS.get(finding.verdict, finding.verdict)
    return f"{words}: {finding.reason}" if finding.reason else words


def notes_of(found: Sequence[Finding]) -> Iterator[str]:
    """Yield what else is to be known: times of another machine or release, and noise."""
    for each in found:
        if each.record == "not comparable":
            yield f"{each.winner} for {each.graph}: its recorded time is not comparable: {each.differs}"
        if each.record == "changed" and each.seconds and each.recorded_s:
            now = f"{each.seconds.median / each.recorded_s:.2f}x of the {_time(each.recorded_s)} that were recorded"
            yield f"{each.winner} for {each.graph}: a call takes {now}"
        if each.noise and max(each.noise.high, 1 / each.noise.low) > NOISY:
            noise = f"{each.noise.low:.3f}x to {each.noise.high:.3f}x"
            yield "a noisy audit " + LOUD.format(winner=each.winner, graph=each.graph, noise=noise)
        elif each.verdict != "not audited" and each.seconds and not each.noise:
            yield f"{each.winner} for {each.graph}: too few rounds to prove a loss; raise --timing-s and --rounds"
    counts = {word: sum(each.verdict == name for each in found) for name, word in IN_SUMMARY.items()}
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    yield f"{len(found)} {'decision' if len(found) == 1 else 'decisions'}: {said}."


def page_of(document: AuditDocument) -> page.Document:
    """Return the page of an audit: each decision's speedup over the other candidates, and what lost."""
    shown = document.findings[:MOST]
    *notes, text = notes_of(document.findings)
    names = [_name_of(each)[:500] for each in shown]
    return page.Document(
        title=f"Audit of {document.of}"[:500],
        subtitle=text,
        made=document.made,
        by="backend-kwargs audit",
        environment=environment_of(document.environment),
        verdict=page.Verdict(text=text, clear=not any(each.failed for each in document.findings)),
        warnings=tuple(
            page.Warned(
                text=f"{each.winner or 'a model'}: {verdict_of(each)}"[:8000],
                kind="failed" if each.verdict == "fails" else "other",
                where=name,
            )
            for each, name in zip(shown, names, strict=True)
            if each.failed or each.verdict == "not audited"
        ),
        speedups=tuple(
            page.Speedups(title=name, over=each.winner[:500], noise=interval_of(each.noise), rows=(*_rows(each),))
            for each, name in zip(shown, names, strict=True)
            if each.against
        ),
        notes=tuple(each[:8000] for each in notes[:500]),
    )


def _name_of(finding: Finding) -> str:
    """Return a decision's name on a page; of a model without one, the model's."""
    return f"{finding.model}: {finding.graph} ({finding.key[:12]})" if finding.key else finding.model


def _rows(finding: Finding) -> Iterator[page.Row]:
    """Yield the decision, and the others with their speedup over it."""
    yield page.Row(
        name=finding.winner,
        note=verdict_of(finding)[:500],
        won=not finding.failed,
        latency=interval_of(finding.seconds),
    )
    for each in finding.against:
        yield page.Row(name=each.name, reason=each.reason, speedup=interval_of(each.ratio))


def _times(ratio: Interval) -> str:
    """Return a decision's speedup, from its time over another's."""
    return f"{1 / ratio.median:.2f}x [{1 / ratio.high:.2f}, {1 / ratio.low:.2f}]"


def _percent(share: Interval | None) -> str:
    if share is None:
        return "?"
    return f"{share.median:.1%} [{share.low:.1%}, {share.high:.1%}]" if share.median else "0 %"


def _time(seconds: float | None) -> str:
    return f"{(seconds or 0.0) * 1e3:.3g} ms"
