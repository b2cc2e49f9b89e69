"""What stores have for this machine, as `explain` says before there is a graph: read only, and with a deadline."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from backend_kwargs.auto.machine import Machine, differences, machine
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.auto.store import KIND, decisions_in, folder_of
from backend_kwargs.errors import BackendKwargsError, printable
from backend_kwargs.facts.decision import Decision
from backend_kwargs.stores import Store
from backend_kwargs.stores.deadlines import AwayError, Reached
from backend_kwargs.stores.documents import Document, RefusedError, decoded
from backend_kwargs.stores.layered import is_own, reached

MOST_LINES = 5  # of decisions that differ in other ways, for each store and device
MOST_MODELS = 3


def stored_here(settings: RaceSettings) -> Iterator[str]:
    """Yield a line for what each store has for this machine's devices, and how those decisions' machines differ."""
    import torch

    several = settings.stores
    machines = [machine((device,)) for device in ("cuda", "cpu") if device == "cpu" or torch.cuda.is_available()]
    stores = [*map(_reached, several)]
    for store, here in product(stores, machines):  # all at once, and waited for once
        if isinstance(store, Reached):
            store.begin(folder_of(here), 0)
    began = time.monotonic()
    for given, store in zip(several, stores, strict=True):
        if not isinstance(store, Reached):
            yield f"{store} It is left out."
            continue
        try:
            lines = [*_of_store(store, given, settings, machines, began)]
        except AwayError as error:
            why = printable(str(error))
            yield f"Store {store.label!r} cannot be read: {why}{'' if why.endswith(('.', '?')) else '.'}"
        except BackendKwargsError as error:
            yield f"{error} It is left out."
        else:
            if given.url is not None and not lines:
                devices = " or ".join(str(here["device"]) for here in machines)
                yield f"Store {store.label!r} has no decision for {devices}."
            yield from lines


def _reached(given: Store) -> Reached | BackendKwargsError:
    try:
        return reached(given)
    except BackendKwargsError as error:
        return error


def _of_store(
    store: Reached, given: Store, settings: RaceSettings, machines: Iterable[Machine], began: float
) -> Iterator[str]:
    if given.trusted_keys and store.is_local and store.answer(store.ask(is_own), store.longest_s(given), began):
        given = replace(given, trusted_keys=())
    for here in machines:
        contents = store.group(folder_of(here), "", given, began)
        documents, refused = _read(contents, given)
        decisions = [*decisions_in(documents, refused.append)]
        said = [*_of_device(decisions, here, settings)]
        said += [f"{counted(many, 'document')} not used: {why}." for why, many in Counter(refused).items()]
        yield from (f"Store {store.label!r}, {here['device']}: {each}" for each in said)


def _read(contents: Mapping[str, bytes], given: Store) -> tuple[list[Document[Decision]], list[str]]:
    """Return the documents that may be used, and why each of the others may not."""
    documents, refused = [], []
    for name, content in contents.items():
        try:
            documents.append(decoded(KIND, name, content, given.trusted_keys, given.min_generation))
        except RefusedError as error:
            refused.append(printable(str(error)))
    return documents, refused


def _of_device(decisions: Iterable[Decision], here: Machine, settings: RaceSettings) -> Iterator[str]:
    groups: defaultdict[tuple[str, str], list[Decision]] = defaultdict(list)
    provisional: list[Decision] = []
    for each in decisions:
        near, recorded = differences(each.machine, here)
        if each.provisional:
            provisional.append(each)
        else:
            groups[near, "" if near else recorded].append(each)
    ordered = sorted(groups.items(), key=lambda group: (bool(group[0][0]), -len(group[1])))
    for (near, recorded), those in ordered[:MOST_LINES]:
        named = dict.fromkeys(printable(each.model) for each in those if each.model)
        models = ", ".join([*named][:MOST_MODELS]) + (", ..." if len(named) > MOST_MODELS else "")
        what = f"{counted(len(those), 'decision')}{f' ({models})' if models else ''}"
        if near:
            yield f"{what} near: {near}; {_use_of_near(settings)}."
        else:
            used = "raced again" if settings.race == "always" else "used as decided"
            yield f"{what} of a machine like this one, {used}{f'; recorded only: {recorded}' if recorded else ''}."
    if provisional:
        used = "used as far as they were checked" if settings.race == "never" else "raced again"
        yield f"{counted(len(provisional), 'decision')} provisional, {used}."
    if rest := sum(len(those) for _, those in ordered[MOST_LINES:]):
        yield f"{counted(rest, 'decision')} near in other ways."


def _use_of_near(settings: RaceSettings) -> str:
    if settings.race == "always":
        return "raced again, with these winners first"
    if settings.match == "device":
        return "used once the numbers are found right here"
    if settings.race == "never":
        return "not used; match='device' uses them"
    return "raced again, with these winners first; match='device' uses them"


def counted(number: int, what: str) -> str:
    """Return a number with what it counts, such as "2 decisions"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
