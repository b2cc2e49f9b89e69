"""Options of `auto`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from backend_kwargs.options import Where, declared
from backend_kwargs.requirements import Rule
from backend_kwargs.trust import AUTO_DATA

Seconds = Annotated[float, Where("of at least 0", lambda seconds: seconds >= 0)]
Count = Annotated[int, Where("of at least 1", lambda count: count >= 1)]
Tolerance = Annotated[float, Where("above 0", lambda tolerance: tolerance > 0)]


@dataclass(frozen=True, slots=True)
class Settings:
    """Every option of a race, by its name, with its default."""

    auto: Annotated[bool, "race candidates for each graph, keep the fastest one that passes the accuracy check"] = False
    objective: Annotated[Literal["latency", "memory"], "what the winner has least of"] = "latency"
    effort: Annotated[Literal["quick", "full"], "candidates to race: few, or all that can gain"] = "quick"
    candidates: Annotated[list[str] | None, "steps, templates and other compilers, such as 'tmpl-tvm', to race; None: the built-in steps"] = None
    budget_s: Annotated[
        Seconds,
        "seconds for a graph's race: no candidate starts that is predicted to take longer than what is left",
    ] = 30.0
    process_budget_s: Annotated[Seconds, "seconds for all races of this process; no race is begun after them"] = 600.0
    most_races: Annotated[Count, "races of one computation; later shapes reuse the latest winner"] = 3
    tolerance: Annotated[Tolerance | None, "of numbers, absolute and relative; None: 1e-3, in training 1e-2"] = None
    race_custom_ops: Annotated[
        bool, "race graphs with operators that are not torch's, which then run many times; False: they take default"
    ] = True
    race: Annotated[
        Literal["missing", "never", "always"],
        "when to race; missing: unless a decision is stored; always: tiny graphs and all sizes too",
    ] = "missing"
    store: Annotated[str | None, "file of decisions; None: BACKEND_KWARGS_STORE, or in the user's data folder"] = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Settings":
        """Return the settings that stand in `options`."""
        return cls(**{name: options[name] for name in OPTIONS if name in options})


OPTIONS = declared(Settings, AUTO_DATA)
RULES = tuple(
    Rule(name, unless=lambda value: "" if value("auto") else "it is read only under auto")
    for name in OPTIONS
    if name != "auto"
)
