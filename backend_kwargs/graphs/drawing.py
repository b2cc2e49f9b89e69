"""Whether a graph draws random numbers, found before it has drawn any."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.fx import GraphModule

from backend_kwargs.graphs.eligibility import OPERATORS, name_of_call, nodes_of
from backend_kwargs.measure.generators import all_kept
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.modes import TorchDispatchMode, modes_restored
from backend_kwargs.torch_internals.operators import HigherOrderOperator, arguments_of, overloads_of
from backend_kwargs.torch_internals.replacing import undone
from backend_kwargs.torch_internals.threads import running_threads

OFF = ("dropout_p", "dropout", "train", "training")  # arguments that are zero or False where nothing is drawn


class DrawsError(Exception):
    """A graph may draw random numbers; the message says why it is not run."""


def run_apart(gm: GraphModule, inputs: Callable[[], Sequence[Any]]) -> tuple[object, bool]:
    """Run `gm` on `inputs()`, called before each try; return its results, and whether its calls may draw.

    One that draws leaves the random generators as they were, which touches all threads: raise DrawsError if another one
    runs. One that does not touches none.
    """
    if not _draws_backward(gm):
        given = inputs()
        # Whatever fails in the mode may draw, and fails again below if it is not for the mode.
        with suppress(Exception), modes_restored(), undone() as stack:
            stack.enter_context(_NoDraws())  # type: ignore[no-untyped-call]
            return gm.forward(*given), False
        del given
    if running := running_threads():
        names = ", ".join(map(repr, running))
        raise DrawsError(f"it may draw random numbers, which a race repeats, while another thread runs: {names}")
    given = inputs()
    with all_kept(), modes_restored():
        return gm.forward(*given), True


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises DrawsError before an operator runs that may draw."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            args, kwargs = pytree.tree_map(self._within, (args, kwargs))
            return func(*args, **kwargs)
        with self:  # in inference mode composite operators are not decomposed before they arrive here
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if _may_draw(func, args, kwargs):
            raise DrawsError(str(func))
        return func(*args, **kwargs)

    def _within(self, leaf: Any) -> Any:
        """Return a graph of a higher-order operator as a function that runs in this mode; other leaves as they are."""
        if not callable(leaf) or isinstance(leaf, torch.Tensor):
            return leaf

        def run(*args: object, **kwargs: object) -> object:
            with self:
                return leaf(*args, **kwargs)

        return run


def _may_draw(func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether a call of an operator may draw: by its tag, or since it is not torch's."""
    if func.namespace not in OPERATORS:
        return True
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    declared = arguments_of(func)
    given = {each.name: each.default_value for each in declared}  # which the dispatcher leaves out
    given |= dict(zip((each.name for each in declared), args, strict=False)) | dict(kwargs)
    return not any(given.get(name) in (0, False) for name in OFF)


def _draws_backward(gm: GraphModule) -> bool:
    """Return whether an autograd function of the user may draw in its backward pass, by the names that it calls."""
    if not any(node.target is torch.ops.higher_order.autograd_function_apply for node in nodes_of(gm)):
        return False
    packets = {getattr(torch.ops.aten, name_of_call(node), None) for node in nodes_of(gm)} - {None}
    return any(torch.Tag.nondeterministic_seeded in each.tags for packet in packets for each in overloads_of(packet))
