"""Which unit runs next, and where: units that are done are skipped, the longest runs first, a lost one runs again.

How long a unit takes is learned from earlier runs and from other sizes of its model, also while others run. Of units
that may take as long, a process begins with its share, and then takes what others have not begun if the store can give
claims. A `Summary` says what came of it all.

A unit has a process, on this machine or on a Ray cluster: it is lost when it leaves no result, and ended when it takes
too long. On this machine there is one worker for each visible GPU, or several for the CPU, each on its own cores. On a
cluster each unit is a task, which Ray places, and runs again where a worker dies. It gets the unit as JSON, and the
folder of the plan with the factories. Whoever can reach a cluster, or its dashboard, can run any code there.
"""

import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from backend_kwargs.auto.machine import machine
from backend_kwargs.errors import BackendKwargsError, error_text, pip_install
from backend_kwargs.fleet.board import LEASE_S, Result, Unit, UnitClaims, UnitDocument, document_of, is_named, name_of
from backend_kwargs.fleet.worker import GRACE_S, end_tree
from backend_kwargs.interval import Interval, widest
from backend_kwargs.stores.urls import HIDDEN, label_of, without_secrets

MOST_ATTEMPTS = 3  # of a unit whose worker dies
MOST_AWAY_S = 600.0  # of a store that does not answer, if nothing runs
POLL_S = LEASE_S / 4  # between two looks at a unit that another process runs
LEARN_S = LEASE_S  # between two looks at how long units took, while that of some is not known


class Ended(NamedTuple):
    """A unit that ended: its result, or the reason why its worker was lost."""

    unit: Unit
    result: Result | None
    lost: str = ""


class Pool(Protocol):
    """Workers that run units."""

    def missing(self, unit: Unit) -> str:
        """Return why no worker here can ever run this unit, or ""."""

    def devices_of(self, unit: Unit) -> Collection[str]:
        """Return the names of the devices that may run this unit, as its result names one; none if not known."""

    def fits(self, unit: Unit) -> bool:
        """Return whether a worker is free that can run it now, by its device and threads."""

    def start(self, unit: Unit) -> None:
        """Run a unit that fits."""

    def wait(self, seconds: float) -> Sequence[Ended]:
        """Return the units that ended; wait at most `seconds` for the first."""

    def cancel(self) -> None:
        """End what runs."""


class Queue:
    """The units of a process, with what became of them: each is taken once, unless it is lost."""

    def __init__(
        self,
        units: Sequence[Unit],
        board: UnitClaims,
        clock: Callable[[], float],
        share: tuple[int, int] = (1, 1),
    ) -> None:
        number, of = share
        self.board, self.clock = board, clock
        self.own = {unit.key for unit in units[number - 1 :: of]}
        known = board.known()
        done = board.done(known)
        self.done = {unit.key: done[name_of(unit)] for unit in units if name_of(unit) in done}
        # Without claims another process may be racing what is not its own, and nobody would know.
        mine = units if board.claims else [unit for unit in units if unit.key in self.own]
        self.left = {unit.key: unit for unit in mine if unit.key not in self.done}
        self.looked: dict[str, float] = {}
        self.attempts: Counter[str] = Counter()
        self.away, self.looked_again = "", 0.0
        self.away_since: float | None = None
        before: Counter[tuple[str, str]] = Counter()
        self.places: dict[str, int] = {}  # among the units of its model
        for unit in units:
            self.places[unit.key] = before[unit.model, unit.device]
            before[unit.model, unit.device] += 1
        self.learned = clock()
        self._order(known)

    def _order(self, known: Mapping[str, UnitDocument]) -> None:
        """Sort what is left: what was lost, then the longest, its own, and one of each model before a second one."""
        seconds = expected(self.left.values(), known)
        self.is_guess = any(name_of(unit) not in known for unit in self.left.values())

        def place(key: str) -> tuple[bool, float, bool, int]:
            return key not in self.attempts, -seconds[key], key not in self.own, self.places[key]

        self.left = {key: self.left[key] for key in sorted(self.left, key=place)}

    def take(self, fits: Callable[[Unit], bool]) -> Unit | None:
        """Return the longest unit that fits and that no other process has, None if there is none now."""
        now = self.clock()
        kinds = {_kind(unit): unit for unit in self.left.values()}
        free = {kind for kind, unit in kinds.items() if fits(unit)}
        if not free or (self.away_since is not None and now < self.looked_again):
            return None
        try:
            if self.is_guess and now - self.learned >= LEARN_S:
                self.learned = now
                self._order(self.board.known())
            found = self._claimed(free, now)
        except Exception as error:  # noqa: BLE001 - each kind of store raises its own error
            self.away_since = now if self.away_since is None else self.away_since
            self.away, self.looked_again = self.board.words(error), now + POLL_S
            return None
        self.away_since = None
        return found

    def _claimed(self, free: Collection[tuple[str, int | None]], now: float) -> Unit | None:
        """Return the first unit of the kinds that is this process's to run, and take off those that have ended."""
        for key, unit in list(self.left.items()):
            if now - self.looked.get(key, float("-inf")) < POLL_S or _kind(unit) not in free:
                continue
            # What failed in another's share is that process's to try again.
            state = self.board.take(unit, failed_too=key in self.own)
            if state == "elsewhere":
                self.looked[key] = now
                continue
            del self.left[key]
            if state == "ours":
                return unit
        return None

    def check_store(self) -> None:
        """Raise if the store has not answered for a long time."""
        if self.away_since is not None and self.clock() - self.away_since > MOST_AWAY_S:
            raise BackendKwargsError(
                f"Store {self.board.store.label!r} does not answer any more: {self.away}. What ended is kept: start it "
                "again later."
            )

    def again(self, unit: Unit) -> bool:
        """Put a unit back whose worker was lost, first in the queue; return whether it may be tried again."""
        self.attempts[unit.key] += 1
        if self.attempts[unit.key] >= MOST_ATTEMPTS:
            return False
        self.left = {unit.key: unit, **self.left}
        return True


