"""The state of a process that a race could change: `python census.py NAME` prints it as JSON after the race NAME.

`python census.py interrupts SECONDS SHARD SHARDS CANDIDATE...` races these candidates and interrupts the race at lines
of this package, each in a fork, until SECONDS have passed. For each line it prints what is different afterwards. It
tries all lines in MUST and a spread sample of the others; SHARD of SHARDS selects every SHARDS-th line.
"""

import contextlib
import faulthandler
import gc
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.utils import _metrics_context_tls
from torch._guards import TracingContext
from torch._inductor import cudagraph_trees
from torch._inductor.runtime.benchmarking import benchmarker

import backend_kwargs
from backend_kwargs.compilers.auto import deadline, decide, head_to_head, race

ROOT = str(Path(backend_kwargs.__file__).parent)
MUST = ("compilers/auto/sandbox.py", "compilers/auto/deadline.py")
PASS = "post_grad_custom_post_pass"  # Inductor calls it with the lowered graph
SECONDS_A_CHILD = 30


def census() -> dict[str, Any]:
    """Return the state of this process that outlives a call, as JSON values."""
    trees = getattr(cudagraph_trees.local, "tree_manager_containers", {})
    configs = {"dynamo": torch._dynamo.config, "inductor": torch._inductor.config, "functorch": torch._functorch.config}
    return {
        **{
            f"{name} config": {k: repr(v) for k, v in config.get_config_copy().items()}
            for name, config in configs.items()
        },
        "mark step": cudagraph_trees.MarkStepBox.mark_step_counter,
        "generation": cudagraph_trees.GenerationTracker.generation,
        "CUDA-graph containers": {str(device): repr(each.tree_manager) for device, each in trees.items()},
        "cached tensors": torch._C._is_cached_tensor(torch.empty(0)),
        "generators": [
            _hash(state) for state in (torch.get_rng_state().numpy().tobytes(), random.getstate(), np_state())
        ],
        "grad mode": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")],
        "saved tensors hooks": repr(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        "dispatch modes": len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "warnings filters": [repr(each) for each in warnings.filters],
        "environment": dict(os.environ),
        "excepthook": sys.excepthook.__qualname__,
        "signals": {
            each.name: repr(signal.getsignal(each)) for each in signal.valid_signals() if hasattr(each, "name")
        },
        "path": list(sys.path),
        "recursion limit": sys.getrecursionlimit(),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)],
        "open files": sorted(_open_files()),
        "tracing context": repr(TracingContext.try_get()),
        "metrics context": repr(type(getattr(_metrics_context_tls, "metrics_context", None)._on_exit))
        if hasattr(_metrics_context_tls, "metrics_context")
        else "",
        "benchmarker": sorted(vars(benchmarker).keys() & {*deadline.TIMERS}),
        "ends": len(deadline._ends),
    }


def np_state() -> tuple[Any, ...]:
    """Return the state of NumPy's generator as plain values."""
    name, keys, *rest = np.random.get_state()
    return name, keys.tobytes(), *rest


def _hash(state: Any) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()


def _open_files() -> Iterator[str]:
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            target = str(each.readlink())
            yield target.partition(":")[0].removesuffix(" (deleted)")


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[Any]]:
    """Return what differs, by "part" or "part: name"."""
    found = {}
    for part, old in before.items():
        new = after[part]
        if isinstance(old, dict):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    found[f"{part}: {name}"] = [old.get(name), new.get(name)]
        elif old != new:
            found[part] = [old, new]
    return found


# ---- races


def chain(x: torch.Tensor) -> torch.Tensor:
    """Compute a little."""
    return torch.relu(x * 2 + 1).sum(-1)


def _seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def _output(graph: Any, change: Callable[[Any], Any]) -> None:
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        output.args = ([each if each is None else change(each) for each in output.args[0]],)


@torch.library.custom_op("backend_kwargs_census::burst", mutates_args=())
def burst(x: torch.Tensor) -> torch.Tensor:
    """Fail."""
    raise RuntimeError("planted in a call")


burst.register_fake(torch.empty_like)


def fails_to_compile(graph: Any) -> None:
    """Fail when Inductor compiles."""
    raise RuntimeError("planted")


def fails_accuracy(graph: Any) -> None:
    """Double each output."""
    _output(graph, lambda each: graph.call_function(torch.ops.aten.mul.Tensor, (each, 2)))


def fails_in_a_call(graph: Any) -> None:
    """Fail when it is called."""
    _output(graph, lambda each: graph.call_function(torch.ops.backend_kwargs_census.burst.default, (each,)))


PLANTED = {"compile": fails_to_compile, "accuracy": fails_accuracy, "call": fails_in_a_call}


