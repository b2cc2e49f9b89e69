"""A process that lowers graphs into Inductor's cache, and neither compiles Triton's kernels nor touches a GPU.

Everything here holds for the whole process, which does nothing else. The process that loads the code from the cache
compiles each kernel, so that every kernel has one owner.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo import utils as dynamo_utils
from torch._guards import tracing
from torch._inductor import async_compile, codecache, compile_fx, config, output_code
from torch._inductor.runtime import benchmarking
from torch._inductor.utils import is_gpu
from torch._subclasses import fake_tensor

from backend_kwargs.torch_internals.lowered_graphs import LoweredGraph, values_of


class NeedsDeviceError(BaseException):
    """Inductor would measure something: not an Exception, since it takes those for a choice that does not work."""


def lower_alone() -> None:
    """Make this process one that only lowers."""
    config.compile_threads = 1
    cuda: Any = torch.cuda
    for owner, name, value in (
        (async_compile.AsyncCompile, "use_process_pool", lambda *_: False),
        (async_compile.AsyncCompile, "triton", lambda *_, **__: None),
        # What follows a compile, such as CUDA graphs, is not in the cache.
        (output_code.CompiledFxGraph, "post_compile", lambda *_, **__: None),
        # Each of these makes a context, or may: cuCtxCreate takes 0.3 s and hundreds of MiB of the device.
        (fake_tensor, "init_gpu_context", lambda *_: None),
        (compile_fx, "get_cuda_device_context", lambda *_: nullcontext()),
        (dynamo_utils, "preserve_rng_state", nullcontext),
        (cuda, "synchronize", _refuse),
    ):
        getattr(owner, name)  # so that a torch without it is noticed
        setattr(owner, name, value)
    for kind in vars(benchmarking).values():
        if isinstance(kind, type):
            for name in [name for name in vars(kind) if name.startswith("benchmark")]:
                setattr(kind, name, _refuse)


def lower(graph: LoweredGraph, device: int | None) -> str | None:
    """Lower a graph into Inductor's cache and return its key, None if the cache did not take it."""
    gpu = any(is_gpu(value.device.type) for value in values_of(graph.gm))
    if gpu and graph.kwargs.get("cpp_wrapper"):
        raise NeedsDeviceError  # the wrapper is made of kernels that are compiled and tuned before
    if device is not None:
        torch.cuda.current_device = lambda: device  # to make it the current one would make a context
    with tracing(graph.context), _loading(gpu):
        result = compile_fx.compile_fx_inner(graph.gm, graph.example_inputs, **graph.kwargs)
    return getattr(result, "_fx_graph_cache_key", None)


@contextmanager
def _loading(gpu: bool) -> Iterator[None]:
    """Keep generated code for a GPU unloaded: to load it is to compile its kernels. C++ is compiled here."""
    load = codecache.PyCodeCache.__dict__["load_by_key_path"]
    if gpu:
        codecache.PyCodeCache.load_by_key_path = staticmethod(_unloaded)  # type: ignore[assignment]
    try:
        yield
    finally:
        codecache.PyCodeCache.load_by_key_path = load  # type: ignore[method-assign]


def _unloaded(key: str, path: str, *_: object, **__: object) -> SimpleNamespace:
    return SimpleNamespace(__file__=path, call=None)


def _refuse(*_: object, **__: object) -> None:
    raise NeedsDeviceError
