"""What an engine has of the graphs of one compile: what a compiled callable carries, and a report reads."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EnginePart:
    """A piece of a graph that the engine compiled: how many operators of ATen, and the seconds that it took."""

    operators: int
    seconds: float


@dataclass(slots=True)
class EngineSummary:
    """The graphs of one compile; `fallbacks` has the reasons why operators run in eager."""

    engine: str
    partitions: list[EnginePart] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