def after_a_race(name: str) -> dict[str, Any]:
    """Return the census after a race that default wins; "race" has no other candidate, others have one that fails."""
    race.better = lambda *_: True  # type: ignore[assignment]
    candidates = [name] if name in PLANTED else []
    if candidates:
        backend_kwargs.register_template(name, {PASS: PLANTED[name], "fx_graph_cache": False})
    backend = backend_kwargs.make_backend("tmpl-inductor:auto", candidates=candidates, budget_s=300.0)
    return after(backend)


def after(backend: Any) -> dict[str, Any]:
    """Return the census after compiling and calling twice."""
    _seed()
    x = torch.ones(8, 64)
    compiled = torch.compile(chain, backend=backend)
    for _ in range(2):
        assert torch.allclose(compiled(x), chain(x))
    return census()


# ---- interrupted anywhere


def interrupts(seconds: float, shard: int, shards: int, candidates: list[str]) -> Iterator[dict[str, Any]]:
    """Interrupt the race at one line after the other; yield whether it reached the line, and what remained changed."""
    torch.set_num_threads(1)  # forks do not inherit the threads of OpenMP
    head_to_head.BOUT, head_to_head.LEAST_BOUTS, head_to_head.MOST_BOUTS = 2, 1, 1
    race.better = lambda *_: True  # type: ignore[assignment]
    backend_kwargs.register_template("call", {PASS: fails_in_a_call, "fx_graph_cache": False})
    run = partial(_race, candidates)
    run()  # all is imported and cached
    points = [point for point in _lines_of(run) if point[1] % shards == shard]
    run()
    must = [point for point in points if point[0].endswith(MUST) and point[2] == 1]
    others = [point for point in points if point not in must]
    spread = sorted(range(len(others)), key=lambda at: at * 0.6180339887 % 1)
    began = time.monotonic()
    for at, point in enumerate([*must, *(others[at] for at in spread)]):
        if at >= len(must) and time.monotonic() - began > seconds:
            break
        reached, left = _in_a_fork(point, run)
        yield {"line": "{}:{} ({})".format(*point), "reached": reached, "left": left}


MODEL = torch.nn.Linear(16, 4)


def _race(candidates: list[str]) -> None:
    torch._dynamo.reset()
    decide.forget_process()
    options = {"candidates": candidates, "budget_s": 300.0, "race": "always"}
    backend = backend_kwargs.make_backend("tmpl-inductor:auto", options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(MODEL, backend=backend)(torch.ones(8, 16))


Point = tuple[str, int, int]


def _lines_of(run: Callable[[], None]) -> list[Point]:
    """Return each line of this package that `run` executes: its first execution, and its last if there are several."""
    times: dict[tuple[str, int], int] = {}

    def seen(file: str, line: int) -> None:
        times[file, line] = times.get((file, line), 0) + 1

    with _traced(seen):
        run()
    return [(file, line, nth) for (file, line), last in times.items() for nth in sorted({1, last})]


@contextlib.contextmanager
def _traced(seen: Callable[[str, int], None]) -> Iterator[None]:
    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "line":
            seen(frame.f_code.co_filename, frame.f_lineno)
        return trace

    sys.settrace(trace)
    threading.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)


def _in_a_fork(point: Point, run: Callable[[], None]) -> tuple[bool, dict[str, Any]]:
    """Interrupt a race at `point` in a fork; return whether it got there, and the differences from before."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        faulthandler.dump_traceback_later(SECONDS_A_CHILD, exit=True)  # a hanging child prints where, and ends
        with os.fdopen(writing, "w") as pipe:
            try:
                json.dump(_interrupted(point, run), pipe)
            except BaseException:  # noqa: BLE001 - the parent reports it
                json.dump([True, {"error": traceback.format_exc()}], pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    reached, left = json.loads(output) if output else (True, {"died": status})
    return reached, left


def _interrupted(point: Point, run: Callable[[], None]) -> tuple[bool, dict[str, Any]]:
    *place, nth = point
    times, reached = 0, False

    def seen(*line: Any) -> None:
        nonlocal times, reached
        if not reached and [*line] == place:
            times += 1
            if times == nth:
                reached = True
                raise KeyboardInterrupt

    _seed()
    before = json.loads(json.dumps(census()))
    with contextlib.suppress(KeyboardInterrupt), _traced(seen):
        run()
    after = json.loads(json.dumps(census()))
    return reached, differences(before, after)


if __name__ == "__main__":
    torch._inductor.config.compile_threads = 1
    what, *rest = sys.argv[1:]
    if what == "interrupts":
        seconds, shard, shards, *candidates = rest
        found = interrupts(float(seconds), int(shard), int(shards), candidates)
    else:
        found = [after(backend_kwargs.make_backend("tmpl-inductor")) if what == "alone" else after_a_race(what)]
    for each in found:
        sys.stdout.write(json.dumps(each) + "\n")
        sys.stdout.flush()
