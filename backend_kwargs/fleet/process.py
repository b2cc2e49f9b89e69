"""The process of a unit, wherever it runs: it is lost when it leaves no result, and ended when it takes too long."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec

from backend_kwargs.fleet.scheduling import Ended
from backend_kwargs.fleet.units import Result, Unit
from backend_kwargs.fleet.worker import GRACE_S, end_tree

LOOK_S = 0.1


@dataclass
class UnitProcess:
    """The process of a unit, with the folder where its result will be, and the time until which it may run."""

    unit: Unit
    process: "subprocess.Popen[bytes]"
    folder: Path
    until: float

    @classmethod
    def start(
        cls, unit: Unit, where: Path, cores: Sequence[int] = (), variables: Mapping[str, str] = MappingProxyType({})
    ) -> "UnitProcess":
        """Start it in the folder `where`, on these cores if any, with these variables of the environment."""
        folder = Path(tempfile.mkdtemp(prefix="backend_kwargs-tune-"))
        with (folder / "stderr").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "backend_kwargs.fleet.worker", folder / "result", ",".join(map(str, cores))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd=where,
                # Modules are found as here: a worker of Ray has the paths of the command.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(variables),
                start_new_session=True,  # Ctrl-C is for the command, which ends what runs
            )
        assert process.stdin
        with suppress(OSError):  # it is dead already, which ended() tells
            process.stdin.write(msgspec.json.encode(unit) + b"\n")
            process.stdin.flush()
        return cls(unit, process, folder, time.monotonic() + unit.most_s)

    def ended(self) -> Ended | None:
        """Return what came of the unit, None while it runs; one that takes too long is ended, and failed."""
        is_late = not self.is_over()
        if is_late and time.monotonic() < self.until:
            return None
        self._end()
        try:
            most_s = self.unit.most_s
            why = f"it took longer than {most_s:g} s, and was killed; limit_s in the plan gives a unit more"
            return Ended(self.unit, Result(failed=why, seconds=most_s)) if is_late else self._outcome()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _outcome(self) -> Ended:
        try:
            return Ended(self.unit, msgspec.json.decode((self.folder / "result").read_bytes(), type=Result))
        except (OSError, msgspec.MsgspecError):
            code = self.process.returncode
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            lines = (self.folder / "stderr").read_text(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "")
            return Ended(self.unit, None, f"{how}{f', {last[:200]}' if last else ''}")

    def interrupt(self) -> None:
        """Ask it to end."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def is_over(self) -> bool:
        """Return whether it has ended; it is not reaped before all that it started has, so its number is no other's."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> None:
        """End it at once with all that it started, and remove its folder."""
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        end_tree(self.process.pid)
        self.process.wait()
        if self.process.stdin:
            with suppress(OSError):
                self.process.stdin.close()


def cancel(running: Sequence[UnitProcess]) -> None:
    """Interrupt processes of units, and end those that have not ended after a grace."""
    for each in running:
        each.interrupt()
    until = time.monotonic() + GRACE_S
    while not all(each.is_over() for each in running) and time.monotonic() < until:
        time.sleep(LOOK_S)
    for each in running:
        each.kill()
