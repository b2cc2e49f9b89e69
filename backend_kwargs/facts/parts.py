"""The parts of a graph that a compiler of parts runs, and what runs in eager."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Partition:
    """A part that was compiled, of the "inference", "forward" or "backward" graph; `tuned` counts its tuned kernels.

    `notes` say what its compiler did otherwise than the options ask for.
    """

    graph: str
    operators: int
    seconds: float
    target: str
    tuned: int
    notes: tuple[str, ...]


@dataclass(slots=True)
class PartsSummary:
    """The parts of the graphs of one compile; `fallbacks` maps operators that run in eager to the reasons.

    A backward graph is added when it is compiled.
    `failed` counts the parts that failed at a call, and run in eager since: they are no longer among `partitions`.
    """

    compiler: str
    partitions: list[Partition] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    failed: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes on all partitions, each once."""
        return tuple(dict.fromkeys(note for partition in self.partitions for note in partition.notes))

    def leave(self, op: str, reason: str) -> None:
        """Record that an operator runs in eager."""
        known = self.fallbacks.get(op, "")
        self.fallbacks[op] = known if reason in known else f"{known}; {reason}".removeprefix("; ")

    def fail(self, partition: Partition, op: str, reason: str) -> None:
        """Record that a partition failed at a call, and that its operators run in eager from now on."""
        others = [each for each in self.partitions if each is not partition]
        self.failed += len(self.partitions) - len(others)  # two threads may fail in the same partition
        self.partitions[:] = others
        self.leave(op, f"{self.compiler} failed to run it: {reason}")


def why_fell_back(compiler: str, partitions: int, failed: int) -> str:
    """Return which parts of a graph its compiler does not run, "" if it runs all that it has compiled."""
    if failed:
        return f"{compiler} failed to run {failed} of {partitions + failed} partition{'s' * (partitions + failed > 1)}"
    return "" if partitions else f"no partition of {compiler}"


def left_to_eager(parts: PartsSummary | None) -> str:
    """Return why no part of a graph runs on its compiler, or which failed to; "" if all parts do or it is unknown."""
    if parts is None or (parts.partitions and not parts.failed):
        return ""
    reasons = "; ".join(f"{op}: {reason}" for op, reason in parts.fallbacks.items())
    if parts.failed:
        return f"{why_fell_back(parts.compiler, len(parts.partitions), parts.failed)}: {reasons}"
    return f"all of it runs in eager: {reasons or 'there is nothing to compile'}"
