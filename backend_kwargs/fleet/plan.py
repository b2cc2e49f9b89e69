"""The file of a plan: models, the sizes, devices and threads to tune each for, and what may be raced."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from backend_kwargs.errors import BackendKwargsError, unknown, wrong_value
from backend_kwargs.files import read_toml
from backend_kwargs.fleet.board import (
    BUDGET_S,
    KEYS_OF_A_PLAN,
    OF_THE_STORE,
    WITHOUT_EFFECT,
    Name,
    Seconds,
    Unit,
    backend_of,
)
from backend_kwargs.harness.models import LIBRARIES, check_defines, split_factory
from backend_kwargs.keys import digest
from backend_kwargs.stores import Store
from backend_kwargs.stores.documents import private_key

WHAT = "a plan"
MOST_UNITS = 100_000
Size = Annotated[int, Meta(ge=1)]
Threads = Annotated[int, Meta(ge=1, le=4096)]


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
    table = read_toml(path, WHAT)
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
            for sizes in itertools.product(*model.shapes.values()):
                named = dict(zip(model.shapes, sizes, strict=True))
                for dtype, number in itertools.product(asked.dtypes or ("",), threads):
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
