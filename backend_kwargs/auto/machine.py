"""What a decision depends on besides the graph and the question: the device, and what else a machine has.

A table says of each field where it counts: in the key, so that another value is another decision; as near, so that the
decision is checked or raced again; or nowhere, so that it is only recorded. In a lock each of its fields must be equal.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import cache, lru_cache
from typing import NamedTuple, TypeAlias

from backend_kwargs.errors import printable
from backend_kwargs.keys import digest
from backend_kwargs.options.machine import installed_version
from backend_kwargs.options.machine import machine as probed

Machine: TypeAlias = Mapping[str, str | int | float | bool | None]


class Counts(Enum):
    """Where a field counts."""

    IN_THE_KEY = "in the key"
    NEAR = "near"
    RECORDED = "recorded only"


KEY, NEAR, RECORDED = Counts


def _series(release: object) -> object:
    """Return the first two numbers of a release: its patches compile the same way."""
    return ".".join(release.split(".")[:2]) if isinstance(release, str) else release


class Field(NamedTuple):
    """Where a field counts for graphs on a CPU and for those on a GPU, for whose locks, and what near ones share."""

    on_cpu: Counts
    on_gpu: Counts
    in_locks: Collection[str] = ()
    compared: Callable[[object], object] = lambda value: value


FIELDS: Mapping[str, Field] = {
    "device": Field(KEY, KEY),
    "threads": Field(NEAR, RECORDED, ["cpu"]),
    "torch": Field(NEAR, NEAR, ["cpu", "cuda"], _series),
    "triton": Field(RECORDED, NEAR, ["cpu", "cuda"], _series),
    "backend-kwargs": Field(RECORDED, RECORDED, ["cpu", "cuda"]),
    "gpu": Field(RECORDED, RECORDED, ["cuda"]),
    "cpu": Field(RECORDED, RECORDED, ["cpu"]),
    "cuda": Field(RECORDED, RECORDED, ["cpu", "cuda"]),
    "driver": Field(RECORDED, RECORDED),
    "world": Field(RECORDED, RECORDED),
}


def machine(devices: Collection[str] = ("cpu",), card: int | None = None) -> dict[str, str | int | None]:
    """Return the properties of this machine, for graphs with tensors on these kinds of devices, and on this GPU."""
    import torch

    from backend_kwargs.auto.ranks import ranks

    here = probed()
    if torch.cuda.is_available():
        here = here.on(torch.device("cuda" if card is None else f"cuda:{card}"))
    others = sorted(kind for kind in devices if kind not in ("cpu", "cuda"))
    device = here.gpu if "cuda" in devices and here.gpu else others[0] if others else f"cpu {here.cpu}"
    return {
        **releases(),
        "device": device,
        **here.stored("decision"),
        "threads": torch.get_num_threads(),
        "world": ranks(),
    }


@cache
def releases() -> dict[str, str | None]:
    """Return the releases that decisions are made with here."""
    return {name: installed_version(name) for name in ("torch", "triton", "backend-kwargs")}


def device_of(there: Machine) -> str:
    """Return the device's type as part of a name: "nvidia-h100-80gb-hbm3", "cpu-avx512"."""
    # Earlier releases recorded no device.
    return _spelled(str(there.get("device") or there.get("gpu") or f"cpu {there.get('cpu') or ''}"))


@lru_cache
def _spelled(device: str) -> str:
    return re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")[:60] or "unknown"


def variant_of(there: Machine) -> str:
    """Return a short name of what is near for graphs on this device."""
    return digest([_compared(there, name) for name in _near(there)], 8)


def distance(there: Machine, here: Machine) -> int:
    """Return how many of the fields that are near differ."""
    return sum(_compared(there, name) != _compared(here, name) for name in _near(here))


def difference(there: Machine, here: Machine) -> str:
    """Return what differs, in words, "" if nothing does."""
    return in_words(FIELDS, there, here)


def near_difference(there: Machine, here: Machine) -> str:
    """Return in words what makes a decision near, "" if nothing does."""
    return in_words([name for name in _near(here) if _compared(there, name) != _compared(here, name)], there, here)


def in_words(names: Iterable[str], there: Machine, here: Machine) -> str:
    """Return which of these fields differ, in words."""
    differing = [name for name in names if there.get(name) != here.get(name)]
    return printable(", ".join(f"{name} {there.get(name)!r} (here {here.get(name)!r})" for name in differing))


def _near(there: Machine) -> list[str]:
    on_cpu = device_of(there).startswith("cpu")
    return [name for name, field in FIELDS.items() if (field.on_cpu if on_cpu else field.on_gpu) is NEAR]


def _compared(there: Machine, name: str) -> object:
    return FIELDS[name].compared(there.get(name))
