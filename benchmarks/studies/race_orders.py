"""In which order races try their candidates: as they were raced, by the slack, and by gains predicted from other cases.

Gains are taken as independent factors of a call's time, and losses as none. The regret of an order is how much slower
a call is than at the end, on average over the seconds of compiling. CUDA graphs are left out: they are default's code.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from backend_kwargs.auto.predictions import RecordedRace, predicted_for
from benchmarks.studies.recorded_races import GRAPHS, Race, outcomes

UNKNOWN_COST = 0.65  # of default's compile
ORDERS = ("as raced", "predicted", "best")


@dataclass(frozen=True, slots=True)
class Order:
    """One order in one race: its regret, the compiles until the best candidate has run, and whether that came first."""

    regret: float
    compiles: float
    first: bool


def orders_of(race: Race, recorded: Sequence[RecordedRace]) -> dict[str, Order]:
    """Return the orders of a race of two candidates or more; predictions are from the records of other cases."""
    known = [each for each in recorded if each.case == " ".join(filter(None, (race.case, race.mode)))]
    kinds = [each for each in known if each.device == race.device]
    found = {name: both for name, both in outcomes(race).items() if name != "default" and not name.startswith(GRAPHS)}
    gains = {row["name"]: found[row["name"]][0] for row in race.rows if found.get(row["name"], (None,))[0] is not None}
    if len(gains) < 2 or not kinds:
        return {}
    others = [each for each in recorded if each.case.split()[0] != race.case.split()[0]]
    of = {name: predicted_for(name, kinds[0].kind, race.device, others, training=kinds[0].training) for name in gains}
    costs = {name: found[name][1] or of[name].cost or UNKNOWN_COST for name in gains}
    rates = {name: each.gain / (each.cost or UNKNOWN_COST) for name, each in of.items() if each.gain is not None}
    mean = fmean(rates.values()) if rates else 0.0
    saved = {name: max(gain or 0.0, 0.0) for name, gain in gains.items()}
    sorted_by = (
        list(gains),
        sorted(gains, key=lambda name: -rates.get(name, mean)),
        sorted(gains, key=lambda name: -saved[name] / costs[name]),
    )
    return {name: _order(order, saved, costs) for name, order in zip(ORDERS, sorted_by, strict=True)}


def _order(names: Sequence[str], saved: Mapping[str, float], costs: Mapping[str, float]) -> Order:
    best = max(names, key=saved.__getitem__)
    now, spent = 1.0, 0.0
    for name in names:
        spent += costs[name] * now
        now *= 1 - saved[name]
    until = math.fsum(costs[name] for name in names[: names.index(best) + 1])
    return Order(spent / math.fsum(costs[name] for name in names) / now - 1, until, names[0] == best)


def report_of_orders(races: Sequence[Race], recorded: Sequence[RecordedRace]) -> Iterator[str]:
    """Yield a line for each order on each type of device."""
    for device in sorted({race.device for race in races}):
        found = [made for race in races if race.device == device and (made := orders_of(race, recorded))]
        for name in ORDERS if found else ():
            mine = [each[name] for each in found]
            yield (
                f"{device}, {name}: regret {fmean(each.regret for each in mine):.1%}, best after "
                f"{fmean(each.compiles for each in mine):.2f} compiles, first in {sum(each.first for each in mine)} "
                f"of {len(mine)} races."
            )
