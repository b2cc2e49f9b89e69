"""A request to `auto` for one graph. It is apart from the race, which is not imported if a decision is stored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule

from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.facts import Compiled, Decision
from backend_kwargs.options import Limit, Options

if TYPE_CHECKING:
    from backend_kwargs.auto.verdicts import Verdicts


@dataclass(frozen=True, slots=True)
class RaceContext:
    """What a race needs from the compiler: a template's options, their limits, the user's options, the rewrites."""

    options_of: Callable[[str], Options]
    limits: Callable[[Options], Mapping[str, Limit]]
    fixed: Options
    rewrites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A graph to compile with its fastest candidate.

    `compile(graph, options, compiler)` compiles one: by Inductor together with the user's options if `compiler` is "",
    otherwise by the compiler of that name. `keeps`: what a race has compiled may be what this compile returns.
    `of_several`: whether the user's call has other graphs too; None where calls do not choose between ways. `offered`
    are decisions of other machines and releases for this graph, which are raced first. `verdicts` stores the verdicts
    of places, if these may be used.
    """

    graph: CapturedGraph
    settings: RaceSettings
    compile: Callable[[CapturedGraph, Options, str], Compiled]
    context: RaceContext
    keeps: bool = False
    of_several: bool | None = None
    offered: tuple[Decision, ...] = ()
    verdicts: "Verdicts | None" = None

    @property
    def gm(self) -> GraphModule:
        """Dynamo's graph."""
        return self.graph.gm

    @property
    def example_inputs(self) -> Inputs:
        """The inputs of the call for which dynamo compiles it."""
        return self.graph.example_inputs

    @property
    def frozen(self) -> bool:
        """Whether the caller has parameters frozen, and the mode lets them be."""
        return bool(self.context.fixed.get("freezing")) and not torch.is_grad_enabled()
