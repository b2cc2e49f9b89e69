"""An audit as a table, and as a page."""

from collections.abc import Iterator, Sequence

from backend_kwargs.fleet.findings import AuditDocument, Finding
from backend_kwargs.interval import Interval
from backend_kwargs.page import document as page
from backend_kwargs.page.figures import environment_of, file_of, interval_of, measured_on

COLUMNS = ("model", "graph", "winner", "verdict", "over default", "regret", "flips", "recorded")
WORDS = {"right": "still right"}
IN_SUMMARY = {
    "right": "still right",
    "within noise": "within noise",
    "lost": "lost",
    "fails": "failed",
    "not audited": "not audited",
}
IDLE = "on an idle machine smaller losses are found"
NOISY = 1.02  # a decision that differs from itself by more is timed on a noisy machine
MOST = 1000  # decisions on a page
AGAIN = "What lost is decided anew by --update, or by building the bundle again."
ITSELF = Interval(1.0, 1.0, 1.0)


def row_of(finding: Finding) -> tuple[str, ...]:
    """Return the cells of a decision."""
    default = next((each.ratio for each in finding.against if each.name == "default" and each.ratio), None)
    flips = f"{finding.flips} of {finding.races}" if finding.races else ""
    regret = _percent(finding.regret) if finding.regret else ""
    over = Interval(1 / default.median, 1 / default.high, 1 / default.low).as_ratio() if default else ""
    record = f"{_time(finding.recorded_s)}, {finding.record}" if finding.recorded_s else finding.record
    return finding.model, finding.graph, finding.winner, verdict_of(finding), over, regret, flips, record


def verdict_of(finding: Finding) -> str:
    """Return what the audit says of a decision."""
    if finding.verdict == "lost":
        by = f"by {_percent(finding.loss)} " if finding.loss else ""
        return f"lost {by}to {finding.lost_to}"
    words = WORDS.get(finding.verdict, finding.verdict)
    return f"{words}: {finding.reason}" if finding.reason else words


def remarks_on(each: Finding) -> Iterator[page.Warned]:
    """Yield what else is to be known of a decision: its places, times of another machine or release, and noise."""
    where = f"{each.winner} for {each.graph}"
    yield from (page.Warned(place, where=where) for place in each.places)
    if each.record == "not comparable":
        yield page.Warned(f"its recorded time is not comparable: {each.differs}", where=where)
    if each.record == "changed" and each.seconds and each.recorded_s:
        now = f"{each.seconds.median / each.recorded_s:.2f}x of the {_time(each.recorded_s)} that were recorded"
        yield page.Warned(f"a call takes {now}", where=where)
    if each.noise and each.noise.reach > NOISY:
        noise = f"{each.noise.low:.3f}x to {each.noise.high:.3f}x"
        yield page.Warned(f"a noisy audit: timed against itself it is at {noise}; {IDLE}", "noise", where)
    elif each.verdict != "not audited" and each.seconds and not each.noise:
        yield page.Warned("too few rounds to prove a loss; leave --quick out", "noise", where)


def notes_of(found: Sequence[Finding]) -> Iterator[str]:
    """Yield the remarks on each decision, then the count of the verdicts."""
    yield from (f"{each.where}: {each.text}" for finding in found for each in remarks_on(finding))
    yield f"{_counted(found)}."


def _counted(found: Sequence[Finding]) -> str:
    counts = {word: sum(each.verdict == name for each in found) for name, word in IN_SUMMARY.items()}
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{len(found)} {'decision' if len(found) == 1 else 'decisions'}: {said}"


def page_of(document: AuditDocument) -> page.Document:
    """Return the page of an audit: each decision's speedup over the other candidates, and what lost."""
    shown = [(each, _name_of(each)) for each in document.findings[:MOST]]
    remarks = [remark for each in document.findings for remark in remarks_on(each)]
    lost = [each for each in document.findings if each.verdict == "lost"]
    worst = max(lost, key=lambda each: each.loss.median if each.loss else 0.0, default=None)
    environment = environment_of(document.environment)
    return page.Document(
        title=f"Audit of {file_of(document.of)}",
        subtitle=f"{len(document.findings)} decisions {measured_on(environment)}",
        made=document.made,
        by="backend-kwargs audit",
        environment=environment,
        verdict=page.Verdict(
            text=f"{_counted(document.findings)}{f'; {worst.winner} {verdict_of(worst)}' if worst else ''}."
        ),
        warnings=(
            *(_warned(each, name) for each, name in shown if each.failed or each.verdict == "not audited"),
            *(each for each in remarks[:MOST] if each.kind == "noise"),
        ),
        speedups=tuple(
            page.Speedups(title=name, over=each.winner, noise=interval_of(each.noise), rows=(*_rows(each),))
            for each, name in shown
            if each.against or each.failed
        ),
        notes=tuple(f"{each.where}: {each.text}" for each in remarks if each.kind != "noise")[:500],
    )


def _warned(finding: Finding, name: str) -> page.Warned:
    """Return what became of a decision that is not right: one that lost runs, and can be replaced."""
    text = f"{finding.winner or 'a model'}: {verdict_of(finding)}"
    if finding.verdict == "lost":
        return page.Warned(f"{text}. {AGAIN}", "advice", name)
    return page.Warned("it fails", "failed", name) if finding.failed else page.Warned(text, "other", name)


def _name_of(finding: Finding) -> str:
    """Return a decision's name on a page; of a model without one, the model's."""
    model = file_of(finding.model)
    return f"{model}: {finding.graph} ({finding.key[:12]})" if finding.key else model


def _rows(finding: Finding) -> Iterator[page.Row]:
    """Yield the decision, and the others with their speedup over it."""
    yield page.Row(
        name=finding.winner,
        status=finding.verdict if finding.failed else "pass",
        reason=verdict_of(finding) if finding.verdict == "lost" else finding.reason.partition(": ")[2],
        note="baseline" if finding.failed else verdict_of(finding),
        won=not finding.failed,
        speedup=ITSELF if finding.seconds else None,
        latency=interval_of(finding.seconds),
    )
    for each in finding.against:
        status, failed, why = each.reason.partition(": ")
        yield page.Row(
            each.name, *((status, why) if failed else ("pass", each.reason)), speedup=interval_of(each.ratio)
        )


def _percent(share: Interval | None) -> str:
    if share is None:
        return "?"
    return f"{share.median:.1%} [{share.low:.1%}, {share.high:.1%}]" if share.median else "0 %"


def _time(seconds: float | None) -> str:
    return f"{(seconds or 0.0) * 1e3:.3g} ms"
