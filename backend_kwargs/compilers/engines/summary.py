"""The summary of an engine's part in one compile: an attribute of the compiled callable, read by `report`."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EnginePart:
    """A part of a graph that the engine compiled: the number of ATen operators, and the seconds of its compile."""

    operators: int
    seconds: float


@dataclass(slots=True)
class EngineSummary:
    """The graphs of one compile; `fallbacks` maps operators that run in eager to the reasons.

    `notes` say what the engine does otherwise than the options ask for.
    """

    engine: str
    partitions: list[EnginePart] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
