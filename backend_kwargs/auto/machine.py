"""What a decision depends on besides the graph and the question: the device, and what else a machine has.

The device is in the key: another device has its own decision. `FIELDS` says for which devices a decision made with
another value of a field is near, so that it is checked or raced again; fields that make none near are only recorded.
It also says which fields must be equal for a lock.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, lru_cache
from typing import NamedTuple, TypeAlias

from backend_kwargs.errors import printable
from backend_kwargs.keys import digest
from backend_kwargs.options.machine import installed_version
from backend_kwargs.options.machine import machine as probed

Machine: TypeAlias = Mapping[str, str | int | float | bool | None]


def _series(release: object) -> object:
    """Return the first two numbers of a release: its patches compile the same way."""
    return ".".join(release.split(".")[:2]) if isinstance(release, str) else release


class Field(NamedTuple):
    """The devices, of "cpu" and "cuda", on which another value makes a decision near, and on which locks refuse it.

    `compared` returns the part of a value that makes a decision near.
    """

    near: Collection[str] = ()
    in_locks: Collection[str] = ()
    compared: Callable[[object], object] = lambda value: value


BOTH = ("cpu", "cuda")
FIELDS: Mapping[str, Field] = {
    "device": Field(),
    "threads": Field(near=["cpu"], in_locks=["cpu"]),
    "torch": Field(near=BOTH, in_locks=BOTH, compared=_series),
    "triton": Field(near=["cuda"], in_locks=BOTH, compared=_series),
    "backend-kwargs": Field(in_locks=BOTH),
    "gpu": Field(in_locks=["cuda"]),
    "cpu": Field(in_locks=["cpu"]),
    "cuda": Field(in_locks=BOTH),
    "driver": Field(),
    "world": Field(),
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
    return digest([*_near(there).values()], 8)


def difference(there: Machine, here: Machine) -> str:
    """Return what differs, in words, "" if nothing does."""
    return in_words(FIELDS, there, here)


def in_words(names: Iterable[str], there: Machine, here: Machine) -> str:
    """Return which of these fields differ, in words."""
    differing = [name for name in names if there.get(name) != here.get(name)]
    return printable(", ".join(f"{name} {there.get(name)!r} (here {here.get(name)!r})" for name in differing))


def nearly(there: Machine, here: Machine) -> list[str]:
    """Return the fields that are near on this device, and differ."""
    theirs = _near(there)
    return [name for name, value in _near(here).items() if theirs.get(name) != value]


def _near(there: Machine) -> dict[str, object]:
    """Return what is compared of a machine's fields that are near on its device."""
    kind = "cpu" if device_of(there).startswith("cpu") else "cuda"
    return {name: field.compared(there.get(name)) for name, field in FIELDS.items() if kind in field.near}
