"""Units of tuning: the plan that names them, and what a shared store knows of them.

A unit is one model at one size, on one type of device; a document says what came of it. A plan is a file of models,
with the sizes, devices and threads to tune each for, and what may be raced. The store knows which units are done, how
long each took, and who works on it.
"""

import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct, structs

from backend_kwargs.auto import store as decisions
from backend_kwargs.auto import verdicts
from backend_kwargs.auto.machine import FIELDS
from backend_kwargs.backend import Backend
from backend_kwargs.errors import BackendKwargsError, error_text, unknown, wrong_value
from backend_kwargs.files import read_toml, retried
from backend_kwargs.harness.models import LIBRARIES, check_defines, split_factory
from backend_kwargs.interval import Interval
from backend_kwargs.keys import digest
from backend_kwargs.options import Check, check
from backend_kwargs.registry import make_backend
from backend_kwargs.stores import Claims, Documents, Store
from backend_kwargs.stores.documents import Document, Kind, RefusedError, decoded, is_name, private_key
from backend_kwargs.stores.layered import put

logger = logging.getLogger("backend_kwargs.fleet")

CLAIMS = "claims/"
LEASE_S = 60.0  # after which a unit is free again whose process was killed; renewed three times as often
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between tries to put what came of a unit

State: TypeAlias = Literal["ended", "elsewhere", "ours"]


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
Threads = Annotated[int, Meta(ge=1, le=4096)]


class Unit(Struct, frozen=True, forbid_unknown_fields=True):
    """One model at one size, dtype, type of device and number of threads, with what may be raced.

    `device` is "cpu", "cuda" for any GPU, or a part of a GPU's name. `source` is the SHA-256 of the factory's file: a
    unit of changed code is another one. `options` are further ones of `auto`.
    """

    model: Name
    device: Name
    sizes: dict[Name, int] = {}
    dtype: Name = ""
    threads: Threads | None = None
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
    def device_type(self) -> str:
        """The type of its device, as torch names it."""
        return "cpu" if self.device == "cpu" else "cuda"


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


class UnitClaims:
    """The store as the processes that tune together see it; safe in threads.

    `here` are this process's releases; `words` words the store's errors without its password. `devices` names the
    devices that would run a unit, none if that is not known.
    """

    def __init__(
        self,
        store: Documents,
        here: Mapping[str, str | None],
        words: Callable[[BaseException], str] = error_text,
        devices: Callable[[Unit], Collection[str]] = lambda unit: (),
    ) -> None:
        self.store, self.here, self.words, self.devices = store, here, words, devices
        self.claims = store if isinstance(store, Claims) else None
        self.token = uuid.uuid4().hex.encode()
        self.held: dict[str, Unit] = {}
        self._one = threading.RLock()

    def known(self) -> dict[str, UnitDocument]:
        """Return the documents that the store has of units, by name."""
        with self._one:
            found = {name: read(name, content) for name, content in self.store.list(UNITS)}
        return {name: document for name, document in found.items() if document}

    def done(self, known: Mapping[str, UnitDocument]) -> dict[str, UnitDocument]:
        """Return those of the units that need no race: they serve here, and the store has all of their decisions."""
        serving = {name: document for name, document in known.items() if self._serves(document)}
        folders = {f"{each.rpartition('/')[0]}/" for document in serving.values() for each in document.decisions}
        with self._one:
            there = {
                name
                for folder in folders
                if is_name(f"{folder}a")
                for name, content in self.store.list(folder)
                if _is_decision(name, content)
            }
        return {name: document for name, document in serving.items() if there.issuperset(document.decisions)}

    def _serves(self, document: UnitDocument) -> bool:
        """Return whether a unit did not fail, and ran on such a device, under the torch that is installed here."""
        devices = self.devices(document.unit)
        is_like = not devices or document.device_name in devices
        return is_like and not document.failed and not releases_differ(document, self.here)

    def take(self, unit: Unit, *, failed_too: bool = True) -> State:
        """Claim a unit that is not done, or that failed before if `failed_too`; "ours" if this process is to run it."""
        with self._one:
            claim = f"{CLAIMS}{unit.key}"
            if self.claims and not self.claims.claim(claim, self.token, LEASE_S):
                return "elsewhere"
            self.held[claim] = unit
            if not self._ended(unit, failed_too):
                return "ours"
            self.release(unit)
            return "ended"

    def _ended(self, unit: Unit, failed_too: bool) -> bool:
        name = name_of(unit)
        document = read(name, content) if (content := self.store.get(name)) else None
        if document is None:
            return False
        if document.failed:
            return not failed_too
        return self._serves(document) and all(
            is_name(each) and _is_decision(each, self.store.get(each)) for each in document.decisions
        )

    def record(self, unit: Unit, result: Result) -> str:
        """Keep what came of a unit, its decisions first; return why the store did not take it, or ""."""
        of = Store.of(unit.options.get("store"))

        def keep() -> None:
            with self._one:
                for name, content in result.documents.items():
                    kind: Kind[Any] = verdicts.KIND if name.startswith(verdicts.FOLDER) else decisions.KIND
                    document = decoded(kind, name, content)
                    kept = replace(document, label=of.label, generation=max(document.generation, of.min_generation))
                    put(kind, self.store, kept, of.signing_key)
                put(KIND, self.store, Document(name_of(unit), document_of(unit, result)), of.signing_key)
                self.release(unit)

        try:
            retried(keep, lambda error: True, PAUSES_S)
        except Exception as error:  # noqa: BLE001 - each kind of store raises its own error
            return f"the store {self.store.label} did not take what came of it: {self.words(error)}"
        return ""

    def release(self, unit: Unit) -> None:
        """Let others claim a unit that this process has claimed; where the store is away, its lease ends by itself."""
        with self._one:
            if (claim := f"{CLAIMS}{unit.key}") in self.held:
                del self.held[claim]
                try:
                    # Unless its lease ended and another process has it.
                    if self.claims and self.claims.renew(claim, self.token, LEASE_S):
                        self.store.forget(claim)
                except Exception as error:  # noqa: BLE001 - each kind of store raises its own error
                    logger.warning("%s is claimed until its lease ends: %s.", claim, self.words(error))

    def renew(self) -> None:
        """Extend the leases of the units that this process runs."""
        for claim in tuple(self.held):
            try:
                with self._one:
                    if self.claims and claim in self.held and not self.claims.renew(claim, self.token, LEASE_S):
                        logger.warning("Another process took %s, whose lease had ended; it is raced twice.", claim)
                        del self.held[claim]
            except Exception as error:  # noqa: BLE001 - the store may be back before the lease ends
                logger.warning("The lease of %s could not be renewed: %s.", claim, self.words(error))

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Renew the leases in a thread, and release at exit what is still held."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(LEASE_S / 3):
                self.renew()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            for unit in tuple(self.held.values()):
                self.release(unit)


