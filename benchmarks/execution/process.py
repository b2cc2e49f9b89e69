"""A step of the suite in its own process, which may crash, hang or run out of memory without harm to the rest."""

import contextlib
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from backend_kwargs.trial import Status, status_of

Tell = Callable[[str], None]
EXIT_S = 3
START_S = 120  # for imports, which belong to no step
POLL_S, TELL_S = 0.02, 30.0
PRELOAD = "benchmarks.execution.preload"
METHODS = ("forkserver", "spawn")  # the second if CUDA does not survive the first


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a process: its value, or its status and the step it had reached.

    `out_of_time` means that the whole run's time was over, not its step's.
    """

    value: Any = None
    at: str = ""
    status: Status = "pass"
    reason: str = ""
    out_of_time: bool = False

    @property
    def passed(self) -> bool:
        """Return whether there is a value."""
        return self.status == "pass"


@cache
def context(method: str, preload: str = PRELOAD) -> Any:
    """Return the way to start processes; the server of "forkserver" has imported `preload`, and so torch."""
    found = multiprocessing.get_context(method)
    if method == "forkserver":
        found.set_forkserver_preload([preload])
    return found


def run(
    target: Callable[..., Any],
    *args: Any,
    step_s: float,
    deadline: float = float("inf"),
    log: Path | None = None,
    heard: Tell = lambda step: None,
    method: str = METHODS[0],
    preload: str = PRELOAD,
) -> Outcome:
    """Return the result of `target(tell, *args)` in a new process, which is killed with all its children.

    The process reports its step with `tell(step)`; a step that takes longer than `step_s` is a timeout. `deadline` is a
    time of `time.monotonic`.
    """
    receiver, sender = context(method, preload).Pipe(duplex=False)
    child = context(method, preload).Process(target=_main, args=(sender, str(log or os.devnull), target, args))
    child.start()
    sender.close()
    try:
        outcome = _listen(receiver, child, step_s, deadline, heard)
        if outcome.passed:
            child.join(EXIT_S)  # killed at once, it would leave semaphores behind
        return outcome
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.join()
        receiver.close()


def _listen(receiver: Connection, child: Any, step_s: float, deadline: float, heard: Tell) -> Outcome:
    at, patience = "", step_s + START_S
    while True:
        left = deadline - time.monotonic()
        if not receiver.poll(max(min(patience, left), 0)):
            return Outcome(None, at, "timeout", f"longer than {step_s:.0f} s", out_of_time=left <= patience)
        patience = step_s
        try:
            kind, *details = receiver.recv()
        except (EOFError, ConnectionError):
            child.join(10)
            return Outcome(None, at, "fail_to_run", f"its process died: {_ending(child.exitcode)}")
        if kind == "at":
            at = details[0]
            if at:
                heard(at)
        elif kind == "done":
            return Outcome(details[0], at)
        else:
            return Outcome(None, at, *details)


@contextlib.contextmanager
def taking_turns(lock: Path | None, wait_on: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Share the file `lock` with other processes; the function yielded waits until this process has it exclusively.

    A waiting process holds no lock, and calls `wait_on` now and then. None: there are no other processes.
    """
    if lock is None:
        yield lambda: None
        return
    with lock.open("a") as file:
        _take(file, fcntl.LOCK_SH, wait_on)
        yield lambda: _take(file, fcntl.LOCK_EX, wait_on)


@contextlib.contextmanager
def alone(lock: Path | None, wait_on: Callable[[], None]) -> Iterator[None]:
    """Have the file `lock` exclusively, without a share before: others wait meanwhile, but only for this step."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        _take(file, fcntl.LOCK_EX, wait_on)
        yield


def _take(file: IO[str], how: int, wait_on: Callable[[], None]) -> None:
    last = time.monotonic()
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, how | fcntl.LOCK_NB)
        if time.monotonic() - last > TELL_S:
            last = time.monotonic()
            wait_on()
        time.sleep(POLL_S)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _main(sender: Connection, log: str, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _write_to(log)
    sender.send(("at", ""))  # starts the clock of the first step
    try:
        value = target(lambda step: sender.send(("at", step)), *args)
    except BaseException as error:  # noqa: BLE001 - reported by the parent
        sender.send(("failed", *status_of(error)))
    else:
        sender.send(("done", value))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(os.getpid(), signal.SIGKILL)


def _write_to(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
