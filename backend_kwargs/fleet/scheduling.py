"""Which unit runs next, and where: units that are done are skipped, the longest runs first, a lost one runs again.

How long a unit takes is learned from earlier runs and from other sizes of its model, also while others run. Of units
that may take as long, a process begins with its share, and then takes what others have not begun if the store can give
claims. A `Summary` says what came of it all.

A unit has a process, on this machine or on a Ray cluster: it is lost when it leaves no result, and ended when it takes
too long. On this machine there is one worker for each visible GPU, or several for the CPU, each on its own cores. On a
cluster each unit is a task, which Ray places, and runs again where a worker dies. It gets the unit as JSON, and the
folder of the plan with the factories. Whoever can reach a cluster, or its dashboard, can run any code there.
"""

import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

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

Raced: TypeAlias = tuple[bytes, str]  # a unit's result as JSON, or b"" and how its process was lost


class Ended(NamedTuple):
    """A unit that ended: its result, or the reason why its worker was lost."""

    unit: Unit
    result: Result | None
    lost: str = ""


class Pool(ABC):
    """Workers that run units; `running` has the unit of each future, and what it runs on."""

    own_errors: type[Exception] | tuple[()] = ()  # of this machine: they end the command, and no unit failed

    def __init__(self) -> None:
        self.running: dict[Future[Raced], tuple[Unit, Any]] = {}

    @abstractmethod
    def missing(self, unit: Unit) -> str:
        """Return why no worker here can ever run this unit, or ""."""

    def devices_of(self, unit: Unit) -> Collection[str]:
        """Return the names of the devices that may run this unit, as its result names one; none if not known."""
        return ()

    @abstractmethod
    def fits(self, unit: Unit) -> bool:
        """Return whether a worker is free that can run it now, by its device and threads."""

    @abstractmethod
    def start(self, unit: Unit) -> None:
        """Run a unit that fits."""

    @abstractmethod
    def cancel(self) -> None:
        """End what runs."""

    def wait(self, seconds: float) -> Sequence[Ended]:
        """Return the units that ended; wait at most `seconds` for the first."""
        if not self.running:
            time.sleep(seconds)
        done, _ = wait(self.running, seconds, FIRST_COMPLETED)
        return [self._ended(self.running.pop(each)[0], each) for each in done]

    def _ended(self, unit: Unit, future: "Future[Raced]") -> Ended:
        try:
            result, lost = future.result()
            return Ended(unit, msgspec.json.decode(result, type=Result) if result else None, lost)
        except self.own_errors as error:
            raise BackendKwargsError(f"No process can be run for {unit.label!r}: {error_text(error)}.") from error
        except Exception as error:  # noqa: BLE001 - a dead worker, its environment, or a result of another release
            return Ended(unit, Result(failed=f"its worker failed: {error_text(error)}"))


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
        self.done = {unit.key for unit in units if name_of(unit) in done}
        # Without claims another process may be racing what is not its own, and nobody would know.
        mine = units if board.claims else [unit for unit in units if unit.key in self.own]
        self.left = {unit.key: unit for unit in mine if unit.key not in self.done}
        self.looked: dict[str, float] = {}
        self.attempts: Counter[str] = Counter()
        self.looked_again = 0.0
        self.away: tuple[float, str] | None = None  # since when the store does not answer, and its last error
        before: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
        self.places = {unit.key: next(before[unit.model, unit.device]) for unit in units}  # among those of its model
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
        if not free or now < self.looked_again:
            return None
        try:
            if self.is_guess and now - self.learned >= LEARN_S:
                self.learned = now
                self._order(self.board.known())
            found = self._claimed(free, now)
        except Exception as error:  # noqa: BLE001 - each kind of store raises its own error
            self.away = self.away[0] if self.away else now, self.board.words(error)
            self.looked_again = now + POLL_S
            return None
        self.away = None
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
        if self.away and self.clock() - self.away[0] > MOST_AWAY_S:
            raise BackendKwargsError(
                f"Store {self.board.store.label!r} does not answer any more: {self.away[1]}. What ended is kept: start "
                "it again later."
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

    It returns when every unit has ended here or elsewhere; whoever stops before ends what runs. The pool is used up.
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
            for unit, came, lost in pool.wait(POLL_S):
                running -= 1
                if came is None:
                    queue.board.release(unit)
                    if queue.again(unit):
                        continue
                result = came or Result(failed=f"its worker was lost {MOST_ATTEMPTS} times: {lost}")
                why = queue.board.record(unit, result)
                yield Ended(unit, msgspec.structs.replace(result, failed=why) if why else result)
    finally:
        pool.cancel()


SAME_WITHIN = 1.1  # a call is as fast as itself, up to this


class UnitOutcome(NamedTuple):
    """What came of a unit, in this process if `here`, or why no worker can run it."""

    unit: Unit
    document: UnitDocument | None = None
    here: bool = False
    missing: str = ""

    @property
    def failed(self) -> str:
        """Why it failed, "" if it did not."""
        return self.document.failed if self.document else ""

    @property
    def done(self) -> UnitDocument | None:
        """Its document if it is done."""
        return None if self.failed else self.document

    @property
    def status(self) -> str:
        """Whether it was raced here, was done before or elsewhere, failed, or is not done."""
        if self.document is None:
            return "no worker" if self.missing else "not done"
        return "failed" if self.failed else "raced" if self.here else "done before"


@dataclass(frozen=True)
class Summary:
    """What came of a plan, unit by unit."""

    units: Sequence[UnitOutcome]

    @classmethod
    def of(
        cls, units: Sequence[Unit], board: UnitClaims, ended: Sequence[Ended], missing: Mapping[str, str]
    ) -> "Summary":
        """Return the summary, with the store read again for what others did."""
        known = board.known()
        done = board.done(known)
        found = {name: document for name, document in known.items() if document.failed or name in done}
        # What ended here counts, also if another process has raced it for its own device since.
        here = {name_of(unit): document_of(unit, result) for unit, result, _ in ended if result}
        named = ((name_of(unit), unit) for unit in units)
        return cls(
            [UnitOutcome(of, (found | here).get(name), name in here, missing.get(of.key, "")) for name, of in named]
        )

    @property
    def done(self) -> list[UnitDocument]:
        """The documents of the units that are done."""
        return [each.done for each in self.units if each.done]

    @property
    def ended(self) -> list[UnitDocument]:
        """The documents of the units that ended in this process."""
        return [each.document for each in self.units if each.here and each.document]

    def failed_among(self, own: Collection[str]) -> bool:
        """Return whether a unit failed here, or in this process's `own` share: others' are theirs to try again."""
        return any(each.failed and (each.here or each.unit.key in own) for each in self.units)

    @property
    def cost_s(self) -> float:
        """The seconds of workers that this process spent."""
        return sum(each.seconds for each in self.ended)

    @property
    def covered(self) -> tuple[list[str], list[str]]:
        """The devices that were asked for, and those of them for which each unit is done."""
        asked = list(dict.fromkeys(each.unit.device for each in self.units))
        left = {each.unit.device for each in self.units if not each.done}
        return asked, [device for device in asked if device not in left]

    @property
    def same(self) -> Interval | None:
        """The widest A/A ratio of the units that were raced here: how far a call may be from itself."""
        return widest(each.same for each in self.ended)

    @property
    def noise(self) -> Interval | None:
        """The widest A/A ratio of all units that are done, whenever they were raced."""
        return widest(each.same for each in self.done)

    @property
    def is_disturbed(self) -> bool:
        """Whether a call may differ from itself by more than a quiet machine explains."""
        return self.same is not None and self.same.reach > SAME_WITHIN


# ---- the process of a unit

LOOK_S = 0.1


def raced(
    text: bytes,
    where: Path = Path(),
    cores: Sequence[int] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    cancelled: threading.Event | None = None,
) -> Raced:
    """Race the unit in `text` in a process, started in the folder `where`, on these cores if any; return its result.

    One that takes too long fails. On any way out the process is ended, with all that it started.
    """
    most_s = msgspec.json.decode(text, type=Unit).most_s
    until = time.monotonic() + most_s
    with tempfile.TemporaryDirectory(prefix="backend_kwargs-tune-", ignore_cleanup_errors=True) as folder:
        (unit, result, errors) = (Path(folder, name) for name in ("unit", "result", "stderr"))
        unit.write_bytes(text)
        with (
            errors.open("wb") as stderr,
            subprocess.Popen(
                [sys.executable, "-m", "backend_kwargs.fleet.worker", unit, result, ",".join(map(str, cores))],
                stdin=subprocess.PIPE,  # closed when this process dies
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                cwd=where,
                # Modules are found as here: a worker of Ray has the paths of the command.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(variables),
                start_new_session=True,  # Ctrl-C is for the command, which ends what runs
            ) as process,
        ):
            try:
                while not (is_over := _is_over(process)) and time.monotonic() < until:
                    if cancelled and cancelled.is_set():
                        break
                    time.sleep(LOOK_S)
            finally:
                _end(process)
        if not is_over:
            why = f"it took longer than {most_s:g} s, and was killed; limit_s in the plan gives a unit more"
            return msgspec.json.encode(Result(failed=why, seconds=most_s)), ""
        with suppress(OSError):
            return result.read_bytes(), ""
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        said = errors.read_text(errors="replace").strip().rpartition("\n")[2].strip()
        return b"", f"{how}{said and f', {said[:200]}'}"


def _is_over(process: "subprocess.Popen[bytes]") -> bool:
    """Return whether it has ended; it is not reaped before all that it started has, so its number is no other's."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process with all that it started: at once if it is over, else after it was interrupted, and a grace."""
    if not _is_over(process):
        os.killpg(process.pid, signal.SIGINT)
    until = time.monotonic() + GRACE_S
    while not _is_over(process) and time.monotonic() < until:
        time.sleep(LOOK_S)
    end_tree(process.pid)


# ---- workers of this machine

TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Device:
    """What a worker has for itself: some cores, and perhaps a GPU, as CUDA_VISIBLE_DEVICES names it."""

    cores: tuple[int, ...]
    gpu: str = ""
    name: str = "cpu"

    def is_like(self, unit: Unit) -> bool:
        """Return whether it is of the type that a unit is for."""
        return is_named(self.name, unit.device) if self.gpu else unit.device == "cpu"


class LocalPool(Pool):
    """Processes of this machine, one for each unit on a device, started in `folder`, where the plan is."""

    own_errors = OSError  # such as a full disk, or no more processes

    def __init__(self, devices: Sequence[Device], folder: Path) -> None:
        super().__init__()
        self.devices, self.folder = devices, folder
        self._threads, self._cancelled = ThreadPoolExecutor(len(devices)), threading.Event()

    def missing(self, unit: Unit) -> str:
        """Return why no device here can ever run this unit, or ""."""
        most = max((len(device.cores) for device in self.devices if device.is_like(unit)), default=0)
        if not most:
            return f"this machine has no {'GPU' if unit.device == 'cuda' else unit.device}"
        if unit.threads and unit.threads > most:
            return f"it needs {unit.threads} threads, and a worker has {most} cores: use fewer, --on local:N"
        return ""

    def devices_of(self, unit: Unit) -> set[str]:
        """Return the names of the devices here that are like the unit's."""
        return {device.name for device in self.devices if device.is_like(unit)}

    def fits(self, unit: Unit) -> bool:
        """Return whether a device is free. No race on the CPU runs beside one on a GPU, which needs the CPU too."""
        if any(each.device_type != unit.device_type for each, _ in self.running.values()):
            return False
        return self._free(unit) is not None

    def _free(self, unit: Unit) -> Device | None:
        busy = [device for _, device in self.running.values()]
        enough = (device for device in self.devices if device.is_like(unit) and device not in busy)
        return next((device for device in enough if len(device.cores) >= (unit.threads or 1)), None)

    def start(self, unit: Unit) -> None:
        """Start a process that runs the unit on a free device."""
        device = self._free(unit)
        assert device is not None
        threads = str(unit.threads or len(device.cores))
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if device.gpu:
            variables["CUDA_VISIBLE_DEVICES"] = device.gpu
        given = msgspec.json.encode(unit), self.folder, device.cores, variables, self._cancelled
        self.running[self._threads.submit(raced, *given)] = unit, device

    def cancel(self) -> None:
        """Interrupt what runs, and kill what has not ended after a grace."""
        self._cancelled.set()
        self._threads.shutdown()
        self.running.clear()


def devices_here(workers: int | None) -> list[Device]:
    """Return this machine's GPUs and its CPU, divided among `workers`; 1 by default."""
    cores = _cores()
    gpus, cpu = _gpus(), str(machine()["device"])
    if workers is not None and workers > len(cores):
        raise BackendKwargsError(
            f"--on local:N takes at most {len(cores)} workers here, one for each core, got {workers}."
        )
    on_gpus = [Device(own, *gpu) for gpu, own in zip(gpus, _shares(cores, len(gpus)), strict=True)]
    return [*on_gpus, *(Device(own, name=cpu) for own in _shares(cores, workers or 1))]


def _shares(cores: list[tuple[int, ...]], number: int) -> list[tuple[int, ...]]:
    """Return the hardware threads of each of so many workers; of more workers than cores each has all."""
    each = len(cores) // max(1, number)
    return [tuple(sum(cores[at * each : (at + 1) * each] or cores, ())) for at in range(number)]


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


def without_login(address: str) -> str:
    """Return an address without the user, password, token or parameters in it."""
    try:
        return label_of(_url(address)).removeprefix("" if "://" in address else RAY)
    except BackendKwargsError:
        return HIDDEN


def _url(address: str) -> str:
    return address if "://" in address else f"{RAY}{address}"


class RayPool(Pool):
    """The workers of the cluster at `address`, "auto" for the one of this machine; `folder` travels to them.

    Its devices are not known: it has several types of CPUs and GPUs, and Ray does not say how torch names them.
    """

    def __init__(self, address: str, folder: Path) -> None:
        super().__init__()
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

    def missing(self, unit: Unit) -> str:
        """Return why no node of the cluster can run this unit, or ""."""
        if self._places(unit):
            return ""
        wanted = {"cpu": f"{unit.threads or 1} CPUs", "cuda": "a GPU"}.get(unit.device, f"an {unit.device}")
        return f"no node of the Ray cluster has {wanted}"

    def fits(self, unit: Unit) -> bool:
        """Return whether the cluster has a place for the unit, beside those of its kind that run."""
        return sum(_kind(each) == _kind(unit) for each, _ in self.running.values()) < len(self._places(unit))

    def _places(self, unit: Unit) -> list[str]:
        """Return the type of GPU, "" for any and for none, of each place where the cluster can run such a unit."""
        found = []
        for has in (node["Resources"] for node in self.ray.nodes() if node["Alive"]):
            if unit.device == "cpu":
                found += [""] * int(has.get("CPU", 0) // (unit.threads or 1))
                continue
            kinds = {name: name.removeprefix(TYPE) for name in has if name.startswith(TYPE)}
            like = [name for name, of in kinds.items() if is_named(of, unit.device) or is_named(unit.device, of)]
            found += ([""] if unit.device == "cuda" else like[:1]) * int(has.get("GPU", 0))
        return found

    def start(self, unit: Unit) -> None:
        """Give the unit to Ray."""
        kind = next(iter(self._places(unit)), "")
        wanted = self.task.options(
            num_cpus=unit.threads or 1,
            num_gpus=int(unit.device != "cpu"),
            resources={kind: 0.001} if kind else {},
        )
        task = wanted.remote(msgspec.json.encode(unit))
        self.running[task.future()] = unit, task

    def cancel(self) -> None:
        """Cancel the tasks that run or wait."""
        for _, task in self.running.values():
            with suppress(Exception):  # the cluster may be gone
                self.ray.cancel(task, force=True)
        self.running.clear()

    def close(self) -> None:
        """Leave the cluster."""
        self.ray.shutdown()