def _is_decision(name: str, content: bytes | None) -> bool:
    """Return whether this is a decision, and not what `decisions forget` leaves in place of one."""
    try:
        return content is not None and decoded(decisions.KIND, name, content).body is not None
    except RefusedError:
        return False


MOST_UNITS = 100_000
Size = Annotated[int, Meta(ge=1)]


class Asked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan says of all models, or of one, which then wins."""

    devices: tuple[Name, ...] | None = None
    threads: tuple[Threads, ...] | None = None
    dtypes: tuple[Literal["float32", "float16", "bfloat16", "float64"], ...] | None = None
    effort: Literal["quick", "full"] | None = None
    candidates: tuple[Name, ...] | None = None
    budget_s: Seconds | None = None
    limit_s: Seconds | None = None
    options: dict[Name, Any] | None = None
    gpus: float | None = None


class Model(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of a plan, with its sizes: every combination is a unit."""

    model: Name
    shapes: dict[Name, Annotated[tuple[Size, ...], Meta(min_length=1)]] = {}


class Plan(Asked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan as it is in its file."""

    models: tuple[Model, ...]


def read_plan(path: Path) -> list[Unit]:
    """Return the units of a plan; raise BackendKwargsError for an unknown key, a wrong value or a missing file.

    Also where `auto` does not take an option of a unit, or the key that is to sign what it decides cannot be read.
    """
    table = read_toml(path, "a plan")
    where = repr(str(path))
    _check_keys(where, table, Plan)
    models = table.get("models")
    if not isinstance(models, list) or not models or not all(isinstance(each, dict) for each in models):
        raise BackendKwargsError(f'{where} has no [[models]] table: add one with model = "file.py:function".')
    for at, model in enumerate(models):
        _check_keys(f"{where}, models[{at}]", model, Model)
    try:
        plan = msgspec.convert(table, Plan)
    except msgspec.ValidationError as error:
        raise BackendKwargsError(f"{where} is not a plan: {str(error).replace('$.', '')}.") from None
    units = [_arriving(where, unit) for unit in itertools.islice(_units(path, plan), MOST_UNITS + 1)]
    if len(units) > MOST_UNITS:
        raise BackendKwargsError(f"{where} has more than {MOST_UNITS} units: divide it into several plans.")
    units = list({unit.key: unit for unit in units}.values())
    for unit in units:
        backend_of(unit).verify()
    for key in {Store.of(unit.options.get("store")).signing_key for unit in units} - {None}:
        private_key(key)
    return units


def _arriving(where: str, unit: Unit) -> Unit:
    """Return a unit as it arrives at its worker; raise if that is another one."""
    arrived = msgspec.json.decode(msgspec.json.encode(unit), type=Unit)
    for name, value in unit.options.items():
        if arrived.options[name] != value:
            raise wrong_value(f"Option {name!r} of {where}", "what JSON can say, where numbers are finite", value)
    return arrived


def _check_keys(where: str, table: Mapping[str, object], kind: type[Struct]) -> None:
    known = kind.__struct_fields__
    for name in table:
        if name not in known:
            raise unknown(f"key of {where}:", name, known, otherwise=f"It may have {', '.join(sorted(known))}.")


def _units(path: Path, plan: Plan) -> Iterator[Unit]:
    """Yield a unit for each model, size, dtype, device and number of threads."""
    for model in plan.models:
        own = {name: getattr(model, name) for name in Asked.__struct_fields__}
        asked = structs.replace(plan, **{name: value for name, value in own.items() if value is not None})
        _check(path, model.model, asked)
        source = _digest(path.parent, model.model)
        base = Unit(
            model=model.model,
            device="cpu",
            effort=asked.effort or "quick",
            candidates=asked.candidates,
            budget_s=BUDGET_S if asked.budget_s is None else asked.budget_s,
            limit_s=asked.limit_s,
            options=asked.options or {},
            source=source,
        )
        for device in map(_device, asked.devices or ()):
            # On a GPU the number of threads is no part of a decision.
            threads = (asked.threads or (None,)) if device == "cpu" else (None,)
            shapes = itertools.product(*model.shapes.values())
            for sizes, dtype, number in itertools.product(shapes, asked.dtypes or ("",), threads):
                named = dict(zip(model.shapes, sizes, strict=True))
                yield structs.replace(base, device=device, sizes=named, dtype=dtype, threads=number)


def _device(named: str) -> str:
    """Return a type of device as units have it; a part of a GPU's name as it is."""
    plain = named.strip()
    return plain.lower() if plain.lower() in ("cpu", "cuda") else plain


def _check(path: Path, model: str, asked: Asked) -> None:
    """Raise if what is asked of one model cannot be tuned."""
    if not asked.devices:
        raise BackendKwargsError(f'{str(path)!r} names no devices for {model!r}: add devices = ["cpu"] or ["cuda"].')
    for name in asked.options or {}:
        if name in KEYS_OF_A_PLAN:
            raise BackendKwargsError(f"{name} is a key of a plan, not one of its options: write {name} = ... alone.")
        if name in WITHOUT_EFFECT:
            raise BackendKwargsError(f"Option {name!r} has no effect in a plan, whose units are all raced: remove it.")
    of_the_store = (asked.options or {}).get("store", {})
    if not isinstance(of_the_store, dict) or not {*of_the_store} <= {*OF_THE_STORE}:
        raise BackendKwargsError(
            f"Option 'store' of a plan may have {', '.join(OF_THE_STORE)}, as store = {{ label = 'team' }}: where it "
            "is, --store says."
        )
    Store.of(of_the_store)
    if asked.gpus not in (None, 1):
        raise BackendKwargsError(
            f"gpus must be 1, got {asked.gpus:g}: a race on a part of a GPU would time its neighbours; leave it out."
        )


def _digest(folder: Path, model: str) -> str:
    """Return the SHA-256 of a factory's file, "" for a model of a library; raise if there is no such file."""
    if model.partition(":")[0] in LIBRARIES:
        return ""
    where, name = split_factory(model)
    file = folder / (where if where.endswith(".py") else f"{where.replace('.', '/')}.py")
    if Path(where).is_absolute() or ".." in Path(where).parts:
        raise wrong_value("A plan's factory", "a file beside the plan or below it", where)
    if file.is_file():
        check_defines(file, name)
        return digest(file.read_bytes())
    if where.endswith(".py"):
        raise BackendKwargsError(f"No file {str(file)!r}: a plan's factories are beside it.")
    return ""  # a module that is installed
