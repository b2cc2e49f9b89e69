"""What Inductor chooses by timing below a compile's options, chosen here instead, or noted after it was timed.

A product, a convolution or an attention (a *site*) has several kernels to choose from while its graph is lowered;
torch's selector asks functions that are registered with it before it times any. A Triton kernel has several
configurations, of which torch's wrapper times those that it was made with at the first call.
"""

import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.select_algorithm import AlgorithmSelectorCache, ExternKernelCaller, get_algorithm_selector_cache

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.torch_internals.replacing import replaced, undone

TIMERS = ("benchmark_gpu", "benchmark_cpu")  # the methods with which `benchmarker` times a kernel


Configuration: TypeAlias = dict[str, int | str | bool]
NUMBER = re.compile(r"_\d+$")  # torch numbers kernels in the order in which it made them
FIELDS = ("num_warps", "num_stages", "maxnreg")  # of a configuration, besides its keywords
NO_DESCENT = (HeuristicType.TEMPLATE, HeuristicType.USER_AUTOTUNE, HeuristicType.FIXED)


@dataclass(frozen=True, slots=True)
class Site:
    """A place where one of several kernels is chosen: the layouts of its inputs and output, the kernels' names.

    `library` is the number of the first kernel that a library has, 0 if none has one.
    """

    inputs: tuple[str, ...]
    output: str
    kernels: tuple[str, ...]
    library: int = 0


@contextmanager
def chosen_by(chooser: Any) -> Iterator[None]:
    """Let `chooser` choose in this thread in place of torch's timing, until the context is left.

    `kernel_at(site)` returns the number of the kernel to take, None to have all timed; `was_timed(site, at)` is told
    the fastest. `configuration(key, name, given)` returns that of a Triton kernel, None to have those `given` timed at
    its first call; `was_made(key, name, autotuner)` is told the wrapper that will, whose choice `configuration_of`
    reads later. `must_not_time()` returns why this thread may time nothing while it compiles, "" if it may.
    """
    selector, thread = get_algorithm_selector_cache(), threading.get_ident()

    def mine() -> bool:  # what is replaced is the process's
        return threading.get_ident() == thread

    with undone() as stack:
        prescribe = partial(_prescribed, chooser, mine)
        stack.enter_context(replaced(selector, "preprocessing_fns", [*selector.preprocessing_fns, prescribe]))
        timed = partial(_timed, chooser, mine, selector.do_autotuning)
        stack.enter_context(replaced(selector, "do_autotuning", timed))
        wrapping = partial(_wrapping, chooser, mine, triton_heuristics.cached_autotune)
        stack.enter_context(replaced(triton_heuristics, "cached_autotune", wrapping))
        for name in TIMERS:
            timer = partial(_refusing, chooser, mine, getattr(benchmarker, name))
            stack.enter_context(replaced(benchmarker, name, timer))
        yield


# ---- products, convolutions, attention


def _prescribed(chooser: Any, mine: Callable[[], bool], choices: list[Any]) -> list[Any]:
    if len(choices) < 2 or not mine():
        return choices
    at = chooser.kernel_at(_site(choices))
    return choices if at is None else [choices[at]]


def _timed(chooser: Any, mine: Callable[[], bool], tune: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    timings = tune(*args, **kwargs)
    choices: Any = inspect.signature(tune).bind(*args, **kwargs).arguments["choices"]
    if not timings or not mine():
        return timings
    best = min(timings, key=timings.__getitem__)
    chooser.was_timed(_site(choices), choices.index(best))
    return {best: timings[best]}


def _site(choices: Sequence[Any]) -> Site:
    first, seen, names = choices[0], dict[str, int](), []
    for each in choices:
        name = " ".join(filter(None, (NUMBER.sub("", str(each.name)), str(each.description or ""))))
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    inputs = tuple(_layout(AlgorithmSelectorCache.key_of(node)) for node in first.input_nodes)  # type: ignore[no-untyped-call]
    output = f"{first.layout.device.type} {first.layout.dtype} {_sizes(first.layout.size)}"
    library = next((at for at, each in enumerate(choices) if isinstance(each, ExternKernelCaller)), 0)
    return Site(inputs, output, tuple(names), library)


def _layout(key: tuple[object, ...]) -> str:
    kind, dtype, *numbers = key  # sizes, as many strides, and the offset
    half = len(numbers) // 2
    return f"{kind} {dtype} {_sizes(numbers[:half])} strides {_sizes(numbers[half:-1])} offset {numbers[-1]}"


def _sizes(numbers: Sequence[object]) -> str:
    return "x".join(map(str, numbers)) or "scalar"


# ---- Triton kernels


def _wrapping(
    chooser: Any,
    mine: Callable[[], bool],
    wrap: Callable[..., Any],
    size_hints: object,
    configs: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    bound = inspect.signature(wrap).bind(size_hints, configs, *args, **kwargs)
    meta: dict[str, Any] = bound.arguments.get("inductor_meta") or {}
    descends = bool(meta.get("coordinate_descent_tuning")) and bound.arguments["heuristic_type"] not in NO_DESCENT
    if not mine() or (len(configs) < 2 and not descends):
        return wrap(size_hints, configs, *args, **kwargs)

    def wrapped(fn: Any) -> Any:
        key = triton_heuristics.generate_lookup_hash_from_source_code(str(size_hints), fn.src)
        name = NUMBER.sub("", fn.__name__)
        chosen = chooser.configuration(key, name, [_plain(each) for each in configs])
        if chosen is None:
            autotuner = wrap(*bound.args, **bound.kwargs)(fn)
            chooser.was_made(key, name, autotuner)
            return autotuner
        bound.arguments["configs"] = [_config(chosen, configs)]
        bound.arguments["inductor_meta"] = {**meta, "coordinate_descent_tuning": False}
        return wrap(*bound.args, **bound.kwargs)(fn)

    return wrapped


def _plain(config: Any) -> Configuration:
    fields = {name: value for name in FIELDS if (value := getattr(config, name, None)) is not None}
    return {**config.kwargs, **fields}


def _config(chosen: Mapping[str, Any], given: Sequence[Any]) -> Any:
    """Return a configuration as torch's: one of those given, or such as coordinate descent leads to."""
    for each in given:
        if _plain(each) == dict(chosen):
            return each
    fields = {name: value for name, value in chosen.items() if name in FIELDS}
    keywords = {name: value for name, value in chosen.items() if name not in FIELDS}
    return type(given[0])(keywords, **fields)


def configuration_of(autotuner: Any) -> Configuration | None:
    """Return what a Triton kernel's wrapper chose at its first call, None if it was not called yet."""
    return _plain(autotuner.launchers[0].config) if len(autotuner.launchers) == 1 else None


# ---- a net below both


def _refusing(
    chooser: Any, mine: Callable[[], bool], timer: Callable[..., Any], *args: object, **kwargs: object
) -> Any:
    if mine() and (why := chooser.must_not_time()):
        raise BackendKwargsError(why)
    return timer(*args, **kwargs)
