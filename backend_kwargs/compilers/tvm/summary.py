"""What TVM has of the graphs of one compile: what a compiled callable carries, and a report reads."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Partition:
    """A piece that TVM compiled, of the "inference", "forward" or "backward" graph; `tuned` counts its kernels."""

    graph: str
    operators: int
    seconds: float
    target: str
    tuned: int
    notes: tuple[str, ...]


@dataclass(slots=True)
class TVMSummary:
    """What became of the graphs of one compile; a backward graph adds to it when it is compiled."""

    partitions: list[Partition] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
