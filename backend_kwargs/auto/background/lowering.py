"""What workers lower for a race in the background: nothing is lowered in this process after the first call."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from backend_kwargs.auto.ahead import Job, workers
from backend_kwargs.auto.candidates import RaceCandidate, with_recording
from backend_kwargs.auto.head_to_head import Runner
from backend_kwargs.auto.race import Race
from backend_kwargs.auto.selection import OVER_BUDGET
from backend_kwargs.auto.workers.pool import Workers
from backend_kwargs.errors import error_text
from backend_kwargs.options.layers import Options
from backend_kwargs.torch_internals.caches import compile_kernels_of

logger = logging.getLogger("backend_kwargs.auto")

NO_WORKER = "no worker can lower it, and no call may wait for a compile; race='missing' tries it"


@cache
def pool() -> Workers:
    """Return the workers of races in the background: those of other races, or a single one where cores are few.

    Nothing waits for it, and it is of low priority.
    """
    found = workers()
    return found if found.number else Workers(1)


@dataclass
class Lowerings:
    """The candidates of a race that workers lower, each against a champion, whose options it may extend."""

    race: Race
    kernels: dict[int, threading.Thread] = field(default_factory=dict)  # that wait for those of a job

    def why_not(self, candidate: RaceCandidate, champion: Runner) -> str:
        """Return why the candidate is not raced, "" if it is: the budget limits slices, not what workers do."""
        why = self.race.selection.why_not(candidate, champion)
        if why and not why.startswith(OVER_BUDGET):
            return why
        return "" if self._may_be_lowered(candidate, champion) else NO_WORKER

    def _may_be_lowered(self, candidate: RaceCandidate, champion: Runner) -> bool:
        """Return whether workers have lowered the candidate, or will."""
        if candidate.compiler:
            return False
        if job := self.job(candidate, champion):
            return not job.reason
        whole = self._whole(candidate, champion)
        return any(whole == options for options, _ in self.race.compiles.ahead.chosen)

    def _whole(self, candidate: RaceCandidate, champion: Runner) -> Options:
        return with_recording(self.race.selection.options(candidate, champion))

    def job(self, candidate: RaceCandidate, champion: Runner) -> Job | None:
        """Return the lowering of the candidate, None if none has begun."""
        options = self._whole(candidate, champion)
        return next((job for job in self.race.compiles.ahead.jobs if job.options == options), None)

    def settled(self, candidate: RaceCandidate, champion: Runner) -> bool:
        """Return whether a worker has lowered the candidate, or could not."""
        job = self.job(candidate, champion)
        return job is not None and self._loads_fast(job)

    def _loads_fast(self, job: Job) -> bool:
        """Return whether a job is done and, on a GPU, its kernels are compiled, which a thread waits for."""
        if not job.done or job.reason or self.race.device.type != "cuda":
            return job.done
        keys = [ticket.result().key for ticket in job.tickets]
        thread = self.kernels.get(id(job))
        if thread is None:
            thread = self.kernels[id(job)] = threading.Thread(target=_compile_kernels, args=(keys,), daemon=True)
            thread.start()
        return not thread.is_alive()


def _compile_kernels(keys: Sequence[str]) -> None:
    for key in keys:
        try:
            compile_kernels_of(key)
        except Exception as error:  # noqa: BLE001 - loading the graph will show it
            logger.info("Kernels are compiled when they are loaded: %s", error_text(error))