def _kind(unit: Unit) -> tuple[str, int | None]:
    """Return what says whether a worker can run a unit."""
    return unit.device, unit.threads


def expected(units: Collection[Unit], known: Mapping[str, UnitDocument]) -> dict[str, float]:
    """Return how many seconds each unit may take: as it did, as its model's others did, as all did, or its budget."""
    of_model, all_seconds = defaultdict(list), []
    for document in known.values():
        if document.seconds and not document.failed:
            of_model[document.unit.model, document.unit.device].append(document.seconds)
            all_seconds.append(document.seconds)

    def seconds(unit: Unit) -> float:
        own = known.get(name_of(unit))
        if own and own.seconds and not own.failed:
            return own.seconds
        like = of_model[unit.model, unit.device] or all_seconds
        return statistics.fmean(like) if like else unit.budget_s

    return {unit.key: seconds(unit) for unit in units}


def drive(queue: Queue, pool: Pool) -> Iterator[Ended]:
    """Run the units of the queue on the pool, and yield each that ended here, once it is in the store.

    It returns when every unit has ended here or elsewhere; whoever stops before ends what runs.
    """
    running = 0
    try:
        while queue.left or running:
            while (unit := queue.take(pool.fits)) is not None:
                pool.start(unit)
                running += 1
            if not running:
                queue.check_store()
                if not queue.left:
                    return
            for ended in pool.wait(POLL_S):
                running -= 1
                if (final := _recorded(queue, ended)) is not None:
                    yield final
    finally:
        if running:
            pool.cancel()


def _recorded(queue: Queue, ended: Ended) -> Ended | None:
    """Keep what came of a unit; None if it runs again, since its worker was lost."""
    unit, result, lost = ended
    if result is None:
        queue.board.release(unit)
        if queue.again(unit):
            return None
        result = Result(failed=f"its worker was lost {MOST_ATTEMPTS} times: {lost}")
    if why := queue.board.record(unit, result):
        result = msgspec.structs.replace(result, failed=why)
    return Ended(unit, result)


SAME_WITHIN = 1.1  # a call is as fast as itself, up to this


