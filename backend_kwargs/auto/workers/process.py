"""One worker process, as the thread that starts it sees it."""

import os
import selectors
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from backend_kwargs.auto.workers.messages import Reply, Request, receive, send
from backend_kwargs.errors import shortened

CHILD = "backend_kwargs.auto.workers.child"
NOT_INHERITED = ("TORCH_LOGS", "TORCH_TRACE")  # nobody reads its logs
END_S = 2.0  # a process that has closed its pipe ends so soon, and then its code says why


class WorkerEndedError(Exception):
    """A worker process has ended, or was ended. Contains the reason."""


class WorkerProcess:
    """A worker process. Only the thread that made it asks it; any thread may stop it.

    It is a process of its own, not `multiprocessing`, which imports the main module again: that may be a notebook, a
    prompt or standard input. `Popen` makes it without a fork of what CUDA has started here.
    """

    def __init__(self, nice: int) -> None:
        read, child_write = os.pipe()
        child_read, write = os.pipe()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self.requests, self.replies = os.fdopen(write, "wb"), os.fdopen(read, "rb")
        # -P: with -m, Python would look for modules in the present folder first.
        command = [sys.executable, "-P", "-W", "ignore", "-m", CHILD]
        try:
            self.process: subprocess.Popen[Any] = subprocess.Popen(
                [*command, *map(str, (os.getpid(), child_read, child_write, nice))],
                env=_environment(),
                pass_fds=(child_read, child_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.errors,
                process_group=0,  # Ctrl-C at a terminal goes to the group of the parent
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(child_read)
            os.close(child_write)

    def ready(self, limit_s: float) -> None:
        """Wait until it has imported torch."""
        self._reply(limit_s)

    def ask(self, request: Request, limit_s: float) -> Reply:
        """Return the reply to a request, or raise WorkerEndedError; a process that takes too long is ended."""
        try:
            send(self.requests, request.parts())
        except OSError as error:
            raise self._ended() from error
        return self._reply(limit_s)

    def _reply(self, limit_s: float) -> Reply:
        with selectors.DefaultSelector() as ready:  # not select.select(), which knows no descriptor above 1023
            ready.register(self.replies, selectors.EVENT_READ)
            replied = ready.select(limit_s)
        if not replied:
            self.kill()
            raise WorkerEndedError(f"the worker took more than {limit_s:g} s and was ended")
        if not (parts := receive(self.replies)):
            raise self._ended()
        return Reply.of(parts)

    def signal(self, number: int) -> None:
        """Send a signal to it and to the compilers that it has started."""
        with suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill it; `end` must follow, in the thread that asks it."""
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill it and free what it takes here."""
        self.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        for each in (self.requests, self.replies, self.errors):
            with suppress(OSError):  # what is still to be written has no reader
                each.close()

    def _ended(self) -> WorkerEndedError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.kill()
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        return WorkerEndedError(f"the worker {how}" + (f": {shortened(said[-1], 200)}" if said else ""))


def _environment() -> dict[str, str]:
    """Return this process's environment and modules, without a pool of processes that would compile kernels."""
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
    return {**inherited, "TORCH_WARM_POOL": "0", "PYTHONPATH": path}
