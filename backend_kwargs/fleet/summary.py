"""What came of a plan: which units are done, what failed and why, which devices were covered, what was gained."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from backend_kwargs.fleet.board import Unit, UnitClaims, UnitDocument, document_of, name_of
from backend_kwargs.fleet.scheduling import Ended
from backend_kwargs.interval import Interval, widest

SAME_WITHIN = 1.1  # a call is as fast as itself, up to this


@dataclass(frozen=True)
class Summary:
    """What came of a plan: `known` are the store's documents by name, `missing` the reasons why no worker can run one.

    `ended` are the units that ended in this process.
    """

    units: Sequence[Unit]
    known: Mapping[str, UnitDocument]
    ended: Mapping[str, Ended] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, units: Sequence[Unit], board: UnitClaims, ended: Sequence[Ended], missing: Mapping[str, str]
    ) -> "Summary":
        """Return the summary, with the store read again for what others did."""
        known = board.known()
        failed = {name: document for name, document in known.items() if document.failed}
        # What ended here is done, also if another process has raced it for its own device since.
        own = {name_of(unit): document_of(unit, result) for unit, result, _ in ended if result and not result.failed}
        done = failed | board.done(known) | own
        return cls(units, done, {each.unit.key: each for each in ended}, missing)

    def document(self, unit: Unit) -> UnitDocument | None:
        """Return the document of a unit that is done."""
        document = self.known.get(name_of(unit))
        return document if document and not document.failed else None

    def failure(self, unit: Unit) -> str:
        """Return why a unit is not done, "" if it is, or was not begun."""
        ended = self.ended.get(unit.key)
        if ended and ended.result and ended.result.failed:
            return ended.result.failed
        if self.document(unit):
            return ""
        stored = self.known.get(name_of(unit))
        return stored.failed if stored else ""

    def status(self, unit: Unit) -> str:
        """Return whether a unit was raced here, was done before or elsewhere, failed, or is not done."""
        if self.failure(unit):
            return "failed"
        if self.document(unit):
            return "raced" if unit.key in self.ended else "done before"
        return "no worker" if unit.key in self.missing else "not done"

    def failed_among(self, own: Collection[str]) -> bool:
        """Return whether a unit failed here, or in this process's `own` share: others' are theirs to try again."""
        return any(unit.key in own or unit.key in self.ended for unit, _ in self.failures)

    @property
    def failures(self) -> list[tuple[Unit, str]]:
        """The units that failed, with their reasons."""
        return [(unit, why) for unit in self.units if (why := self.failure(unit))]

    @property
    def cost_s(self) -> float:
        """The seconds of workers that this process spent."""
        return sum(each.result.seconds for each in self.ended.values() if each.result)

    @property
    def covered(self) -> tuple[list[str], list[str]]:
        """The devices that were asked for, and those of them for which each unit is done."""
        asked = list(dict.fromkeys(unit.device for unit in self.units))
        left = {unit.device for unit in self.units if not self.document(unit)}
        return asked, [device for device in asked if device not in left]

    @property
    def same(self) -> Interval | None:
        """The widest A/A ratio of the units that were raced here: how far a call may be from itself."""
        return widest(each.result.same for each in self.ended.values() if each.result)

    @property
    def noise(self) -> Interval | None:
        """The widest A/A ratio of all units that are done, whenever they were raced."""
        return widest(document.same for unit in self.units if (document := self.document(unit)))

    @property
    def is_disturbed(self) -> bool:
        """Whether a call may differ from itself by more than a quiet machine explains."""
        return self.same is not None and self.same.reach > SAME_WITHIN
