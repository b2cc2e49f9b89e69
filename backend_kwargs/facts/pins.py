"""What timing chose for a model: the decisions of its graphs, and the kernels and configurations below them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from backend_kwargs.facts.decision import Decision

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
