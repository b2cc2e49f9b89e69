"""Workers of a Ray cluster: a task for each unit, which Ray places, and runs again where a worker dies.

What travels is a unit as JSON, and the folder of the plan with the factories. Whoever can reach a cluster, or its
dashboard, can run any code there.
"""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from backend_kwargs.errors import BackendKwargsError, error_text, pip_install
from backend_kwargs.fleet.process import LOOK_S, UnitProcess, cancel
from backend_kwargs.fleet.scheduling import MOST_ATTEMPTS, Ended
from backend_kwargs.fleet.units import Result, Unit, is_named
from backend_kwargs.stores.urls import HIDDEN, label_of, without_secrets

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


def _reach(address: str) -> None:
    """Raise at once if nobody listens at HOST:PORT, where Ray would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def _ray() -> Any:
    os.environ.update(NO_STATISTICS)
    try:
        import ray
    except ImportError as error:
        raise BackendKwargsError(f"--on ray:... needs Ray: {pip_install('ray')} ({error_text(error)}).") from None
    return ray


class RayPool:
    """The workers of the cluster at `address`, "auto" for the one of this machine; `folder` travels to them."""

    def __init__(self, address: str, folder: Path) -> None:
        self.ray = _ray()
        # A job has its own already, with which Ray merges no other.
        environment = (
            {} if OF_A_JOB in os.environ else {"working_dir": str(folder.resolve()), "env_vars": NO_STATISTICS}
        )
        try:
            _reach(address)
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
