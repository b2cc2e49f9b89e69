"""Units of tuning: one model at one size, on one type of device; and the document of what came of one."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from backend_kwargs.auto import verdicts
from backend_kwargs.auto.machine import FIELDS
from backend_kwargs.backend import Backend
from backend_kwargs.interval import Interval
from backend_kwargs.keys import digest
from backend_kwargs.options import Check, check
from backend_kwargs.registry import make_backend
from backend_kwargs.stores.documents import Kind, RefusedError, decoded

AUTO = "tmpl-inductor:auto"
UNITS = "units/"
KEY_DIGITS = 40
BUDGET_S = 300.0  # for each graph's race: no call waits for it, as for the 30 s of `auto`
BUDGETS, SETUP_S = 10, 600.0  # how long a unit may take: so many budgets, and this for its model
OF_THE_STORE = ("signing_key", "label", "min_generation")  # for what is kept, which stays where the command runs
KEYS_OF_A_PLAN = ("effort", "candidates", "budget_s")  # options of `auto` that a plan has as keys
# Options of `auto` that say nothing to a race in an empty store.
WITHOUT_EFFECT = (
    "auto",
    "race",
    "process_budget_s",
    "most_races",
    "match",
    "on_progress",
)
Name = Annotated[str, Meta(max_length=500)]
Names = Annotated[tuple[Name, ...], Meta(max_length=10_000)]
Text = Annotated[str, Meta(max_length=8000)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class Unit(Struct, frozen=True, forbid_unknown_fields=True):
    """One model at one size, dtype, type of device and number of threads, with what may be raced.

    `device` is "cpu", "cuda" for any GPU, or a part of a GPU's name. `source` is the SHA-256 of the factory's file: a
    unit of changed code is another one. `options` are further ones of `auto`.
    """

    model: Name
    device: Name
    sizes: dict[Name, int] = {}
    dtype: Name = ""
    threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    effort: Name = "quick"
    candidates: tuple[Name, ...] | None = None
    budget_s: Seconds = BUDGET_S
    limit_s: Seconds | None = None
    options: dict[Name, Any] = {}
    source: Name = ""

    @property
    def key(self) -> str:
        """40 hexadecimal digits of all that the unit is, but for the time that it may take."""
        unit = msgspec.structs.replace(self, limit_s=None)
        return digest(msgspec.json.encode(unit, order="deterministic"), KEY_DIGITS)

    @property
    def most_s(self) -> float:
        """The seconds after which its worker is killed."""
        return BUDGETS * self.budget_s + SETUP_S if self.limit_s is None else self.limit_s

    @property
    def label(self) -> str:
        """The unit for people: its model, sizes, dtype, device and threads."""
        sizes = ", ".join(f"{name}={value}" for name, value in self.sizes.items())
        threads = f"{self.threads} threads" if self.threads else ""
        return "  ".join(filter(None, (self.model, sizes, self.dtype, self.device, threads)))

    @property
    def on_gpu(self) -> bool:
        """Whether it is raced on a GPU."""
        return self.device != "cpu"


def is_named(name: str, device: str) -> bool:
    """Return whether a GPU of this name is what a unit asks for."""
    return device == "cuda" or device.lower() in name.lower()


def backend_of(unit: Unit, coerce: Check = check) -> Backend:
    """Return the backend that races a unit's model."""
    candidates = {} if unit.candidates is None else {"candidates": list(unit.candidates)}
    own = {name: value for name, value in unit.options.items() if name != "store"}
    return make_backend(AUTO).bind("plan", {**own, **candidates, "effort": unit.effort}, coerce)


def is_slower(speedup: Interval | None, same: Interval | None) -> bool:
    """Return whether a speedup is surely below 1, and further than a call may be from itself."""
    if speedup is None or speedup.high >= 1:
        return False
    return same is None or speedup.high < min(same.low, 1 / same.high)


class Outcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a unit, and the times of the whole call.

    `gain` is the compiled call's speedup over eager, `same` that of the compiled call over itself. `failed` is the
    reason why there is no decision.
    """

    failed: Text = ""
    seconds: Seconds = 0.0
    device_name: Name = ""
    releases: dict[Name, Name | None] = {}
    winners: Names = ()
    gain: Interval | None = None
    same: Interval | None = None


class Result(Outcome, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a unit where it ran, with the decisions, and what they confirm of places, as documents by name."""

    documents: dict[Name, bytes] = {}


class UnitDocument(Outcome, frozen=True, kw_only=True, omit_defaults=True):
    """What a store keeps of a unit that is done, or that failed: `decisions` are the names of its decisions."""

    unit: Unit
    decisions: Names = ()


def document_of(unit: Unit, result: Result) -> UnitDocument:
    """Return the document of a unit that ended."""
    fields = {name: getattr(result, name) for name in Outcome.__struct_fields__}
    decisions = tuple(name for name in result.documents if not name.startswith(verdicts.FOLDER))
    return UnitDocument(unit=unit, decisions=decisions, **fields)


def name_of(unit: Unit) -> str:
    """Return the name of a unit's document in a store."""
    return f"{UNITS}{unit.key}.json"


KIND = Kind("unit", UnitDocument)


def read(name: str, content: bytes, trusted_keys: Sequence[object] = ()) -> UnitDocument | None:
    """Return the document of a unit, None for anything else: whoever writes to the store may have put it there.

    If keys are given, one of them must have signed it.
    """
    try:
        document = decoded(KIND, name, content, trusted_keys).body
    except RefusedError:
        return None
    return document if document and name_of(document.unit) == name else None


def releases_differ(document: UnitDocument, here: Mapping[str, str | None]) -> bool:
    """Return whether a unit was done under another series of torch, whose decisions are not used as they are."""
    compared = FIELDS["torch"].compared
    return compared(document.releases.get("torch")) != compared(here.get("torch"))