@dataclass(frozen=True)
class Summary:
    """What came of a plan: `known` are the store's documents by name, `missing` the reasons why no worker can run one.

    `ended` are the units that ended in this process.
    """

    units: Sequence[Unit]
    known: Mapping[str, UnitDocument]
    ended: Mapping[str, Ended] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, units: Sequence[Unit], board: UnitClaims, ended: Sequence[Ended], missing: Mapping[str, str]
    ) -> "Summary":
        """Return the summary, with the store read again for what others did."""
        known = board.known()
        failed = {name: document for name, document in known.items() if document.failed}
        # What ended here is done, also if another process has raced it for its own device since.
        own = {name_of(unit): document_of(unit, result) for unit, result, _ in ended if result and not result.failed}
        done = failed | board.done(known) | own
        return cls(units, done, {each.unit.key: each for each in ended}, missing)

    def document(self, unit: Unit) -> UnitDocument | None:
        """Return the document of a unit that is done."""
        document = self.known.get(name_of(unit))
        return document if document and not document.failed else None

    def failure(self, unit: Unit) -> str:
        """Return why a unit is not done, "" if it is, or was not begun."""
        ended = self.ended.get(unit.key)
        if ended and ended.result and ended.result.failed:
            return ended.result.failed
        if self.document(unit):
            return ""
        stored = self.known.get(name_of(unit))
        return stored.failed if stored else ""

    def status(self, unit: Unit) -> str:
        """Return whether a unit was raced here, was done before or elsewhere, failed, or is not done."""
        if self.failure(unit):
            return "failed"
        if self.document(unit):
            return "raced" if unit.key in self.ended else "done before"
        return "no worker" if unit.key in self.missing else "not done"

    def failed_among(self, own: Collection[str]) -> bool:
        """Return whether a unit failed here, or in this process's `own` share: others' are theirs to try again."""
        return any(unit.key in own or unit.key in self.ended for unit, _ in self.failures)

    @property
    def failures(self) -> list[tuple[Unit, str]]:
        """The units that failed, with their reasons."""
        return [(unit, why) for unit in self.units if (why := self.failure(unit))]

    @property
    def cost_s(self) -> float:
        """The seconds of workers that this process spent."""
        return sum(each.result.seconds for each in self.ended.values() if each.result)

    @property
    def covered(self) -> tuple[list[str], list[str]]:
        """The devices that were asked for, and those of them for which each unit is done."""
        asked = list(dict.fromkeys(unit.device for unit in self.units))
        left = {unit.device for unit in self.units if not self.document(unit)}
        return asked, [device for device in asked if device not in left]

    @property
    def same(self) -> Interval | None:
        """The widest A/A ratio of the units that were raced here: how far a call may be from itself."""
        return widest(each.result.same for each in self.ended.values() if each.result)

    @property
    def noise(self) -> Interval | None:
        """The widest A/A ratio of all units that are done, whenever they were raced."""
        return widest(document.same for unit in self.units if (document := self.document(unit)))

    @property
    def is_disturbed(self) -> bool:
        """Whether a call may differ from itself by more than a quiet machine explains."""
        return self.same is not None and self.same.reach > SAME_WITHIN


TOPOLOGY = Path("/sys/devices/system/cpu")


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


@dataclass(frozen=True, slots=True)
class Device:
    """What a worker has for itself: some cores, and perhaps a GPU, as CUDA_VISIBLE_DEVICES names it."""

    cores: tuple[int, ...]
    gpu: str = ""
    name: str = "cpu"


@dataclass
class LocalPool:
    """Processes of this machine, one for each unit, started in `folder`, where the plan is."""

    devices: Sequence[Device]
    folder: Path
    _running: list[tuple[UnitProcess, Device]] = field(default_factory=list)

    def missing(self, unit: Unit) -> str:
        """Return why no device here can ever run this unit, or ""."""
        like = [device for device in self.devices if _is_like(device, unit)]
        if not like:
            return f"this machine has no {'GPU' if unit.device == 'cuda' else unit.device}"
        most = max(len(device.cores) for device in like)
        if unit.threads and unit.threads > most:
            return f"it needs {unit.threads} threads, and a worker has {most} cores: use fewer, --on local:N"
        return ""

    def devices_of(self, unit: Unit) -> set[str]:
        """Return the names of the devices here that are like the unit's."""
        return {device.name for device in self.devices if _is_like(device, unit)}

    def fits(self, unit: Unit) -> bool:
        """Return whether a device is free. No race on the CPU runs beside one on a GPU, which needs the CPU too."""
        if any(each.unit.on_gpu != unit.on_gpu for each, _ in self._running):
            return False
        return self._free(unit) is not None

    def _free(self, unit: Unit) -> Device | None:
        busy = [device for _, device in self._running]
        enough = (device for device in self.devices if _is_like(device, unit) and device not in busy)
        return next((device for device in enough if len(device.cores) >= (unit.threads or 1)), None)

    def start(self, unit: Unit) -> None:
        """Start a process that runs the unit on a free device."""
        device = self._free(unit)
        assert device is not None
        threads = str(unit.threads or len(device.cores))
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if device.gpu:
            variables["CUDA_VISIBLE_DEVICES"] = device.gpu
        self._running.append((UnitProcess.start(unit, self.folder, device.cores, variables), device))

    def wait(self, seconds: float) -> list[Ended]:
        """Return the units whose process has ended, or was killed since it took too long."""
        until = time.monotonic() + seconds
        while not (ended := list(self._ended())) and time.monotonic() < until:
            time.sleep(LOOK_S)
        return ended

    def _ended(self) -> Iterator[Ended]:
        for each in list(self._running):
            if ended := each[0].ended():
                self._running.remove(each)
                yield ended

    def cancel(self) -> None:
        """Interrupt what runs, and kill what has not ended after a grace."""
        cancel([process for process, _ in self._running])
        self._running.clear()


