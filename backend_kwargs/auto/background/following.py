"""Graphs of equal code: the race of the first decides, and the others race what its winner consists of."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from backend_kwargs.auto.candidates import UNRECORDED, RaceCandidate
from backend_kwargs.facts.background import Timeline
from backend_kwargs.facts.decision import Decision, RaceRow

SILENT_S = 60.0  # a race in which nothing happens for so long keeps no other one waiting
HARMLESS = ("pass", "same code", "skipped", "timeout")


@dataclass
class Following:
    """What one race takes over from that of `leader`, None if it stands alone."""

    leader: Timeline | None
    heard: int = 0
    heard_at: float = field(default_factory=time.perf_counter)

    def waits(self) -> bool:
        """Return whether the leader's race goes on."""
        if self.leader is None or self.leader.ended:
            return False
        now, count = time.perf_counter(), len(self.leader.events)
        if count != self.heard:
            self.heard, self.heard_at = count, now
        return now - self.heard_at < SILENT_S

    def parts(self, candidates: Sequence[RaceCandidate]) -> Sequence[RaceCandidate]:
        """Return the candidates that the leader's winner consists of; all, and stand alone, if that is not known."""
        decision = self.leader.decision if self.leader is not None and self.leader.ended else None
        if decision is None or decision.cut_s or decision.compiler:
            self.leader = None
            return candidates
        parts = [each for each in candidates if not each.compiler and _within(each, decision)]
        made = {*UNRECORDED, *(name for each in parts for name in each.options)}
        if not {*decision.options} <= made:
            self.leader = None
            return candidates
        return parts

    def stores(self, rows: Sequence[RaceRow]) -> bool:
        """Return whether these rows are to be stored, although the leader's are, which know of more candidates."""
        return self.leader is None or any(row.status not in HARMLESS for row in rows)


def _within(candidate: RaceCandidate, decision: Decision) -> bool:
    """Return whether a decision has all options of a candidate; of lists, such as of rewrites, all members."""

    def listed(value: object) -> Sequence[object]:
        return value if isinstance(value, list | tuple) else [value]

    chosen = decision.options
    return all(
        name in chosen and all(each in listed(chosen[name]) for each in listed(value))
        for name, value in candidate.options.items()
    )
