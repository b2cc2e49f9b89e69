"""A request to `auto` for one graph. It is apart from the race, which is not imported if a decision is stored."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.backends.others import OTHERS
from backend_kwargs.options.requirements import Limit

# dynamo restarts its analysis by raising these; they are not a candidate's failure.
RESTARTS = (torch._dynamo.exc.TensorifyScalarRestartAnalysis, torch._dynamo.exc.RestartAnalysis)


@dataclass(frozen=True, slots=True)
class Tools:
    """What a race needs from the compiler: a template's options, their limits, the user's options, the rewrites."""

    options_of: Callable[[str], Mapping[str, Any]]
    limits: Callable[[Mapping[str, Any]], Mapping[str, Limit]]
    fixed: Mapping[str, Any]
    rewrites: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A graph to compile with its fastest candidate; `compile_one(gm, example_inputs, options)` compiles one."""

    gm: GraphModule
    example_inputs: Sequence[Any]
    settings: RaceSettings
    compile_one: Callable[[GraphModule, Sequence[Any], Mapping[str, Any]], Callable[..., Any]]
    tools: Tools

    @property
    def frozen(self) -> bool:
        """Whether the caller has parameters frozen, and the mode lets them be."""
        return bool(self.tools.fixed.get("freezing")) and not torch.is_grad_enabled()

    def compiled(
        self, gm: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], compiler: str = ""
    ) -> Callable[..., Any]:
        """Return `gm` compiled with `options`: by Inductor together with the user's options, or by `compiler`."""
        if compiler:
            return OTHERS[compiler](compiler).compile(gm, inputs, options, None)
        return self.compile_one(gm, inputs, options)
