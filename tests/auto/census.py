"""The state of a process that a race could change: `python census.py NAME` prints it as JSON after the race NAME.

`python census.py interrupts CALL ONE_IN` makes a call of CALLS once. At each line of this package that it
executes, a fork raises KeyboardInterrupt, lets that end the user's call, and prints what is different from before the
call. Each line is interrupted at its first execution and at a later one, chosen at random. ONE_IN selects one in so
many of these, others each day, and all in MUST.
"""

import collections
import contextlib
import datetime as dt
import faulthandler
import gc
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.utils.cpp_extension  # it imports setuptools, which extends sys.path
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import _metrics_context_tls
from torch._guards import TracingContext
from torch._inductor import cudagraph_trees
from torch._inductor.runtime.benchmarking import benchmarker

import backend_kwargs
from backend_kwargs.auto import process_memory, race, steps
from backend_kwargs.torch_internals.choices import TIMERS

ROOT = str(Path(backend_kwargs.__file__).parent)
MUST = ("auto/sandbox.py", "torch_internals/replacing.py", "torch_internals/dynamo.py")
CALLED_AGAIN = 20  # after one in so many interrupted calls, the call is made again
PASS = "post_grad_custom_post_pass"  # Inductor calls it with the lowered graph
SECONDS_A_CHILD = 30
SECONDS_A_JOB = 10  # at most: a thread of a store that waits for a lock of the interrupted line ends later


