"""A model compiled one way in a process of its own, which times its calls when it is its turn.

`python -m benchmarks.execution.turns JOB` compiles with empty caches and then obeys lines of JSON from its input:
"check" its results against eager's, "sample" one call, "end". `Process` is the other end. So the first call of each way
is that of a fresh process, and the ways are still timed interleaved, on one device.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from benchmarks.execution.ways import WAYS, Kept

if TYPE_CHECKING:
    import torch

    from backend_kwargs import trial
    from benchmarks.workloads.held_out import HeldOut, Scale

SAMPLE_S = {"cuda": 0.03, "cpu": 0.05}  # of calls in a row; processes that take turns on a GPU switch in milliseconds
WARM_CALLS, LEAST_WARM_S = 5, 0.2
ENDING = 2000  # characters of a process's output in the reason of its failure
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Job:
    """What a process measures: a model, the way it is compiled, where, and with which folder of its own.

    `reference` is the file of eager's results, which the way "eager" writes.
    """

    model: str
    way: str
    scale: "Scale"
    device: str
    dtype: str
    folder: str
    reference: str
    cores: tuple[int, ...] = ()
    gpu: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its process: caches of its own, one GPU, nothing downloaded."""
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{self.folder}/inductor",
            "TRITON_CACHE_DIR": f"{self.folder}/triton",
            "BACKEND_KWARGS_STORE": f"{self.folder}/decisions",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        return {**os.environ, **caches, **({"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else {})}


# ---- the process


@dataclass
class Turns:
    """The model in its process: eager, compiled, and the timer of its calls."""

    job: Job
    row: "HeldOut"
    model: "torch.nn.Module"
    compiled: Callable[..., Any]
    args: tuple["torch.Tensor", ...]
    timer: "trial.WallTimer" = field(init=False)

    @classmethod
    def of(cls, job: Job) -> "Turns":
        """Build the model; compile nothing yet."""
        import torch

        from benchmarks.workloads.drawn import MODELS

        row = MODELS[job.model]
        model, args = row.build(torch.device(job.device), getattr(torch, job.dtype), job.scale)
        return cls(job, row, model, WAYS[job.way].compile(model), args)

    # ---- calls

    def step(self, kept: Kept) -> Any:
        """Call the compiled model once, and return what a loop holds; gradients stay in the parameters."""
        return step(self.compiled, self.model, self.args, kept, training=self.row.training)

    def results(self, fn: Callable[..., Any], model: "torch.nn.Module", args: Any) -> dict[str, Any]:
        """Return copies of all that a call gives: outputs, and in training gradients."""
        from torch.utils import _pytree as pytree

        out = step(fn, model, args, "cloned", training=self.row.training)
        outputs = pytree.tree_map(lambda leaf: leaf.detach(), out)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for parameter in model.parameters():
            parameter.grad = None
        return {"output": outputs, "gradients": found} if self.row.training else {"output": outputs}

    def timer_of(self, calls: Mapping[str, Callable[[], object]]) -> "trial.WallTimer":
        """Return the timer of calls, each in a loop that holds its result until the next one is there."""
        import torch

        from backend_kwargs import trial

        device = self.job.device
        return trial.WallTimer(dict(calls), None, torch.device(device), shortest_s=SAMPLE_S[device])

    # ---- commands

    def first_call(self) -> dict[str, Any]:
        """Make the first call, and return its seconds and what auto has decided."""
        spent = self.timer_of({"first": partial(self.step, "plain")}).timed("first")
        decided = races(self.compiled) if WAYS[self.job.way].auto is not None else []
        return {"first_call_s": spent, "graphs": graphs_compiled(), "races": decided}

    def check(self) -> dict[str, Any]:
        """Compare what a call returns with eager's results, or write these."""
        import torch

        from backend_kwargs import trial

        path = Path(self.job.reference)
        if self.job.way == "eager":
            eager = self.results(self.model, self.model, self.args)
            run = lambda fn, args: self.results(fn, fn, args)  # noqa: E731
            torch.save({"eager": eager, "reference": trial.reference(self.model, self.args, run)}, path)
            return {"status": "pass", "reason": ""}
        for _ in range(WARM_CALLS):  # CUDA graphs are recorded in the second call, and replayed from the third
            seen = self.results(self.compiled, self.model, self.args)
        known = torch.load(path, map_location=self.job.device)
        again = trial.Roundings(lambda: self.results(self.model, self.model, self.args), known["eager"])
        expected, dtype = trial.Expected(**known, roundings=again), getattr(torch, self.job.dtype)
        found = expected.check(seen, dtype=dtype, training=self.row.training)
        return {"status": found.status, "reason": found.reason, "rmse": found.rmse, "eager_rmse": found.reference_rmse}

    def prepare(self) -> dict[str, Any]:
        """Warm up, and choose the repeats of each call."""
        from backend_kwargs.auto.process_memory import call_until_chosen

        calls = WAYS[self.job.way].calls(training=self.row.training)
        self.timer = self.timer_of({name: partial(self.step, kept) for name, kept in calls.items()})
        for name in calls:
            began = time.perf_counter()
            while time.perf_counter() - began < LEAST_WARM_S:
                self.timer.run(name, WARM_CALLS)
            call_until_chosen(partial(self.timer.run, name, WARM_CALLS))
            self.timer.prepare(name, 0)
        return {"repeats": self.timer.repeats, "graphs": graphs_compiled()}

    def sample(self, name: str) -> dict[str, Any]:
        """Return the seconds of a call, from one sample."""
        self.timer.run(name, 1)  # the device was another process's
        self.timer.sample(name)
        return {"seconds": self.timer.samples[name][-1]}


def step(fn: Callable[..., Any], model: "torch.nn.Module", args: Any, kept: Kept, *, training: bool) -> Any:
    """Call `fn`; in training, drop the last gradients first and go backward, as a loop with zero_grad does.

    `kept`: "cloned" also copies results and gradients, as who keeps those of CUDA graphs must; "raw" copies the loss
    alone.
    """
    import torch
    from torch.utils import _pytree as pytree

    if not training:
        with torch.no_grad():
            out = fn(*args)
        return pytree.tree_map_only(torch.Tensor, torch.clone, out) if kept == "cloned" else out
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = None
    loss = fn(*args)
    loss.backward()
    if kept == "cloned":
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
    loss = loss.detach()
    return loss if kept == "plain" else loss.clone()


def graphs_compiled() -> int:
    """Return the number of graphs that dynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def races(compiled: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return auto's decision for each graph, as data."""
    from backend_kwargs import report

    found = []
    for graph in report(compiled).graphs:
        if race := graph.race:
            known = {"winner": race.winner, "options": race.options, "seconds": race.seconds}
            rows = [asdict(row) for row in race.rows]
            found.append({**known, "head": race.table.partition("\n")[0], "rows": rows})
    return found


def main(text: str) -> None:
    """Measure one job: answer each line of the input by a line."""
    values = json.loads(text)
    job = Job(**{**values, "cores": tuple(values["cores"])})
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    _answer(answers, _served(job, commands, answers))


def _served(job: Job, commands: "queue.SimpleQueue[dict[str, Any]]", answers: IO[str]) -> dict[str, Any]:
    try:
        turns = Turns.of(job)
        known: dict[str, Callable[..., dict[str, Any]]]
        known = {"first_call": turns.first_call, "check": turns.check, "prepare": turns.prepare, "sample": turns.sample}
        _answer(answers, {"status": "built"})
        while (command := commands.get()) and (do := command.pop("do")) != "end":
            _answer(answers, {"status": "pass", **known[do](**command)})
    except BaseException as error:  # noqa: BLE001 - whatever failed is a row of the results
        import traceback

        from backend_kwargs.trial import status_of

        traceback.print_exc()
        status, reason = status_of(error)
        return {"status": status, "reason": reason}
    return {"status": "ended"}


def _answer(answers: IO[str], content: Mapping[str, Any]) -> None:
    answers.write(json.dumps(content, default=str) + "\n")
    answers.flush()


def _listen(commands: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    os.killpg(os.getpid(), signal.SIGKILL)  # the parent has ended, perhaps while this process compiles


# ---- the other end


class Process:
    """The process of a job, seen from the one that gives the turns."""

    def __init__(self, job: Job) -> None:
        self.job = job
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        self.log = Path(job.folder) / "log.txt"
        values = {name: getattr(job, name) for name in Job.__slots__}
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.execution.turns", json.dumps(values)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=job.environment,
                start_new_session=True,
                text=True,
            )
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        with self.child.stdout as lines:
            for line in lines:
                self.answers.put(line)
        self.answers.put("")

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer; one with another status than "pass" or "built" is the last."""
        try:
            line = self.answers.get(timeout=max(timeout_s, 0.1))
        except queue.Empty:
            return self._ended("timeout", f"longer than {timeout_s:.0f} s")
        if not line:
            self.child.wait()
            return self._ended("fail_to_run", f"its process ended with {self.child.returncode}: {self.ending()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, **command: Any) -> None:
        """Give a command."""
        assert self.child.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: the answer says how
            self.child.stdin.write(json.dumps(command) + "\n")
            self.child.stdin.flush()

    def ask(self, timeout_s: float, **command: Any) -> dict[str, Any]:
        """Give a command, and return its answer."""
        self.tell(**command)
        return self.answer(timeout_s)

    def ending(self) -> str:
        """Return the end of what it has printed."""
        return self.log.read_text(errors="replace")[-ENDING:].strip()

    def _ended(self, status: str, reason: str) -> dict[str, Any]:
        self.kill()
        return {"status": status, "reason": reason}

    def kill(self) -> None:
        """End it with all its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        assert self.child.stdin is not None
        with contextlib.suppress(OSError):  # what was not read any more
            self.child.stdin.close()
        self.reader.join(1.0)


if __name__ == "__main__":
    main(sys.argv[1])
