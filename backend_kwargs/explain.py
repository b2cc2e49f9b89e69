"""Explain before compiling: the source of each option's value, and whether it has an effect here."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from backend_kwargs.backend import Backend
from backend_kwargs.errors import BackendKwargsError, counted, printable
from backend_kwargs.options import PERMITTING, CannotWorkError, Limit, Option, Options, same, sources
from backend_kwargs.options.catalogue import documented
from backend_kwargs.options.machine import Machine
from backend_kwargs.options.precisions import lacking
from backend_kwargs.registry import make_backend
from backend_kwargs.rewrites.table import chosen_places, find_rewrite
from backend_kwargs.tables import as_html

if TYPE_CHECKING:
    from backend_kwargs.auto.settings import RaceSettings
    from backend_kwargs.facts import Decision

# Under `auto` these name what may be raced; any other option is set for every candidate.
PERMITTED = (*PERMITTING, "precision", "rewrites")
MOST_LINES = 5  # of decisions that differ in other ways, for each store and device
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
        notes.append(about_lock(str(backend.options["lock"])))
    elif backend.takes_inductor_options and backend.options.get("auto"):
        notes += _about_stores(backend.options)
    return Explanation(repr(backend), tuple(effects), tuple(notes))


def _about(name: str) -> str:
    """Return what the rewrite `name` does, where, and at which cost."""
    rewrite = find_rewrite(name)
    parts = {"Where": rewrite.applies, "Costs": rewrite.costs}
    return " ".join([f"Rewrite {name!r}: {rewrite.summary}.", *(f"{k}: {v}." for k, v in parts.items() if v)])


def about_lock(path: str) -> str:
    """Return what a lock has and where it was written."""
    from backend_kwargs.auto.lock import read_lock

    pins = read_lock(path)
    kinds = ("decisions", "kernels", "configurations")
    words = ", ".join(f"{len(getattr(pins, kind))} {kind}" for kind in kinds)
    known = {name: pins.machine.get(name) for name in ("torch", "gpu", "cpu", "threads")}
    where = ", ".join(f"{name} {value}" for name, value in known.items() if value)
    return f"Lock {pins.label!r} has {words}, written with {where}. No store is read, and nothing is timed."


def _about_stores(options: Options) -> Iterator[str]:
    """Yield a line for what each store has for this machine's devices, and how those decisions' machines differ."""
    import torch

    from backend_kwargs.auto.machine import machine
    from backend_kwargs.auto.settings import RaceSettings
    from backend_kwargs.auto.store import Catalogue, folder_of

    settings = RaceSettings.of(options)
    machines = [machine((device,)) for device in ("cuda", "cpu") if device == "cpu" or torch.cuda.is_available()]
    for given in settings.stores:
        lines = []
        try:
            catalogue = Catalogue(given, warns=False)
            for here in machines:
                said = [*_about_decisions(catalogue.all(folder=folder_of(here)), here, settings)]
                refused = Counter(printable(str(why)) for why in catalogue.refused.values())
                said += [f"{counted(many, 'document')} not used: {why}." for why, many in refused.items()]
                lines += [f"Store {catalogue.label!r}, {here['device']}: {each}" for each in said]
        except BackendKwargsError as error:
            yield f"{error} It is left out."
            continue
        if given.url is not None and not lines:
            devices = " or ".join(str(here["device"]) for here in machines)
            yield f"Store {catalogue.label!r} has no decision for {devices}."
        yield from lines


def _about_decisions(
    found: "Iterable[Decision]", here: Mapping[str, str | int | None], settings: "RaceSettings"
) -> Iterator[str]:
    from backend_kwargs.auto.machine import in_words, nearly

    groups = Counter(
        None if each.provisional else in_words(nearly(each.machine, here), each.machine, here) for each in found
    )
    provisional, alike = groups.pop(None, 0), groups.pop("", 0)
    if alike:
        used = "raced again" if settings.race == "always" else "used as decided"
        yield f"{counted(alike, 'decision')} of a machine like this one, {used}."
    use = "not used" if settings.race == "never" else "raced again, with these winners first"
    if settings.race != "always":
        uses = "used once the numbers are found right here", f"{use}; match='device' uses them"
        use = uses[settings.match == "exact"]
    for near, count in groups.most_common(MOST_LINES):
        yield f"{counted(count, 'decision')} near: {near}; {use}."
    if provisional:
        used = "used as far as they were checked" if settings.race == "never" else "raced again"
        yield f"{counted(provisional, 'decision')} provisional, {used}."
    if rest := sum(count for _, count in groups.most_common()[MOST_LINES:]):
        yield f"{counted(rest, 'decision')} near in other ways."


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
