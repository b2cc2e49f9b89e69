"""Modes of torch in a thread: dispatch, gradients, saved tensors, autocast, `torch.func`'s transforms."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch._C import _DisableTorchDispatch as WithoutDispatch
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._autograd import _profiler_enabled as is_profiled
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.operators import HigherOrderOperator

# Functions of dynamo's graphs whose results depend on their arguments alone.
AUTOCAST_FUNCTIONS = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which `called` runs each operator that is not decomposed, also those in graphs of higher-order ones."""

    supports_higher_order_operators = True

    def __init__(self, called: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._called = called

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """Return the result of an operator that runs graphs."""
        args, kwargs = pytree.tree_map(self._within, (args, kwargs))
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self.higher_order(func, args, kwargs)
        if func.namespace == "prim":  # an attribute of a fake tensor, as its device
            return func(*args, **kwargs)
        with self:  # in inference mode composite operators are not decomposed before they arrive here
            result = func.decompose(*args, **kwargs)
        return self._called(func, args, kwargs) if result is NotImplemented else result

    def _within(self, leaf: Any) -> Any:
        """Return a graph of a higher-order operator as a function that runs in this mode; other leaves as they are."""
        if not callable(leaf) or isinstance(leaf, torch.Tensor):
            return leaf

        def run(*args: object, **kwargs: object) -> object:
            with self:
                return leaf(*args, **kwargs)

        return run


def saves_by_hooks() -> bool:
    """Return whether hooks change what autograd saves for the backward pass."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def modes_restored() -> Iterator[None]:
    """Restore the modes that a graph sets and, where a call raises in between, does not reset.

    They are those of `torch.func`'s transforms, which a graph enters and leaves by separate calls, and the grad mode.
    """
    functorch = torch._C._functorch
    depth, in_place = functorch.get_dynamic_layer_stack_depth(), functorch.get_inplace_requires_grad_allowed()
    grad, forward_grad = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        functorch.set_inplace_requires_grad_allowed(in_place)
        if torch.autograd.forward_ad._current_level < 0:  # the user has entered none, and levels do not nest
            with suppress(RuntimeError):
                torch._C._exit_dual_level(level=0)
        set_grad_enabled(grad)
        torch._C._set_fwd_grad_enabled(forward_grad)
        if no_hooks is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(no_hooks)


def modes_of_thread() -> Callable[[], AbstractContextManager[None]]:
    """Return what enters the gradient mode, inference mode and autocast of this thread now, in any thread later."""
    grad, inference, cache = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
    )
    autocasts = {kind: _autocast(kind) for kind in ("cpu", "cuda")}

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, (enabled, dtype) in autocasts.items():
                if _autocast(kind) != (enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield

    return entered


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
