"""The places of a model, each timed by itself: what a rewrite would replace, as it is and rewritten.

    python -m benchmarks headroom "transformers:BertModel?num_hidden_layers=2" --device cpu

No whole graph is compiled. A place is raced as `auto` races it: the graph of what a rewrite would replace, with what
Inductor would fuse with it, on the inputs that it has in a call of the model in eager. The places that take longest in
eager come first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

import backend_kwargs as bk
from backend_kwargs.auto.places import Standing, standing
from backend_kwargs.auto.race import begun, verdict_of
from backend_kwargs.auto.sandbox import sandboxed
from backend_kwargs.auto.selection import MARGIN
from backend_kwargs.auto.verdicts import Verdict
from backend_kwargs.backend import Backend
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.tables import as_text

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Timed:
    """A place and what its race has shown."""

    standing: Standing
    found: Verdict

    @property
    def wins(self) -> bool:
        """Whether the rewrite is faster beyond what two runs of one callable differ by."""
        return self.found.speedup is not None and self.found.speedup.low > 1 + MARGIN

    @property
    def verdict(self) -> str:
        """What is known of the rewrite here, in words."""
        if self.found.speedup is None:
            return self.found.why
        return "faster" if self.wins else "slower" if self.found.speedup.high < 1 - MARGIN else "no faster"


def headroom(model: Callable[..., object], inputs: Sequence[Any], backend: Backend, most: int, say: Say) -> list[Timed]:
    """Time the places of a model in inference that take longest in eager, at most so many of each graph."""
    graphs: list[tuple[GraphModule, Sequence[Any]]] = []

    def capture(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append((gm, example_inputs))
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=capture, dynamic=False)(*inputs)
        return [each for gm, values in graphs for each in timed_places(backend, gm, values, most, say)]


def timed_places(backend: Backend, gm: GraphModule, inputs: Sequence[Any], most: int, say: Say) -> Iterator[Timed]:
    """Yield the places of a graph of dynamo's, and of the one that Inductor lowers it to, with what they show."""
    request = backend.request(CapturedGraph(gm, inputs))
    with sandboxed(gm) as sandbox:
        race = begun(request, sandbox)
        for each in standing([*race.traced, *race.lowered], race.task.inputs.fresh, race.device)[:most]:
            say(f"{each.place}, {each.place.count} times")
            yield Timed(each, verdict_of(request, sandbox, each))


# ---- the table


def table(found: Mapping[str, Sequence[Timed]]) -> str:
    """Return the places of some models as text, dearest first, and for each model what applies those that win."""
    rows = [
        (name, str(each.standing.place), str(each.standing.place.count),
         *map(_us, (each.standing.eager_s, each.found.default_s, each.found.rewritten_s)),
         f"{each.found.default_s / each.found.limit_s:.1f}" if each.found.limit_s else "",
         f"{each.found.speedup.median:.2f}x" if each.found.speedup else "", each.verdict, each.standing.place.what)
        for name, several in found.items() for each in several
    ]  # fmt: skip
    columns = "model|place|times|eager µs|default µs|rewritten µs|of its limit|speedup|verdict|what"
    winners = {name: [str(each.standing.place) for each in several if each.wins] for name, several in found.items()}
    pasted = [f"{name}: rewrites={places}" for name, places in winners.items() if places]
    return "\n".join([as_text(columns.split("|"), rows), *pasted])


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds else ""


def measure_headroom(specs: Sequence[str], device: str, most: int, say: Say) -> str:
    """Return the table of models in inference, which `model_case` names."""
    from benchmarks.workloads.user_models import model_case

    found = {}
    for spec in specs:
        where = torch.device(device)
        problem = model_case(spec).build(where, torch.float32 if device == "cpu" else torch.bfloat16, "full")
        found[spec] = headroom(problem.fn, problem.args, bk.make_backend("tmpl-inductor:auto"), most, say)
    return table(found)