def census() -> dict[str, Any]:
    """Return the state of this process that outlives a call, as JSON values."""
    _let_stores_end()
    trees = getattr(cudagraph_trees.local, "tree_manager_containers", {})
    configs = {"dynamo": torch._dynamo.config, "inductor": torch._inductor.config, "functorch": torch._functorch.config}
    return {
        **{
            f"{name} config": {  # sorted, since a copy may have another order
                k: repr(sorted(v, key=repr) if isinstance(v, set) else v) for k, v in config.get_config_copy().items()
            }
            for name, config in configs.items()
        },
        "mark step": cudagraph_trees.MarkStepBox.mark_step_counter,
        "generation": cudagraph_trees.GenerationTracker.generation,
        "CUDA-graph containers": {str(device): repr(each.tree_manager) for device, each in trees.items()},
        "cached tensors": torch._C._is_cached_tensor(torch.empty(0)),
        "generators": [
            hashlib.sha256(repr(state).encode()).hexdigest()
            for state in (torch.get_rng_state().numpy().tobytes(), random.getstate(), np_state())
        ],
        "grad mode": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")],
        "saved tensors hooks": repr(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        "dispatch keys": [
            str(torch._C._dispatch_tls_local_include_set()),
            str(torch._C._dispatch_tls_local_exclude_set()),
        ],
        "function modes": torch._C._len_torch_function_stack(),
        "functorch": torch._C._functorch.get_interpreter_stack() is not None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "folder": str(Path.cwd()),
        "logging": {name: [log.level, len(log.handlers), log.disabled] for name, log in _loggers()},
        "compile lock": compile_lock._is_owned(),
        "memories of decisions": len(process_memory._memories),
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
        "benchmarker": sorted(vars(benchmarker).keys() & {*TIMERS}),
    }


def _loggers() -> Iterator[tuple[str, logging.Logger]]:
    for name in ("", "torch", "torch._dynamo", "torch._inductor", "torch._functorch", "backend_kwargs"):
        yield name, logging.getLogger(name)


def np_state() -> tuple[Any, ...]:
    """Return the state of NumPy's generator as plain values."""
    name, keys, *rest = np.random.get_state()
    return name, keys.tobytes(), *rest


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


MODEL = torch.nn.Linear(16, 4)
Line = tuple[str, int]


class Race:
    """The first call of a model, which races the candidates CANDIDATES."""

    CANDIDATES: tuple[str, ...] = ("call", "simd_256")

    def prepare(self) -> None:
        """Forget what an earlier call decided."""
        torch._dynamo.reset()
        process_memory.forget_process()
        shutil.rmtree(os.environ["BACKEND_KWARGS_STORE"], ignore_errors=True)

    def run(self) -> None:
        """Make the call."""
        _first_call("tmpl-inductor:auto", candidates=[*self.CANDIDATES], budget_s=300.0)


class Stored(Race):
    """The first call of a process that finds the decision of another one."""

    CANDIDATES = ("simd_256",)

    def prepare(self) -> None:
        """Have the decision stored, and forget it."""
        super().prepare()
        self.run()
        torch._dynamo.reset()
        process_memory.forget_process()


class Control(Race):
    """A call that changes the process without protection, at two lines that a Ctrl-C can follow."""

    def run(self) -> None:
        """Change two settings, and set them back."""
        source = "def call(gc):\n gc.disable()\n try:\n  gc.enable()\n finally:\n  pass\n"
        exec(compile(source, f"{ROOT}/planted.py", "exec"), names := {})
        names["call"](gc)


CALLS = {"race": Race, "stored": Stored, "control": Control}


def _first_call(name: str, **options: Any) -> None:
    backend = backend_kwargs.make_backend(name, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.ones(8, 16)
        assert torch.allclose(torch.compile(MODEL, backend=backend)(x), MODEL(x), atol=1e-5)


def interrupts(name: str, one_in: int) -> Iterator[dict[str, Any]]:
    """Interrupt a call at one line after the other; yield what remained changed after each."""
    torch.set_num_threads(1)  # forks do not inherit the threads of OpenMP
    steps.BOUT, steps.LEAST_BOUTS, steps.MOST_BOUTS = 2, 1, 1
    race.better = lambda *_: True  # type: ignore[assignment]
    backend_kwargs.register_template("call", {PASS: fails_in_a_call, "fx_graph_cache": False})
    _first_call("tmpl-inductor", fx_graph_cache=False)
    before, call = _as_json(census()), CALLS[name]()
    call.prepare()
    call.run()  # all is imported and cached
    yield {"line": "the whole call", "left": differences(before, _as_json(census()))}
    call.prepare()
    counts: collections.Counter[Line] = collections.Counter()
    with _traced(lambda line: counts.update([line])):
        call.run()
    day = str(dt.datetime.now(dt.UTC).date())
    later = {line: random.Random(f"{day} {line}").randint(min(2, count), count) for line, count in counts.items()}

    def chosen(line: Line, nth: int) -> bool:
        if nth not in (1, later.get(line)):
            return False
        drawn = zlib.crc32(f"{line} {nth} {day}".encode())
        return drawn % one_in == 0 or (line[0].endswith(MUST) and nth == 1)

    call.prepare()
    yield from _interrupted(call, chosen)


def _interrupted(call: Race, chosen: Callable[[Line, int], bool]) -> list[dict[str, Any]]:
    """Make the call, and fork it at each chosen execution of a line; return the forks' answers, and their count."""
    counts: collections.Counter[Line] = collections.Counter()
    answers: list[dict[str, Any]] = []
    clock, waited, pipe = time.perf_counter, 0.0, None
    _seed()
    before = _as_json(census())

    def interrupt(line: Line) -> None:
        nonlocal waited, pipe
        counts[line] += 1
        if not chosen(line, counts[line]):
            return
        began = clock()
        pipe, answer = _fork(f"{line[0].removeprefix(ROOT)}:{line[1]} ({counts[line]})")
        if pipe is not None:
            raise KeyboardInterrupt
        answers.append(answer)
        waited += clock() - began

    time.perf_counter = lambda: clock() - waited  # else budgets and timings would count the forks
    ended = False
    try:
        with _traced(interrupt):
            call.run()
    except KeyboardInterrupt:
        ended = True
    time.perf_counter = clock
    if pipe is not None:
        _answer(pipe, call, before, ended)
    return [*answers, {"line": "all", "lines": len(counts), "forks": len(answers), "left": {}}]


def _fork(line: str) -> tuple[Any, dict[str, Any]]:
    """Return a pipe to answer through, in the fork, and in the parent nothing and the answer."""
    _let_stores_end()
    reading, writing = os.pipe()
    drawn = random.getstate()
    child = os.fork()
    if not child:
        random.setstate(drawn)  # Python seeds anew in a fork
        os.close(reading)
        faulthandler.dump_traceback_later(SECONDS_A_CHILD, exit=True)  # a hanging child prints where, and ends
        return writing, {}
    os.close(writing)
    with os.fdopen(reading) as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    return None, {"line": line, "left": json.loads(output) if output else {"died": status}}


def _let_stores_end() -> None:
    """Wait for the threads of stores: a fork has none of them, so that a file that one has open stays open there."""
    for thread in threading.enumerate():
        if thread.name == "backend_kwargs.stores":
            thread.join(SECONDS_A_JOB)


def _answer(pipe: int, call: Race, before: dict[str, Any], ended: bool) -> NoReturn:
    """Answer with what is different from `before`, and end this fork."""
    try:
        after = _as_json(census())
        after["open files"].remove("pipe")
        after["threads"][2] = before["threads"][2]  # a fork has one
        left = differences(before, after)
        if not ended:
            left["KeyboardInterrupt"] = ["raised", "did not end the call"]
        if os.getpid() % CALLED_AGAIN == 0:
            os.environ["BACKEND_KWARGS_STORE"] += "-of-a-fork"
            call.run()
    except BaseException:  # noqa: BLE001 - the parent reports it
        left = {"error": traceback.format_exc()}
    with os.fdopen(pipe, "w") as file:
        json.dump(left, file)
    os._exit(0)


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(value))  # type: ignore[no-any-return]


@contextlib.contextmanager
def _traced(executed: Callable[[Line], None]) -> Iterator[None]:
    """Call `executed` before each line of this package in this thread, the only one that Python interrupts."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "line":
            executed((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


if __name__ == "__main__":
    gc.unfreeze()  # what the process that was forked has frozen, of which some is freed in time
    torch._inductor.config.compile_threads = 1
    what, *rest = sys.argv[1:]
    if what == "interrupts":
        found = interrupts(rest[0], int(rest[1]))
    else:
        found = [after(backend_kwargs.make_backend("tmpl-inductor")) if what == "alone" else after_a_race(what)]
    for each in found:
        sys.stdout.write(json.dumps(each) + "\n")
        sys.stdout.flush()
