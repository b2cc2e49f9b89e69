"""TVM's part of the graphs of one compile: kept on the compiled callable, and read by a report."""

from dataclasses import dataclass

from backend_kwargs.compilers.fell_back import PartsSummary


@dataclass(frozen=True, slots=True)
class Partition:
    """A part that TVM compiled, of the "inference", "forward" or "backward" graph; `tuned` counts its tuned kernels."""

    graph: str
    operators: int
    seconds: float
    target: str
    tuned: int
    notes: tuple[str, ...]


@dataclass(slots=True)
class TVMSummary(PartsSummary):
    """The graphs of one compile under TVM; a backward graph is added when it is compiled."""

    compiler: str = "TVM"
