"""What audits found: whether each decision is still right, its regret, its flips, and whether its time is reproduced.

A decision has lost if it is surely slower than another candidate by more than two runs of one callable may differ. Of
all audits of decisions that have not lost, 1 % raise an alarm at most, however many decisions each has.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from backend_kwargs import trial
from backend_kwargs.auto.audit import Contender, Measured
from backend_kwargs.auto.machine import Machine, difference
from backend_kwargs.auto.reporting import what_is_open
from backend_kwargs.errors import shortened
from backend_kwargs.facts.decision import Decision, RaceRow
from backend_kwargs.interval import Interval
from backend_kwargs.page.figures import now

LEVEL = 0.01  # the share of audits without a loser that find one
MARGIN = 0.02  # what two runs of one callable may differ by on a quiet machine, as in races
REPRODUCED = 1.1  # what one callable may differ by between two processes
NAME, TEXT = 500, 8000  # characters: what a document's maker wrote may be a megabyte
Name = Annotated[str, Meta(max_length=NAME)]
Text = Annotated[str, Meta(max_length=TEXT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Verdict = Literal["right", "within noise", "lost", "fails", "not audited"]


class Against(Struct, frozen=True, omit_defaults=True):
    """Another candidate: `ratio` is the decision's time over its own, above 1 if the decision is slower.

    `p` is the p-value of the decision being slower by no more than the margin. Without a ratio, `reason` says why.
    """

    name: Name
    options: dict[Name, Any] = {}
    ratio: Interval | None = None
    p: Share = 1.0
    reason: Text = ""


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the audit of one decision found; times in seconds, shares of 1.

    `lost_to` is what the decision lost to, or has the least time over, and `p` its p-value, adjusted for all
    comparisons of the audit. `regret` is the decision's time over that of `best`, less 1. Of `races` fresh races,
    `others` chose another candidate, and `flips` one that differs beyond noise. `noise` is the decision timed against
    itself, `seconds` its time now, `recorded_s` when it was made; `record` compares both, and `differs` says why that
    cannot be. `places` say what is stored of those that it has rewritten.
    """

    verdict: Verdict
    model: Name
    key: Name
    graph: Text = ""
    winner: Name = ""
    options: dict[Name, Any] = {}
    reason: Text = ""
    against: tuple[Against, ...] = ()
    lost_to: Name = ""
    loss: Interval | None = None
    p: Share = 1.0
    best: Name = ""
    regret: Interval | None = None
    races: int = 0
    others: int = 0
    flips: int = 0
    noise: Interval | None = None
    seconds: Interval | None = None
    recorded_s: float | None = None
    record: Literal["", "reproduced", "changed", "not comparable", "not recorded"] = ""
    differs: Text = ""
    places: tuple[Text, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it makes the audit fail."""
        return self.verdict in ("lost", "fails")


class AuditDocument(Struct, frozen=True, kw_only=True):
    """An audit: what was audited, on which machine, and what it found of each decision."""

    of: Name
    made: Name
    environment: dict[Name, Any]
    findings: tuple[Finding, ...]
    schema: Literal[1] = 1
    level: float = LEVEL
    margin: float = MARGIN


def document_of(of: str, environment: Mapping[str, object], findings: Sequence[Finding]) -> AuditDocument:
    """Return an audit as data."""
    return AuditDocument(of=shortened(of, NAME), made=now(), environment=dict(environment), findings=tuple(findings))


def as_json(document: AuditDocument) -> str:
    """Return an audit as JSON."""
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=repr), indent=1).decode() + "\n"


@dataclass(frozen=True, slots=True)
class Audited:
    """A decision, with the model and the machine that it was measured on; if it was not, `why`."""

    model: str
    decision: Decision
    here: Machine
    measured: Measured | None = None
    why: str = ""
    judges_time: bool = True
    places: tuple[str, ...] = ()


def judged(audited: Sequence[Audited]) -> list[Finding]:
    """Return what audits found, with Holm's correction over their decisions."""
    found = [_finding(each) for each in audited]
    timed = [at for at, finding in enumerate(found) if finding.lost_to]
    adjusted = trial.holm([found[at].p for at in timed])
    for at, p in zip(timed, adjusted, strict=True):
        lost = p <= LEVEL and audited[at].judges_time
        changes: dict[str, Any] = {"p": p} | ({"verdict": "lost"} if lost else {})
        found[at] = msgspec.structs.replace(found[at], **changes)
    return found


def _finding(audited: Audited) -> Finding:
    """Return what is known of one decision alone."""
    decision, measured = audited.decision, audited.measured
    known: dict[str, Any] = {
        "model": shortened(audited.model, NAME),
        "key": shortened(decision.key, NAME),
        "graph": shortened(decision.facts, TEXT),
        "winner": shortened(decision.winner, NAME),
        "places": tuple(shortened(each, TEXT) for each in audited.places),
        "options": {shortened(name, NAME): value for name, value in decision.options.items()},
    }
    if measured is None:
        return Finding(verdict="not audited", reason=shortened(audited.why, TEXT), **known)
    own, *others = measured.contenders
    mine = measured.of(own)
    if not mine:
        return Finding(verdict="fails", reason=_why(own.row), **known)
    noise = trial.sure_ratio(measured.again, mine).ratio
    ratios = {each.label: _ratio(each, own, measured, noise) for each in others}
    against = [_against(each, own, ratios[each.label]) for each in others]
    return Finding(
        verdict="right" if all(each is None or each.ratio.high <= 1 for each in ratios.values()) else "within noise",
        reason=shortened(f"provisional: {what_is_open(decision)}", TEXT) if decision.provisional else "",
        against=tuple(against),
        noise=_shown(noise),
        seconds=trial.median_interval(mine),
        **_loss(ratios),
        **_regret(own, measured, ratios),
        **_flips(own, measured, ratios),
        **_record(audited, trial.percentile(mine, 0.5)),
        **known,
    )


def _ratio(other: Contender, own: Contender, measured: Measured, noise: Interval) -> trial.SureRatio | None:
    """Return the decision's time over another's; None if that has the same code, or does not run."""
    theirs = measured.of(other)
    if other.code_of == own.code_of or not theirs:
        return None
    band = noise.reach - 1
    return trial.sure_ratio(measured.of(own), theirs, max(MARGIN, band))


def _against(other: Contender, own: Contender, ratio: trial.SureRatio | None) -> Against:
    row = other.row
    if ratio is None:
        same = other.code_of == own.code_of
        why = "it has the decision's code" if same else _why(row)
        return Against(name=other.label, options=dict(row.options), reason=why)
    return Against(name=other.label, options=dict(row.options), ratio=_shown(ratio.ratio), p=ratio.p)


def _why(row: RaceRow) -> str:
    """Return how a candidate failed."""
    return shortened(f"{row.status}: {row.reason}", TEXT)


def _loss(ratios: Mapping[str, trial.SureRatio | None]) -> dict[str, Any]:
    """Return what the decision has lost to, if it has, with a p-value for all of its comparisons."""
    timed = {label: ratio for label, ratio in ratios.items() if ratio}
    if not timed:
        return {}
    label = min(timed, key=lambda label: timed[label].p)
    return {"lost_to": label, "loss": _less_1(timed[label].ratio), "p": min(1.0, timed[label].p * len(timed))}


def _regret(own: Contender, measured: Measured, ratios: Mapping[str, trial.SureRatio | None]) -> dict[str, Any]:
    timed = {label: ratio.ratio for label, ratio in ratios.items() if ratio}
    best = max(timed, key=lambda label: timed[label].median, default="")
    if not best or timed[best].median <= 1:
        return {"best": own.label, "regret": Interval(0.0, 0.0, 0.0)}
    return {"best": best, "regret": _less_1(timed[best])}


def _flips(own: Contender, measured: Measured, ratios: Mapping[str, trial.SureRatio | None]) -> dict[str, Any]:
    """Return how many fresh races chose another candidate, and how many of these differ beyond noise."""
    chosen = [label for label in measured.fresh if label != own.label]
    apart = [ratio.ratio for label in chosen if (ratio := ratios.get(label))]
    flips = sum(each.low > 1 + MARGIN or each.high < 1 - MARGIN for each in apart)
    return {"races": len(measured.fresh), "others": len(chosen), "flips": flips}


def _record(audited: Audited, now_s: float) -> dict[str, Any]:
    """Return whether the time that was recorded is that of today, if both are of one machine and release."""
    decision = audited.decision
    recorded = next((row.seconds for row in decision.rows if row.won and row.seconds), None)
    if recorded is None:
        return {"record": "not recorded"}
    if differs := difference(decision.machine, audited.here):
        return {"record": "not comparable", "recorded_s": recorded, "differs": shortened(differs, TEXT)}
    same = 1 / REPRODUCED <= now_s / recorded <= REPRODUCED
    return {"record": "reproduced" if same else "changed", "recorded_s": recorded}


def _shown(ratio: Interval) -> Interval | None:
    """Return an interval, None if too few rounds have bounded it."""
    return ratio if ratio.high < float("inf") else None


def _less_1(ratio: Interval) -> Interval | None:
    return Interval(ratio.median - 1, ratio.low - 1, ratio.high - 1) if ratio.high < float("inf") else None


def renewed(audited: Audited, finding: Finding) -> Decision | None:
    """Return the decision as the audit leaves it, with today's times; where it lost, the fastest in its place.

    None if it was not measured, or nothing runs.
    """
    measured = audited.measured
    if measured is None or not measured.samples:
        return None
    able = [each for each in measured.contenders if measured.of(each)]
    seconds = {each.label: trial.percentile(measured.of(each), 0.5) for each in able}
    own = measured.contenders[0]
    won = min(able, key=lambda each: seconds[each.label]) if finding.failed else own
    rows = tuple(
        replace(  # under the candidate's own name
            each.row,
            name=each.name,
            seconds=seconds.get(each.label),
            won=each is won,
            speedup=None,
            against="",
            began_s=None,
            led_s=None,
            timed_s=None,
        )
        for each in measured.contenders
    )
    chosen = next(row for row in rows if row.won)
    return replace(
        audited.decision,
        winner=chosen.name,
        options=chosen.options,
        compiler=chosen.compiler,
        rows=rows,
        machine=dict(audited.here),
        made=time.time(),
        differs="",
    )
