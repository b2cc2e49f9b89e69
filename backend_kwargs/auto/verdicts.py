"""The verdicts of places in stores: another model with such a place times nothing.

A name is "verdicts/<device>/<place>.<what else decides>.json". What a place shows by itself is not proven in a whole
graph: a verdict stays in folders of this machine until the timing of one has confirmed it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backend_kwargs.auto.machine import Machine, device_of, variant_of
from backend_kwargs.facts.decision import EAGER, RaceRow, by_name
from backend_kwargs.interval import Interval
from backend_kwargs.keys import key
from backend_kwargs.options.layers import Options
from backend_kwargs.stores.documents import Document, Kind
from backend_kwargs.stores.layered import Layered

if TYPE_CHECKING:
    from backend_kwargs.rewrites.places import Place

FOLDER = "verdicts/"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a race of a place has shown: seconds as it is and rewritten, the speedup, or why there is none.

    `calls` are those of libraries and of our operators in the rewritten form, as `measure.operator_times` has them.
    """

    default_s: float = 0.0
    rewritten_s: float = 0.0
    speedup: Interval | None = None
    why: str = ""
    is_little: bool = False  # so that it was not raced
    limit_s: float = 0.0  # the least that the device could take, 0 if that is not known
    calls: dict[str, tuple[int, float]] = field(default_factory=dict)
    confirmed: bool = False  # whether a whole graph was faster with it than without


UNKNOWN = Verdict()


def check(verdict: Verdict) -> None:
    """Raise ValueError if a verdict has no finite figures."""
    speedup = verdict.speedup or Interval(math.nan, math.nan, math.nan)
    numbers = verdict.default_s, verdict.rewritten_s, speedup.median, speedup.low, speedup.high
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError("A verdict must have seconds and a speedup above 0.")


KIND = Kind("verdict", Verdict, check=check, stays=lambda verdict: not verdict.confirmed)


@dataclass(frozen=True)
class Verdicts:
    """The verdicts on such a device, under these options of the user's and these releases; all anew if `again`."""

    layered: Layered[Verdict]
    here: Machine
    fixed: Options
    again: bool = False

    @property
    def folder(self) -> str:
        """The prefix of the names on such a device."""
        return f"{FOLDER}{device_of(self.here)}/"

    def find(self, place: "Place") -> Verdict | None:
        """Return the verdict of a place, None if it has none."""
        if self.again:
            return None
        name = self._name(place)
        found = self.layered.group(self.folder, place.signature, lambda each: each == name)
        return found[name].body if name in found else None

    def put(self, place: "Place", verdict: Verdict) -> None:
        """Keep a verdict that has a speedup."""
        if verdict.speedup:
            self.layered.put(self.folder, place.signature, Document(self._name(place), verdict))

    def _name(self, place: "Place") -> str:
        release, options = self.here.get("backend-kwargs"), sorted(self.fixed.items())
        others = key("verdict", release=release, machine=variant_of(self.here), options=options)
        return f"{self.folder}{place.signature}.{others}.json"


def confirmed_by(rows: Sequence[RaceRow]) -> set[str]:
    """Return the places with which a whole graph was faster than without, all else equal."""
    named, found = by_name(rows), set[str]()
    for row in rows:
        if row.speedup and (other := named.get(row.against)) and EAGER not in (row.name, other.name):
            (mine, rest), (theirs, others_rest) = map(_divided, (row.options, other.options))
            if rest == others_rest and mine > theirs and row.speedup.low > 1:
                found |= mine - theirs
            if rest == others_rest and mine < theirs and row.speedup.high < 1:
                found |= theirs - mine
    return found


def _divided(options: Options) -> tuple[set[str], Options]:
    """Return the rewrites of a candidate's options, and the others."""
    return {*options.get("rewrites", ())}, {name: value for name, value in options.items() if name != "rewrites"}
