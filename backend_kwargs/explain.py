"""Explain before compiling: the source of each option's value, and whether it has an effect here."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from backend_kwargs.backend import Backend
from backend_kwargs.options import PERMITTING, CannotWorkError, Limit, Option, Options, same, sources
from backend_kwargs.options.catalogue import documented
from backend_kwargs.options.machine import Machine
from backend_kwargs.options.precisions import lacking
from backend_kwargs.registry import make_backend
from backend_kwargs.rewrites.table import chosen_places, find_rewrite
from backend_kwargs.tables import as_html

# Under `auto` these name what may be raced; any other option is set for every candidate.
PERMITTED = (*PERMITTING, "precision", "rewrites")
COLUMNS = ("option", "value", "layer", "default", "status")


@dataclass(frozen=True, slots=True)
class Effect:
    """One option of a backend.

    `layer` set the value, and `overrides` are the values of lower layers, as (layer, value). `status` is "changed",
    "same as default", "forced by environment: ...", "inert because ...", or "permitted: ..." if `auto` decides whether
    the option is used.
    """

    option: str
    value: object
    layer: str
    default: object
    status: str
    overrides: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a backend serves its purpose here ("works", "works partly", "cannot"), why, and how to change that."""

    word: str
    reason: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word


@dataclass(frozen=True, slots=True)
class Explanation:
    """The options of a backend and their effects.

    `notes` describe its rewrites, name the fallback if a template has no effect here, and under `auto` say what is
    decided for this machine's devices, and how the machines where that was decided differ.
    """

    backend: str
    effects: tuple[Effect, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{e.option} = {e.value!r}  ({e.layer}; default {e.default!r}; {e.status})" for e in self.effects]
        return "\n".join([self.backend, *(f"  {line}" for line in lines), *self.notes])

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row per option, in the order of COLUMNS."""
        return [(e.option, repr(e.value), e.layer, repr(e.default), e.status) for e in self.effects]

    def _repr_html_(self) -> str:
        return as_html(COLUMNS, self.rows(), self.backend, self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data; values that JSON cannot represent are kept as they are."""
        return asdict(self)


def explain(spec: str | Callable[..., object], options: Options | None = None, /, **kwargs: object) -> Explanation:
    """Explain the backend that `make_backend` would return for the same arguments. Compiles nothing.

    Under `auto` its stores are read, to say which decisions they have for this machine's devices; where results are
    pinned, the lock is.

    Raises:
        BackendKwargsError: as `make_backend` does.

    """
    backend = make_backend(spec, options, **kwargs)
    limits: list[Limit] = []
    backend.verify(tell=limits.append)
    layers, inert = sources(backend.layers), backend.limits()
    effects = []
    for name, value in backend.options.items():
        option = documented(backend.option(name)) if backend.takes_inductor_options else backend.option(name)
        *beaten, _ = ((each.source, each.options[name]) for each in backend.layers if name in each.options)
        status = _status(option, value, inert)
        if status == "changed" and value and backend.options.get("auto") and name in PERMITTED:
            status = "permitted: auto also races code without it"
        effects.append(Effect(name, value, layers[name], option.default, status, tuple(beaten)))
    rewrites = backend.options.get("rewrites") if backend.takes_inductor_options else None
    notes = [*map(_about, chosen_places(rewrites or ())), *map(str, limits)]
    if backend.options.get("reproducible"):
        from backend_kwargs.auto.lock import described

        notes.append(described(str(backend.options["lock"])))
    elif backend.takes_inductor_options and backend.options.get("auto"):
        from backend_kwargs.auto.settings import RaceSettings
        from backend_kwargs.auto.store import stored_here

        notes += stored_here(RaceSettings.of(backend.options))
    return Explanation(repr(backend), tuple(effects), tuple(notes))


def _about(name: str) -> str:
    """Return what the rewrite `name` does, where, and at which cost."""
    rewrite = find_rewrite(name)
    parts = {"Where": rewrite.applies, "Costs": rewrite.costs}
    return " ".join([f"Rewrite {name!r}: {rewrite.summary}.", *(f"{k}: {v}." for k, v in parts.items() if v)])


def verdict(backend: Backend) -> Verdict:
    """Return whether `backend` works on this machine.

    It cannot work if no option that requests something has an effect, and works partly if some have none. An option
    that is False, or equal to Inductor's default, requests nothing.
    """
    fallbacks: list[Limit] = []
    try:
        backend.verify(tell=fallbacks.append)
    except CannotWorkError as error:
        (limit,) = error.args
        return Verdict("cannot", limit.reason, limit.remedy)
    asking = {n for n, v in backend.options.items() if v is not False and not same(backend.option(n).default, v)}
    lacking = [limit for name, limit in backend.limits().items() if limit.of_machine and name in asking]
    reasons = [*fallbacks, *lacking]
    if not reasons:
        return Verdict("works")
    partly = len(lacking) < len(asking) and all(limit.otherwise for limit in fallbacks)
    return Verdict("works partly" if partly else "cannot", reasons[0].reason, reasons[0].remedy)


def precision_verdict(name: str, here: Machine) -> Verdict:
    """Return whether a lower precision works on a machine; partly if it is only emulated."""
    limit = next(iter(lacking(name, here)), None)
    if limit is None:
        return Verdict("works")
    return Verdict("works partly" if limit.otherwise else "cannot", limit.reason, limit.remedy)


def _status(option: Option, value: object, inert: Mapping[str, Limit]) -> str:
    """Return whether an option's value changes something here, in words."""
    if option.forced and not same(option.forced_value, value):
        return f"forced by environment: {' or '.join(option.env_force)} makes it {option.forced_value!r}"
    if same(option.default, value):
        return "same as default"
    return f"inert because {inert[option.name].reason}" if option.name in inert else "changed"
