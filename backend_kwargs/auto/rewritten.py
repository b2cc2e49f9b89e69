"""Rewrites as candidates: matched on the graphs that default lowers, and tried if they can save time."""

import contextlib
import logging
from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule

from backend_kwargs.auto.candidates import RaceCandidate, rewriting
from backend_kwargs.auto.graph_stats import GraphStats
from backend_kwargs.auto.request import Request
from backend_kwargs.auto.roofline import seconds_of_traffic
from backend_kwargs.backends import CompileInner, Inputs
from backend_kwargs.errors import error_text
from backend_kwargs.facts import Call
from backend_kwargs.options.requirements import machine, unmet
from backend_kwargs.rewrites.table import find_rewrite
from backend_kwargs.torch_internals import functorch
from backend_kwargs.torch_internals.relowering import spare_of

logger = logging.getLogger("backend_kwargs.auto")


def candidates_of_rewrites(
    names: Sequence[str],
    stats: GraphStats,
    objective: str,
    lowered: Callable[[], Sequence[GraphModule]],
    traced: tuple[GraphModule, Inputs],
    device: torch.device,
    *,
    whole: bool,
) -> list[RaceCandidate]:
    """Return those of the rewrites `names` that match, each with the seconds that it is expected to save.

    `lowered` returns the graphs that Inductor lowers, all of them if they are `whole`; `traced` is dynamo's graph with
    its inputs. All stay unchanged. Where there may be places that are not seen, a candidate names the rewrite alone.
    """
    from backend_kwargs.rewrites.apply import places_in, places_in_traced

    found = []
    for name in names:
        rewrite = find_rewrite(name)
        try:
            fits = rewrite.fitting(stats) and rewrite.objective in ("latency", objective)
            if not fits or unmet(rewrite.needs, machine()):
                continue
            places = places_in(lowered(), name) if rewrite.patterns else places_in_traced(*traced, name)
        except Exception as error:  # noqa: BLE001 - a user's rewrite may raise anything: it is not tried
            logger.info("Rewrite %s is not tried: %s", name, error_text(error))
            continue
        if places:
            saved_s = seconds_of_traffic(sum(each.bytes for each in places), device)
            count = sum(each.count for each in places)
            logger.info("%s matches %d times and could save %.1f µs", name, count, saved_s * 1e6)
            found.append(rewriting(name, saved_s, map(str, places) if whole or rewrite.traced else ()))
    return found


class _LoweredError(Exception):
    """The forward graph has been kept, which ends the compile."""


def lowered_anew(request: Request) -> list[GraphModule]:
    """Return the forward graph that Inductor would lower, without compiling it: for a default from a cache."""
    graphs: list[GraphModule] = []

    def keeping(inner_compile: CompileInner) -> CompileInner:
        def compile_one(gm: GraphModule, *_: object, **__: object) -> Call:
            graphs.append(spare_of(gm))
            raise _LoweredError

        return compile_one

    with functorch.patched(enable_autograd_cache=False), contextlib.suppress(Exception):
        request.compile(request.graph.wrap_inner_compile(keeping), {}, "")
    return graphs
