"""Options of `auto`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from backend_kwargs.options import precisions
from backend_kwargs.options.layers import Options
from backend_kwargs.options.option import Where, declared
from backend_kwargs.options.requirements import Rule
from backend_kwargs.options.trust import AUTO_DATA

Seconds = Annotated[float, Where("of at least 0", lambda seconds: seconds >= 0)]
Count = Annotated[int, Where("of at least 1", lambda count: count >= 1)]
Tolerance = Annotated[float, Where("above 0", lambda tolerance: tolerance > 0)]


@dataclass(frozen=True, slots=True)
class RaceSettings:
    """The options of a race, with their defaults."""

    auto: Annotated[bool, "race candidates for each graph, keep the fastest one that passes the accuracy check"] = False
    objective: Annotated[Literal["latency", "memory"], "what to minimize"] = "latency"
    effort: Annotated[Literal["quick", "full"], "candidates to race: few, or all that can gain"] = "quick"
    candidates: Annotated[
        list[str] | None, "steps, templates and other compilers, such as 'tmpl-tvm', to race; None: the built-in steps"
    ] = None
    budget_s: Annotated[
        Seconds,
        "seconds for the races of a call's graphs; a candidate whose predicted time exceeds what is left is skipped",
    ] = 30.0
    process_budget_s: Annotated[Seconds, "seconds for all races of this process; then no new race starts"] = 600.0
    most_races: Annotated[Count, "races of one computation; later shapes reuse the latest winner"] = 3
    tolerance: Annotated[Tolerance | None, "absolute and relative tolerance; None: 1e-3, in training 1e-2"] = None
    race_custom_ops: Annotated[
        bool, "race graphs with operators that are not torch's, which then run many times; False: default is used"
    ] = True
    race: Annotated[
        Literal["missing", "never", "always"],
        "when to race; missing: unless a decision is stored; always: tiny graphs and all sizes too",
    ] = "missing"
    store: Annotated[str | None, "file of decisions; None: BACKEND_KWARGS_STORE, or in the user's data folder"] = None
    on_progress: Annotated[
        Callable[[str, float], None] | None,
        "called during a race with the candidate's name and the fraction done; None: a line on a terminal",
    ] = None
    precision: Annotated[
        precisions.Names,
        "lower precisions that may be used, such as bf16 or int8-dynamic; needs max_error; int8 and fp8 keep converted "
        "weights, which may miss a change through .data",
    ] = ()
    max_error: Annotated[
        precisions.Bound | None, "largest relative RMSE of an output to a float64 reference under a lower precision"
    ] = None

    @classmethod
    def of(cls, options: Options) -> "RaceSettings":
        """Return the settings given in `options`."""
        return cls(**{name: options[name] for name in OPTIONS if name in options})


OPTIONS = declared(RaceSettings, AUTO_DATA)
RULES = tuple(
    Rule(name, unless=lambda value: "" if value("auto") else "it is read only under auto")
    for name in OPTIONS
    if name not in ("auto", *precisions.OPTIONS)
)
