"""Workers on this machine: one for each visible GPU, or several for the CPU, each on cores of its own."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backend_kwargs.auto.machine import machine
from backend_kwargs.errors import BackendKwargsError, error_text
from backend_kwargs.fleet.process import LOOK_S, UnitProcess, cancel
from backend_kwargs.fleet.scheduling import Ended
from backend_kwargs.fleet.units import Unit, is_named

TOPOLOGY = Path("/sys/devices/system/cpu")


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
