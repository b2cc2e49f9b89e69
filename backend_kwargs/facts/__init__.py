"""What a compile returns: the callable for dynamo, and what is known about it. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from backend_kwargs.facts.decision import Decision
from backend_kwargs.facts.parts import PartsSummary
from backend_kwargs.facts.precision import PrecisionUse
from backend_kwargs.options.layers import Options

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
    backend. `store` says which stores of decisions did not answer in time. `unchanged`: the compiler returned the graph
    as it was, so that it runs in eager. `later` gets the decision that the calls of the user have led to.

    Backward graphs may be compiled later: then they are added to `parts`, and to what `generated_code` finds.
    """

    options: Options = field(default_factory=dict)
    decision: Decision | None = None
    precision: PrecisionUse | None = None
    rewrites: Mapping[str, Replacements] = field(default_factory=dict)
    parts: PartsSummary | None = None
    cache: str = ""
    seconds: float = 0.0
    store: str = ""
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
