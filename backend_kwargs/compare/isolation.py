"""Isolation: each candidate compiles for itself, is counted, and leaves nothing changed."""

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from backend_kwargs.compare.rows import Candidate


@contextlib.contextmanager
def undisturbed(device: torch.device, *, training: bool) -> Iterator[None]:
    """Keep random states, grad mode and dynamo's config as they were."""
    seeded = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(seeded, device_type=kind), torch.set_grad_enabled(training), _room_to_compile():
        yield


def _can_isolate() -> bool:
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def _room_to_compile() -> contextlib.AbstractContextManager[Any]:
    """Lift the limit on variants of one code object where torch (before 2.13) cannot count them apart."""
    import torch._dynamo.config as dynamo_config

    if _can_isolate():
        return contextlib.nullcontext()
    patch: Callable[..., contextlib.AbstractContextManager[Any]] = dynamo_config.patch
    return patch(recompile_limit=10_000, accumulated_recompile_limit=10_000)


def isolated(model: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """Return `torch.compile(model, ...)` that shares no compiled code and no limit with another one."""
    compiler: Any = torch.compile
    if _can_isolate():
        return cast("Callable[..., Any]", compiler(model, isolate_recompiles=True, **kwargs))

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    code = forward.__code__.replace(co_name="forward")
    own = types.FunctionType(code, globals(), "forward", None, forward.__closure__)
    return cast("Callable[..., Any]", compiler(own, **kwargs))


class Counted:
    """A backend that counts the graphs it compiles and returns them as they are: the hot path has no wrapper."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        """Compile as the backend does, and count."""
        compiled = self._backend(gm, example_inputs, **kwargs)
        self.graphs += 1
        return compiled

    def __getattr__(self, name: str) -> Any:
        # torch asks a backend for its compiler_name, config and reset().
        if name == "_backend":
            raise AttributeError(name)
        return getattr(self._backend, name)


def compiler(candidate: Candidate) -> tuple[Counted, dict[str, Any]]:
    """Return the counted backend and what is left for `torch.compile`: for "inductor" torch binds mode and options."""
    from torch._dynamo.backends.registry import lookup_backend

    options = dict(candidate.options) if candidate.options else None
    if candidate.backend == "inductor":
        mode = candidate.mode or (None if options else "default")
        wrapper: Any = torch._TorchCompileInductorWrapper
        return Counted(wrapper(mode, options, None)), {}
    backend: Any = candidate.backend
    return Counted(lookup_backend(backend)), {"mode": candidate.mode, "options": options}


def cache_counts() -> tuple[int, int]:
    """Return how often Inductor's caches were hit and missed in this process."""
    from torch._dynamo.utils import counters

    found, aot = counters["inductor"], counters["aot_autograd"]
    return (
        found["fxgraph_cache_hit"] + aot["autograd_cache_hit"],
        found["fxgraph_cache_miss"] + aot["autograd_cache_miss"],
    )


def cache_word(before: tuple[int, int], after: tuple[int, int]) -> str:
    """Say whether what compiled between two counts came from the cache: "warm", "cold", or "" where none was asked."""
    hits, misses = after[0] - before[0], after[1] - before[1]
    return "warm" if hits else "cold" if misses else ""


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Give Inductor an empty cache of its own, and races a store in which nothing is decided."""
    from torch._inductor.utils import fresh_cache

    from backend_kwargs.compilers.auto.deciding import nothing_decided

    with fresh_cache(), nothing_decided():
        yield
