"""Graphs that workers lower in advance, for candidates whose turn comes later."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass, field
from functools import cache

from backend_kwargs.auto.workers.graphs import PackedGraph, packed
from backend_kwargs.auto.workers.pool import Ticket, Workers
from backend_kwargs.backends.inductor.lowered import LoweredGraph
from backend_kwargs.errors import error_text
from backend_kwargs.options.layers import Options

logger = logging.getLogger("backend_kwargs.auto")

LOAD_S = 1.0  # to load code that a worker has lowered, and its kernels: 0.5 to 1.1 s for BERT (H100)
LOOK_S = 0.2  # a race that waits looks so often whether it was interrupted


@cache
def workers() -> Workers:
    """Return the workers of this process, which start when they are asked for."""
    return Workers()


@dataclass(slots=True)
class Job:
    """The lowering of a candidate's graphs by workers: its options, since when, and a ticket for each graph."""

    options: Options
    patches: Options
    began: float = field(default_factory=time.perf_counter)
    tickets: list[Ticket] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether all graphs are lowered, or will not be."""
        return all(ticket.done() for ticket in self.tickets)

    @property
    def reason(self) -> str:
        """Why a graph was not lowered, "" if none is known."""
        return next((reason for each in self.tickets if each.done() and (reason := each.result().reason)), "")


@dataclass
class Ahead:
    """What the workers do for one race. `choose()` returns the options of candidates, each with those for Inductor.

    It is asked when the model's first graph is there; a backward graph follows it.
    """

    choose: Callable[[], Sequence[tuple[Options, Options]]] = lambda: ()
    jobs: list[Job] = field(default_factory=list)
    graphs: list[LoweredGraph] = field(default_factory=list)
    sent: list[PackedGraph] = field(default_factory=list)

    def noted(self, graph: LoweredGraph) -> None:
        """Have a graph lowered that AOTAutograd has just made."""
        self.graphs.append(graph)
        if not workers().number:
            return
        self.sent.append(packed(graph.gm, graph.example_inputs, graph.kwargs))
        for job in self.jobs:
            job.tickets.append(workers().submit(self.sent[-1], job.patches))
        if len(self.graphs) == 1:
            self.more()

    def more(self) -> None:
        """Have the graphs lowered for candidates that are worth it now."""
        if not self.sent:
            return
        try:
            chosen = self.choose()
        except Exception as error:  # noqa: BLE001 - a user's rewrite may raise anything; the race compiles by itself
            logger.info("Nothing is lowered ahead: %s", error_text(error))
            return
        waiting = sum(not job.done for job in self.jobs)
        new = [each for each in chosen if not any(job.options == each[0] for job in self.jobs)]
        for options, patches in new[: workers().number - waiting]:
            tickets = [workers().submit(graph, patches) for graph in self.sent]
            self.jobs.append(Job(options, patches, tickets=tickets))

    @property
    def refused(self) -> str:
        """Why the model's graphs stay in this process, "" if they do not, or if it has no workers."""
        return next((graph.refused for graph in self.sent if graph.refused), "")

    def job_of(self, options: Options) -> Job | None:
        """Return the lowering under these options of a candidate, None if there is none that can succeed."""
        return next((job for job in self.jobs if job.options == options and not job.reason), None)

    def wait(self, job: Job, seconds: float) -> None:
        """Wait until the graphs are lowered, or so many seconds have passed."""
        ends = time.perf_counter() + seconds
        for ticket in job.tickets:
            while not ticket.done() and time.perf_counter() < ends:
                with contextlib.suppress(NotYetError):
                    ticket.result(LOOK_S)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Let no worker run while something is timed."""
        with workers().paused() if self.jobs else contextlib.nullcontext():
            yield

    def end(self) -> None:
        """Have no more graphs lowered for this race, and keep none of them."""
        for job in self.jobs:
            for ticket in job.tickets:
                ticket.cancel()
        self.choose, self.jobs, self.graphs, self.sent = lambda: (), [], [], []
