"""Workers, and what they are asked for."""

import atexit
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

from backend_kwargs.auto.workers.cores import allowed_cores, refused, spare_workers
from backend_kwargs.auto.workers.graphs import PackedGraph
from backend_kwargs.auto.workers.messages import Reply, Request
from backend_kwargs.auto.workers.process import WorkerEndedError, WorkerProcess
from backend_kwargs.errors import error_text
from backend_kwargs.options.layers import Options

Ticket = Future[Reply]  # done(), result(timeout), cancel(), which a job that runs already does not obey
IDLE_S = 120.0
NICE = 10  # the increment of their niceness: what runs in the program comes first
LIMIT_S = 180.0  # of one graph
STOPPED = "the workers were stopped"


class Workers:
    """Processes that lower graphs under other options than this one does, each one graph at a time.

    A `Reply` has the `key` in Inductor's cache under which this process will find the code, or else a `reason` in one
    line. Nothing raises. Without `number`, there are as many workers as the cores allow: none on two cores.
    """

    def __init__(
        self, number: int | None = None, *, idle_s: float = IDLE_S, limit_s: float = LIMIT_S, nice: int = NICE
    ) -> None:
        self.refused = refused()
        if number is None:
            number = 0 if self.refused else spare_workers(allowed_cores())
            self.refused = self.refused or ("" if number else f"{allowed_cores()} cores leave none for a worker")
        self.number = 0 if self.refused else number
        self.idle_s, self.limit_s, self.nice = idle_s, limit_s, nice
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[tuple[Request, Ticket] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._processes: list[WorkerProcess] = []
        self._stopped = False

    def start(self) -> None:
        """Start the processes that do not run, and return at once: each imports torch in some seconds."""
        if self.number == 0 or os.getpid() != self._pid:
            return
        with self._lock:
            if not self._stopped and not self._threads:
                atexit.register(self.stop)
            while not self._stopped and len(self._threads) < self.number:
                thread = threading.Thread(target=self._serve, name="backend_kwargs worker", daemon=True)
                self._threads.append(thread)
                thread.start()

    def submit(self, graph: PackedGraph, options: Options, **changed: object) -> Ticket:
        """Have a graph lowered under `options` on top of this thread's own, and return at once.

        `changed` are keyword arguments of `compile_fx_inner` that this process will give in place of the graph's own;
        `cudagraphs` may be a bool, and is what the options say if it is not given.
        """
        ticket: Ticket = Future()
        reason = self.refusal() or graph.refused
        try:
            request = None if reason else _request(graph, options, changed)
        except Exception as error:  # noqa: BLE001 - an option may be anything
            request, reason = None, _why(error)
        if request is None:
            ticket.set_result(Reply(reason=reason))
            return ticket
        self._jobs.put((request, ticket))
        self.start()
        if self._stopped:
            self._drop(STOPPED)  # by another thread, since the first line
        return ticket

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no worker use a core, as while something is timed. Compile nothing inside: they may hold locks."""
        with self._lock:
            processes = list(self._processes)
        try:
            for each in processes:
                each.signal(signal.SIGSTOP)
            yield
        finally:
            for each in processes:
                each.signal(signal.SIGCONT)

    def processes(self) -> list[int]:
        """Return the process ids of the workers that run."""
        with self._lock:
            return [each.process.pid for each in self._processes]

    def stop(self) -> None:
        """End all workers. What they have not done says so."""
        if os.getpid() != self._pid:
            return  # a fork has the parent's workers in its memory, and must not end them
        with self._lock:
            self._stopped = True
            processes, threads = list(self._processes), list(self._threads)
        for each in processes:
            each.kill()
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(5)
        self._drop(STOPPED)
        atexit.unregister(self.stop)

    def refusal(self) -> str:
        """Return why nothing is lowered for this process, "" if it is."""
        if os.getpid() != self._pid:
            return "this process was forked from the one that has the workers"
        if self._stopped:
            return STOPPED
        return self.refused or ("" if self.number else "no worker is wanted")

    def _serve(self) -> None:
        """Start a process and give it jobs, until there is none for a while. A process ends with its thread.

        The kernel sends a process's PR_SET_PDEATHSIG when the thread that started it ends, so it is started here.
        """
        process: WorkerProcess | None = None
        try:
            process = WorkerProcess(self.nice)
            with self._lock:
                self._processes.append(process)
            process.ready(self.limit_s)
        except Exception as error:  # noqa: BLE001 - what waits must be answered
            self.refused = _why(error)  # the next would not start either
        else:
            while not self._stopped and (job := self._next()) and self._do(process, *job):
                pass
        finally:
            with self._lock:
                self._threads.remove(threading.current_thread())
                if process in self._processes:
                    self._processes.remove(process)
            if process:
                process.end()
            if reason := self.refusal():
                self._drop(reason)
            elif not self._jobs.empty():
                self.start()  # for a job that came when this thread had stopped waiting, or that a dead process left

    def _next(self) -> tuple[Request, Ticket] | None:
        try:
            return self._jobs.get(timeout=self.idle_s)
        except queue.Empty:
            return None

    def _do(self, process: WorkerProcess, request: Request, ticket: Ticket) -> bool:
        """Answer a ticket, and return whether the process can go on."""
        if not ticket.set_running_or_notify_cancel():
            return True
        start = time.perf_counter()
        try:
            ticket.set_result(process.ask(request, self.limit_s))
        except Exception as error:  # noqa: BLE001 - whatever it is, the process is not used again
            reason = STOPPED if self._stopped else _why(error)
            ticket.set_result(Reply(reason=reason, seconds=time.perf_counter() - start))
            return False
        return True

    def _drop(self, reason: str) -> None:
        """Answer what waits with a reason."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job and job[1].set_running_or_notify_cancel():
                job[1].set_result(Reply(reason=reason))


def _request(graph: PackedGraph, options: Options, changed: Mapping[str, object]) -> Request:
    from backend_kwargs.torch_internals.lowered_graphs import pickled
    from backend_kwargs.torch_internals.lowering_state import INDUCTOR, state

    sent = state(options)
    changed = {"cudagraphs": sent["configs"][INDUCTOR]["triton.cudagraphs"], **changed}
    return Request(graph.data, pickled((sent, changed)), graph.rewrites)


def _why(error: BaseException) -> str:
    from backend_kwargs.torch_internals.lowered_graphs import UnportableError

    return str(error) if isinstance(error, UnportableError | WorkerEndedError) else error_text(error)
