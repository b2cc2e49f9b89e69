"""Graphs that workers lower in advance, for candidates whose turn comes later."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass, field
from functools import cache

from backend_kwargs.auto.workers.cores import allowed_cores, spare_workers
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
class Sent:
    """The graphs of one trace as bytes, after `rewrites` of dynamo's; `fits(options)`: they are a candidate's."""

    rewrites: Sequence[str]
    fits: Callable[[Options], bool]
    graphs: list[PackedGraph] = field(default_factory=list)


@dataclass(slots=True)
class Job:
    """The lowering of a candidate's graphs by workers: its options, since when, and a ticket for each graph."""

    of: Sent
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

    It is asked when the first of default's `graphs` is there, which a backward graph follows, and when there is a new
    champion. `sent` has the graphs of each trace.
    """

    choose: Callable[[], Sequence[tuple[Options, Options]]] = lambda: ()
    chosen: Sequence[tuple[Options, Options]] = ()
    pool: Workers | None = None  # by default those of the process
    jobs: list[Job] = field(default_factory=list)
    graphs: list[LoweredGraph] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)

    @property
    def spare(self) -> int:
        """How many workers have nothing to do."""
        return self.workers.number - sum(not job.done for job in self.jobs)

    def noting(self, rewrites: Sequence[str], fits: Callable[[Options], bool]) -> Callable[[LoweredGraph], None]:
        """Return what notes each graph that AOTAutograd makes in one more trace."""
        of = Sent(rewrites, fits)
        self.sent.append(of)

        def noted(graph: LoweredGraph) -> None:
            if not self.workers.number:
                return
            of.graphs.append(packed(graph.gm, graph.example_inputs, graph.kwargs, rewrites))
            for job in self.jobs:
                if job.of is of:
                    job.tickets.append(self.workers.submit(of.graphs[-1], job.patches))

        return noted

    def noting_default(self, fits: Callable[[Options], bool]) -> Callable[[LoweredGraph], None]:
        """Return what notes each graph of default's trace, and has it lowered for candidates at once."""
        noting = self.noting((), fits)

        def noted(graph: LoweredGraph) -> None:
            self.graphs.append(graph)
            noting(graph)
            if len(self.graphs) == 1:
                self.more()

        return noted

    def fits(self, options: Options) -> Sent | None:
        """Return the trace whose graphs are those of a candidate with these options, None if there is none."""
        return next((each for each in self.sent if each.graphs and each.fits(options)), None)

    def more(self) -> None:
        """Have graphs lowered for candidates that are worth it now, as many as there are idle workers."""
        self.choose_again()
        self.lower_chosen()

    def choose_again(self) -> None:
        """Choose the candidates that are worth it now."""
        try:
            self.chosen = self.choose() if any(each.graphs for each in self.sent) else ()
        except Exception as error:  # noqa: BLE001 - a user's rewrite may raise anything; the race compiles by itself
            logger.info("Nothing is lowered ahead: %s", error_text(error))
            self.chosen = ()

    def lower_chosen(self) -> None:
        """Have graphs lowered for as many of the chosen candidates as there are idle workers."""
        new = [each for each in self.chosen if not any(job.options == each[0] for job in self.jobs)]
        for options, patches in new[: max(self.spare, 0)]:
            self.lower(options, patches)

    def lower(self, options: Options, patches: Options) -> None:
        """Have the graphs of a trace lowered for a candidate with these options, if there are such graphs."""
        if of := self.fits(options):
            tickets = [self.workers.submit(graph, patches) for graph in of.graphs]
            self.jobs.append(Job(of, options, patches, tickets=tickets))

    @property
    def workers(self) -> Workers:
        """The workers that lower."""
        return self.pool or workers()

    @property
    def refused(self) -> str:
        """Why graphs stay in this process, "" if they do not, or if its cores leave none for a worker."""
        for each in self.sent:
            if reason := next((graph.refused for graph in each.graphs if graph.refused), ""):
                return f"{', '.join(each.rewrites)}: {reason}" if each.rewrites else reason
        return self.workers.refusal() if spare_workers(allowed_cores()) else ""

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
        with self.workers.paused() if self.jobs else contextlib.nullcontext():
            yield

    def end(self) -> None:
        """Have no more graphs lowered for this race, and keep none of them."""
        for job in self.jobs:
            for ticket in job.tickets:
                ticket.cancel()
        self.choose, self.chosen, self.jobs, self.graphs, self.sent = lambda: (), (), [], [], []
