"""The summary of an engine's part in one compile: an attribute of the compiled callable, read by `report`."""

from dataclasses import dataclass, field

from backend_kwargs.compilers.fell_back import PartsSummary


@dataclass(frozen=True, slots=True)
class EnginePart:
    """A part of a graph that the engine compiled: the number of ATen operators, and the seconds of its compile."""

    operators: int
    seconds: float


@dataclass(slots=True)
class EngineSummary(PartsSummary):
    """The graphs of one compile; `notes` say what the engine does otherwise than the options ask for."""

    notes: list[str] = field(default_factory=list)
