"""What a race may be told."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from backend_kwargs.options import Option
from backend_kwargs.requirements import Rule

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        option.name: option
        for option in (
            Option("auto", bool, False, "race candidates for each graph and keep the fastest that is right"),
            Option("candidates", list[str] | None, None, "templates to race, in place of the built-in steps"),
            Option("budget_s", float, 60.0, "seconds for the race of one graph; the candidate in progress is finished"),
            Option("process_budget_s", float, 600.0, "seconds for all races of this process; then no graph is raced"),
            Option("objective", Literal["latency", "memory"], "latency", "what the winner has least of"),
            Option("effort", Literal["quick", "full"], "quick", "few candidates, or all that can gain"),
            Option(
                "tolerance", float | None, None, "of numbers, absolute and relative; None is 1e-3, in training 1e-2"
            ),
            Option(
                "store", str | None, None, "file of decisions; None is BACKEND_KWARGS_STORE or the user's data folder"
            ),
            Option(
                "race", Literal["missing", "never", "always"], "missing", "whether to race where no decision is stored"
            ),
            Option("most_races", int, 3, "races of one computation for other sizes; then the last winner is inherited"),
        )
    }
)


RULES = tuple(
    Rule(name, unless=lambda value: "" if value("auto") else "it is read only under auto")
    for name in OPTIONS
    if name != "auto"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a race, each as given or by default."""

    candidates: tuple[str, ...] | None = None
    budget_s: float = 60.0
    process_budget_s: float = 600.0
    objective: str = "latency"
    effort: Literal["quick", "full"] = "quick"
    tolerance: float | None = None
    store: str | None = None
    race: str = "missing"
    most_races: int = 3

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Settings":
        """Return the settings that stand in `options`."""
        given = {f.name: options[f.name] for f in fields(cls) if f.name in options}
        named = given.get("candidates")
        return cls(**given | ({"candidates": tuple(named)} if named is not None else {}))
