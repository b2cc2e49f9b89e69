"""Whether a graph draws random numbers, found before it has drawn any."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.fx import GraphModule

from backend_kwargs.graphs.eligibility import name_of_call, nodes_of
from backend_kwargs.torch_internals.modes import OperatorMode, modes_restored
from backend_kwargs.torch_internals.operators import overloads_of
from backend_kwargs.torch_internals.replacing import undone
from backend_kwargs.torch_internals.threads import running_threads
from backend_kwargs.trial import DrawsError, all_kept, may_draw


def run_apart(gm: GraphModule, inputs: Callable[[], Sequence[Any]]) -> tuple[object, bool]:
    """Run `gm` on `inputs()`, called before each try; return its results, and whether its calls may draw.

    One that draws leaves the random generators as they were, which touches all threads: raise DrawsError if another one
    runs. One that does not touches none.
    """
    if not _draws_backward(gm):
        given = inputs()
        # Whatever fails in the mode may draw, and fails again below if it is not for the mode.
        with suppress(Exception), modes_restored(), undone() as stack:
            stack.enter_context(OperatorMode(_without_draws))
            return gm.forward(*given), False
        del given
    if running := running_threads():
        names = ", ".join(map(repr, running))
        raise DrawsError(f"it may draw random numbers, which a race repeats, while another thread runs: {names}")
    given = inputs()
    with all_kept(), modes_restored():
        return gm.forward(*given), True


def _without_draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Run an operator; raise DrawsError before one that may draw."""
    if may_draw(func, args, kwargs):
        raise DrawsError(str(func))
    return func(*args, **kwargs)


def _draws_backward(gm: GraphModule) -> bool:
    """Return whether an autograd function of the user may draw in its backward pass, by the names that it calls."""
    if not any(node.target is torch.ops.higher_order.autograd_function_apply for node in nodes_of(gm)):
        return False
    packets = {getattr(torch.ops.aten, name_of_call(node), None) for node in nodes_of(gm)} - {None}
    return any(torch.Tag.nondeterministic_seeded in each.tags for packet in packets for each in overloads_of(packet))
