"""AOTAutograd: its options, how it is called, and how its inputs and outputs are described."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, InputMutationAOTOutput, ParamAOTInput
from torch.utils.checkpoint import _StopRecomputationError

from backend_kwargs.torch_internals.replacing import undone


def saves_strictly() -> bool:
    """Return whether AOTAutograd must be able to save its result, as under `aot_compile()`."""
    return config.strict_autograd_cache


def shared_in_cache(name: str) -> AbstractContextManager[None]:
    """Let AOTAutograd's cache find results whatever the value of its option `name`."""
    ignored = [*config._save_config_ignore, name, "_save_config_ignore"]
    return patched(_save_config_ignore=ignored)


@contextmanager
def patched(**options: object) -> Iterator[None]:
    """Set options of AOTAutograd in this thread, until the context is left."""
    with undone() as stack:
        stack.enter_context(config.patch(options))
        yield


# ---- saved results, as torch's precompilation pickles them


def fits(result: Any, example_inputs: Sequence[Any]) -> bool:
    """Return whether sizes of inputs meet the conditions under which a saved result was compiled."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    sizes = AOTAutogradCache._filter_backed_symints(list(example_inputs))
    return not result.guards_expr or AOTAutogradCache.evaluate_guards(result.guards_expr, sizes)


def callable_of(result: Any, example_inputs: Sequence[object], *, cudagraphs: bool) -> Callable[[list[Any]], Any]:
    """Return the callable of a saved result, which takes its inputs as a list; its code is loaded from its files."""
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool

    fx_config = {"cudagraphs": BoxedBool(cudagraphs), "boxed_forward_device_index": BoxedDeviceIndex(None)}
    return result.wrap_post_compile(list(example_inputs), result.sanitized_aot_config, fx_config)  # type: ignore[no-any-return]


def ends_recomputation(error: BaseException) -> bool:
    """Return whether an exception ends what a checkpoint computes again, once it has what it needs."""
    return isinstance(error, _StopRecomputationError)


def keeps_saved(node: Any) -> bool:
    """Return whether an autograd node still has its saved tensors, which a backward pass frees."""
    try:
        return node._raw_saved_tensors is not None
    except RuntimeError:
        return False


def is_autograd_function(kind: type) -> bool:
    """Return whether AOTAutograd made an autograd function, for one graph.

    Those of the user, which a graph may call, and torch.autograd.Function itself are other callers' too.
    """
    return issubclass(kind, torch.autograd.Function) and kind.__module__ == runtime_wrappers.__name__
