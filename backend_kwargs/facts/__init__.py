"""What a compile returns: the callable for dynamo, and what is known about it. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from backend_kwargs.facts.decision import DEFAULT, EAGER, Decision, PlaceRow, RaceRow, Unraced
from backend_kwargs.options.option import Options

__all__ = [
    "DEFAULT",
    "EAGER",
    "PINNED",
    "Call",
    "CompileFacts",
    "Compiled",
    "Decision",
    "Partition",
    "PartsSummary",
    "PinnedKernel",
    "Pins",
    "PlaceRow",
    "PrecisionUse",
    "RaceRow",
    "Replacements",
    "Unraced",
    "Value",
    "left_to_eager",
    "why_fell_back",
]

Value = int | str | bool | float | None
PINNED = "pinned"  # the value of the option `reproducible`


@dataclass(frozen=True, slots=True)
class PinnedKernel:
    """The kernel chosen at one site, a product say: the layouts of its inputs and output, out of how many kernels."""

    kernel: str
    inputs: tuple[str, ...]
    output: str
    of: int


@dataclass(slots=True)
class Pins:
    """What is read from a lock, or noted while one is written; `label` names the lock to people.

    `decisions` are by their keys, `kernels` by those of their sites, and `configurations` of Triton kernels by those of
    their code. A lock is written in two phases, so that nothing of a race's losers is in it: while graphs are decided
    only `decisions` are noted; while they are compiled again, what is timed. `uncalled` has Triton kernels that choose
    when they are called: the key of each, its name, and torch's wrapper.
    """

    label: str
    machine: Mapping[str, Value] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    kernels: dict[str, PinnedKernel] = field(default_factory=dict)
    configurations: dict[str, Mapping[str, Value]] = field(default_factory=dict)
    uncalled: list[tuple[str, str, object]] = field(default_factory=list)
    strict: bool = False  # what a lock lacks is an error, whatever the option `strict` says
    phase: Literal["deciding", "timing", "serving"] = "serving"

    @property
    def deciding(self) -> bool:
        """Whether graphs are raced, as they are without a lock."""
        return self.phase == "deciding"

    def with_others(self, others: "Pins") -> "Pins":
        """Return these with what another lock has besides."""
        return replace(
            self,
            decisions={**others.decisions, **self.decisions},
            kernels={**others.kernels, **self.kernels},
            configurations={**others.configurations, **self.configurations},
        )


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


@dataclass(slots=True)
class PrecisionUse:
    """The use of a precision: its error, at most `max_error`, and the bytes of the weights converted for it.

    `reason` says why the precision is not used, or is "". A graph with dynamic sizes is measured again for new sizes:
    `error` is then the largest, and `refused` has the reason for sizes that run in eager instead.
    """

    precision: str
    error: float | None
    max_error: float | None
    nbytes: int = 0
    products: int = 0
    reason: str = ""
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.reason:
            return f"precision {self.precision} is not used: {self.reason}"
        error = "" if self.error is None else f", error {self.error:.2g}, max_error={self.max_error:g}"
        held = f", {self.nbytes / 2**20:.1f} MiB of weights" if self.nbytes else ""
        products = f", {self.products} products" if self.products else ""  # an engine does not count them
        refused = "".join(f"; not used for {sizes}, in eager: {why}" for sizes, why in [*self.refused.items()])
        return f"precision {self.precision}: {f'{products}{error}{held}'.removeprefix(', ') or 'used'}{refused}"


# ---- a compile

Call: TypeAlias = Callable[..., Any]  # takes the inputs of dynamo's graph, and returns its outputs


@dataclass(frozen=True, slots=True)
class Replacements:
    """What a rewrite of dynamo's graph did: the number of its replacements, and the memory and time that they cost."""

    count: int
    costs: str = ""


@dataclass(frozen=True, slots=True)
class CompileFacts:
    """What is known about one compile; each stage adds what it did. Nothing here keeps the compiled graph alive.

    `options` are those that its compiler was given, in the end. `decision` is that of `auto`. `rewrites` has the
    rewrites of dynamo's graph; those of lowered graphs are calls in the generated code. `parts` are those of a compiler
    of parts. `cache` is what torch's caches did, or "raced" if the graph was raced now, and `seconds` the time in the
    backend. `unchanged`: the compiler returned the graph as it was, so that it runs in eager. `later` gets the decision
    that the user's calls have led to.

    Backward graphs may be compiled later: then they are added to `parts`, and to what `generated_code` finds.
    """

    options: Options = field(default_factory=dict)
    decision: Decision | None = None
    precision: PrecisionUse | None = None
    rewrites: Mapping[str, Replacements] = field(default_factory=dict)
    parts: PartsSummary | None = None
    cache: str = ""
    seconds: float = 0.0
    unchanged: bool = False
    later: list[Decision] = field(default_factory=list)

    @property
    def decided(self) -> Decision | None:
        """The decision that holds now."""
        return self.later[-1] if self.later else self.decision


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled graph: `call` takes the inputs of dynamo's graph and returns its outputs."""

    call: Call
    facts: CompileFacts = field(default_factory=CompileFacts)

    def called_by(self, call: Call) -> "Compiled":
        """Return the same with another `call`, which wraps this one."""
        return replace(self, call=call)

    def with_facts(self, **facts: Any) -> "Compiled":
        """Return the same with these fields of its facts replaced."""
        return replace(self, facts=replace(self.facts, **facts))
