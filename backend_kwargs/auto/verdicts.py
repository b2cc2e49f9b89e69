"""The verdicts of places in stores: another model with such a place times nothing.

A name is "verdicts/<device>/<place>.<what else decides>.json". What a place shows by itself is not proven in a whole
graph: a verdict stays in folders of this machine until the timing of one has confirmed it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from backend_kwargs.auto.machine import Machine, device_of, variant_of
from backend_kwargs.facts.decision import EAGER, RaceRow, by_name
from backend_kwargs.interval import Interval
from backend_kwargs.keys import key
from backend_kwargs.options.option import Options
from backend_kwargs.stores.documents import Document, Kind
from backend_kwargs.stores.layered import Layered

if TYPE_CHECKING:
    from backend_kwargs.rewrites.traced import Place

FOLDER = "verdicts/"
LARGEST = 1e15  # of any figure, so that no product of two overflows
HALF = 0.5


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
    """Raise ValueError if a verdict has no figures that races can compute with."""
    speedup = verdict.speedup or Interval(0.0, 0.0, 0.0)
    calls = [number for call in verdict.calls.values() for number in call]
    numbers = verdict.default_s, verdict.rewritten_s, speedup.median, speedup.low, speedup.high, *calls
    if not all(0 < number < LARGEST for number in numbers) or not 0 <= verdict.limit_s < LARGEST:
        raise ValueError("A verdict must have seconds, a speedup and counts of calls above 0, and no limit below 0.")
    if not speedup.low <= speedup.median <= speedup.high:
        raise ValueError("A speedup must lie within its interval.")


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

    def find_all(self, places: Iterable["Place"]) -> "dict[Place, Verdict]":
        """Return the verdicts of those places that have one; a store that has not answered is asked for no more."""
        found, layered = dict["Place", Verdict](), self.layered
        for place in () if self.again else places:
            there = layered.looked_up(self.folder, place.signature)
            layered = replace(layered, layers={layer: layered.layers[layer] for layer in there})
            for document in layered.newest(there, self._name(place).__eq__).values():
                if document.body:
                    found[place] = document.body
        return found

    def put(self, found: "Mapping[Place, Verdict]") -> None:
        """Keep those verdicts that have a speedup."""
        named = [(place.signature, Document(self._name(place), each)) for place, each in found.items() if each.speedup]
        if named:
            self.layered.put(self.folder, *named)

    def _name(self, place: "Place") -> str:
        release, options = self.here.get("backend-kwargs"), sorted(self.fixed.items())
        others = key("verdict", release=release, machine=variant_of(self.here), options=options, around=place.situation)
        return f"{self.folder}{place.signature}.{others}.json"


def confirmed_by(rows: Sequence[RaceRow], verdicts: "Mapping[Place, Verdict]", slack: float) -> "set[Place]":
    """Return the places, faster alone, with which a whole graph was faster than without, by the slack, all else equal.

    Of several in one comparison each must be faster alone, and the graph must have gained half of what they save so:
    else one of them may do harm there.
    """
    places = {str(place): place for place, each in verdicts.items() if each.speedup and each.speedup.low > 1}
    named, found = by_name(rows), set["Place"]()
    for row in rows:
        if not row.speedup or (other := named.get(row.against)) is None or EAGER in (row.name, other.name):
            continue
        for fast, slow, is_sure in (
            (row, other, row.speedup.low > 1 + slack),
            (other, row, row.speedup.high * (1 + slack) < 1),
        ):
            (mine, rest), (theirs, others_rest) = map(_divided, (fast.options, slow.options))
            names = mine - theirs
            if is_sure and rest == others_rest and mine > theirs and names <= places.keys():
                more = {places[name] for name in names}
                saved_s = sum(each.count * (verdicts[each].default_s - verdicts[each].rewritten_s) for each in more)
                if len(more) == 1 or (slow.seconds or 0.0) - (fast.seconds or 0.0) >= HALF * saved_s:
                    found |= more
    return found


def _divided(options: Options) -> tuple[set[str], Options]:
    """Return the rewrites of a candidate's options, and the others."""
    return {*options.get("rewrites", ())}, {name: value for name, value in options.items() if name != "rewrites"}