def _is_like(device: Device, unit: Unit) -> bool:
    return bool(device.gpu) and is_named(device.name, unit.device) if unit.on_gpu else not device.gpu


def devices_here(workers: int | None) -> list[Device]:
    """Return this machine's GPUs and its CPU, divided among `workers`; 1 by default."""
    cores = _cores()
    gpus, cpu = _gpus(), str(machine()["device"])
    if workers is not None and workers > len(cores):
        raise BackendKwargsError(
            f"--on local:N takes at most {len(cores)} workers here, one for each core, got {workers}."
        )
    shares = _shares(cores, len(gpus)) if len(gpus) <= len(cores) else [cores] * len(gpus)
    on_gpus = [Device(tuple(sum(own, ())), gpu, name) for (gpu, name), own in zip(gpus, shares, strict=True)]
    return [*on_gpus, *(Device(tuple(sum(own, ())), name=cpu) for own in _shares(cores, workers or 1))]


def _shares(cores: list[tuple[int, ...]], number: int) -> list[list[tuple[int, ...]]]:
    each = len(cores) // number if number else 0
    return [cores[at * each : (at + 1) * each] for at in range(number)]


def _cores() -> list[tuple[int, ...]]:
    """Return the cores that this process may use, each with all of its hardware threads."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[str, list[int]] = {}
    for cpu in usable:
        try:
            core = (TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        cores.setdefault(core, []).append(cpu)
    return [tuple(threads) for threads in cores.values()]


def _gpus() -> list[tuple[str, str]]:
    """Return each visible GPU, as CUDA_VISIBLE_DEVICES names it, with its name."""
    import torch

    try:
        names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    except RuntimeError as error:
        raise BackendKwargsError(f"The GPUs of this machine cannot be used: {error_text(error)}.") from None
    visible = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    return [(visible[at] if at < len(visible) else str(at), name) for at, name in enumerate(names)]


# ---- workers of Ray

CONNECT_S = 10.0
NO_STATISTICS = {"RAY_USAGE_STATS_ENABLED": "0"}
OF_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
RAY = "ray://"  # before the HOST:PORT of a cluster
TYPE = "accelerator_type:"  # how Ray names a node's kind of GPU


def raced(text: bytes) -> tuple[bytes, str]:
    """Race a unit in a process that a worker of Ray watches; return its result, or b"" and how the process was lost."""
    process = UnitProcess.start(msgspec.json.decode(text, type=Unit), Path.cwd())
    try:
        while (ended := process.ended()) is None:
            time.sleep(LOOK_S)
    except BaseException:
        cancel([process])
        raise
    return (msgspec.json.encode(ended.result) if ended.result else b""), ended.lost


def without_login(address: str) -> str:
    """Return an address without the user, password, token or parameters in it."""
    try:
        return label_of(_url(address)).removeprefix("" if "://" in address else RAY)
    except BackendKwargsError:
        return HIDDEN


def _url(address: str) -> str:
    return address if "://" in address else f"{RAY}{address}"


class RayPool:
    """The workers of the cluster at `address`, "auto" for the one of this machine; `folder` travels to them."""

    def __init__(self, address: str, folder: Path) -> None:
        os.environ.update(NO_STATISTICS)
        try:
            import ray
        except ImportError as error:
            raise BackendKwargsError(f"--on ray:... needs Ray: {pip_install('ray')} ({error_text(error)}).") from None
        self.ray: Any = ray
        # A job has its own already, with which Ray merges no other.
        environment = (
            {} if OF_A_JOB in os.environ else {"working_dir": str(folder.resolve()), "env_vars": NO_STATISTICS}
        )
        try:
            # Raise at once if nobody listens at HOST:PORT, where Ray would try for minutes.
            host, colon, port = address.rpartition("://")[2].rpartition(":")
            if colon and port.isdecimal():
                socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
            self.ray.init(address, runtime_env=environment, log_to_driver=False, configure_logging=False)
        except Exception as error:  # noqa: BLE001 - a connection, gRPC, or the environment
            where = without_login(address)
            why = without_secrets(error, _url(address)).replace(address, where).rstrip(".")
            raise BackendKwargsError(
                f"No Ray cluster answers at {where!r}: {why}. `ray start --head` starts one."
            ) from None
        # max_calls: none outlives its unit, with the GPUs that it sees.
        self.task = self.ray.remote(max_calls=1, max_retries=MOST_ATTEMPTS - 1)(raced)
        self.running: dict[Any, Unit] = {}

    def missing(self, unit: Unit) -> str:
        """Return why no node of the cluster can run this unit, or ""."""
        if self._places(unit):
            return ""
        wanted = "a GPU" if unit.device == "cuda" else f"an {unit.device}" if unit.on_gpu else f"{_cpus(unit)} CPUs"
        return f"no node of the Ray cluster has {wanted}"

    def devices_of(self, unit: Unit) -> Sequence[str]:
        """Return no name: a cluster has several types of CPUs and GPUs, and Ray does not say how torch names them."""
        return ()

    def fits(self, unit: Unit) -> bool:
        """Return whether the cluster has a place for the unit, beside those of its kind that run."""
        like = [each for each in self.running.values() if (each.device, each.threads) == (unit.device, unit.threads)]
        return len(like) < self._places(unit)

    def _places(self, unit: Unit) -> int:
        """Return how many units of this kind the cluster can run at once."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if unit.on_gpu:
            return sum(int(node.get("GPU", 0)) for node in nodes if _type_of(node, unit) is not None)
        return sum(int(node.get("CPU", 0) // _cpus(unit)) for node in nodes)

    def start(self, unit: Unit) -> None:
        """Give the unit to Ray."""
        wanted: dict[str, Any] = {"num_cpus": _cpus(unit)}
        if unit.on_gpu:
            types = (_type_of(node["Resources"], unit) for node in self.ray.nodes() if node["Alive"])
            kind = next(filter(None, types), "") if unit.device != "cuda" else ""
            wanted = {"num_gpus": 1, "num_cpus": 1, "resources": {kind: 0.001} if kind else {}}
        self.running[self.task.options(**wanted).remote(msgspec.json.encode(unit))] = unit

    def wait(self, seconds: float) -> Sequence[Ended]:
        """Return the units whose tasks have ended."""
        if not self.running:
            time.sleep(seconds)
            return []
        ready, others = self.ray.wait(list(self.running), num_returns=1, timeout=seconds)
        if ready and others:
            ready += self.ray.wait(others, num_returns=len(others), timeout=0)[0]
        return [self._ended(task) for task in ready]

    def _ended(self, task: Any) -> Ended:
        unit = self.running.pop(task)
        try:
            result, lost = self.ray.get(task)
            return Ended(unit, msgspec.json.decode(result, type=Result) if result else None, lost)
        except Exception as error:  # noqa: BLE001 - a dead worker, its environment, or a result of another release
            return Ended(unit, Result(failed=f"Ray lost it: {error_text(error)}"))

    def cancel(self) -> None:
        """Cancel the tasks that run or wait."""
        for task in self.running:
            with suppress(Exception):  # the cluster may be gone
                self.ray.cancel(task, force=True)
        self.running.clear()

    def close(self) -> None:
        """Leave the cluster."""
        self.ray.shutdown()


def _cpus(unit: Unit) -> int:
    return unit.threads or 1


def _type_of(resources: dict[str, float], unit: Unit) -> str | None:
    """Return the resource that says a node has the GPU that a unit is for; "" for any GPU, None without one."""
    if not resources.get("GPU"):
        return None
    if unit.device == "cuda":
        return ""
    kinds = ((name, name.removeprefix(TYPE)) for name in resources if name.startswith(TYPE))
    return next((name for name, of in kinds if is_named(of, unit.device) or is_named(unit.device, of)), None)
