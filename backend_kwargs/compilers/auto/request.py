"""What is asked of auto for one graph. Apart from the race, which is not loaded where a decision is stored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from backend_kwargs.compilers.auto.settings import Settings
from backend_kwargs.requirements import Limit

# By these dynamo starts over: no candidate's failure.
RESTARTS = (torch._dynamo.exc.TensorifyScalarRestartAnalysis, torch._dynamo.exc.RestartAnalysis)


@dataclass(frozen=True, slots=True)
class Tools:
    """What a race asks of the compiler: a template's options, their limits, the user's options, the rewrites to race."""

    options_of: Callable[[str], Mapping[str, Any]]
    limits: Callable[[Mapping[str, Any]], Mapping[str, Limit]]
    fixed: Mapping[str, Any]
    rewrites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A graph to be compiled by its fastest candidate: `compile_one(gm, example_inputs, options)` compiles one."""

    gm: GraphModule
    example_inputs: Sequence[Any]
    settings: Settings
    compile_one: Callable[[GraphModule, Sequence[Any], Mapping[str, Any]], Callable[..., Any]]
    tools: Tools
