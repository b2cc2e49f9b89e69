"""Options of `auto`."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from backend_kwargs.errors import BackendKwargsError, removed, wrong_value
from backend_kwargs.options import AUTO_DATA, Options, Rule, Tolerance, Where, declared, precisions
from backend_kwargs.stores import Documents, Store

Seconds = Annotated[float, Where("of at least 0", lambda seconds: seconds >= 0)]
Count = Annotated[int, Where("of at least 1", lambda count: count >= 1)]


@dataclass(frozen=True, slots=True)
class RaceSettings:
    """The options of a race, with their defaults."""

    auto: Annotated[bool, "race candidates for each graph, keep the fastest one that passes the accuracy check"] = False
    objective: Annotated[Literal["latency", "memory"], "what to minimize"] = "latency"
    effort: Annotated[Literal["quick", "full"], "candidates to race: few, or all that can gain"] = "quick"
    candidates: Annotated[
        list[str] | None, "steps, templates and other compilers, such as 'tmpl-tvm', to race; None: the built-in steps"
    ] = None
    budget_s: Annotated[
        Seconds,
        "seconds that races add to the compile that serves (tune: 300); what is predicted to exceed them is skipped",
    ] = 10.0
    process_budget_s: Annotated[Seconds, "seconds for all races of this process; then no new race starts"] = 600.0
    most_races: Annotated[Count, "races of one computation; later shapes reuse the latest winner"] = 3
    tolerance: Annotated[Tolerance | None, "absolute and relative tolerance; None: 1e-3, in training 1e-2"] = None
    race_custom_ops: Annotated[
        bool, "race graphs with operators that are not torch's, which then run many times; False: default is used"
    ] = True
    race: Annotated[
        Literal["missing", "never", "always"],
        "when to race; missing: unless a decision is stored; always: tiny graphs and all sizes too",
    ] = "missing"
    match: Annotated[
        Literal["exact", "device"],
        "use a decision for this computation, these sizes and this type of device: exact: of a machine with as many "
        "threads and the same series of torch; device: also of others, if its numbers are right here",
    ] = "exact"
    store: Annotated[
        str | list[str | Store | Documents] | Store | Documents | None,
        "where decisions are kept: a folder, a URL, env:NAME, a bk.Store, which also says whom to trust there, or a "
        "list of these, read in order; None: BACKEND_KWARGS_STORE, or the user's data folder",
    ] = None
    on_progress: Annotated[
        Callable[[str, float], None] | None,
        "called during a race with the candidate's name and the fraction done; None: a line on a terminal",
    ] = None
    precision: Annotated[
        precisions.Names,
        "lower precisions that may be used, such as bf16 or int8-dynamic; needs max_error; int8 and fp8 keep converted "
        "weights, which may miss a change through .data",
    ] = ()
    max_error: Annotated[
        precisions.Bound | None, "largest relative RMSE of an output to a float64 reference under a lower precision"
    ] = None

    @classmethod
    def of(cls, options: Options) -> "RaceSettings":
        """Return the settings given in `options`."""
        return cls(**{name: options[name] for name in OPTIONS if name in options})

    @property
    def stores(self) -> list[Store]:
        """The stores, in the order in which they are read."""
        several = self.store if isinstance(self.store, list | tuple) else [self.store]
        return [Store.of(each) for each in several]


def read_store(given: Any) -> Any:
    """Return what was given as `store`, a mapping as a Store; raise at once if it can be none here."""
    from backend_kwargs.stores.opening import check_store

    if isinstance(given, str) and given.lstrip().startswith(("[", "{")):  # as a command line writes it
        with contextlib.suppress(ValueError, RecursionError):
            given = json.loads(given)
    is_list = isinstance(given, list | tuple)
    several = [Store.of(each) if isinstance(each, Mapping) else each for each in (given if is_list else [given])]
    if not several:
        raise wrong_value("Option 'store'", "a store, or a list of at least one", given)
    for each in several:
        check_store(each)
    return several if is_list else several[0]


def read_race(given: Any) -> Any:
    """Return what was given as `race`; raise for a value that was removed."""
    if given == "background":
        raise removed("race='background'", INSTEAD)
    return given


def check_keys(options: Options) -> None:
    """Raise if the file of a key does not exist; a compile goes on without a key that cannot be read."""
    for store in RaceSettings.of(options).stores:
        for key in (store.signing_key, *store.trusted_keys):
            if isinstance(key, str) and not os.path.exists(key):  # noqa: PTH110 - False too for a name that is too long
                raise BackendKwargsError(f"There is no key {key!r}, which option 'store' names.")


INSTEAD = (
    "the first call races, which adds seconds; to add none, race ahead by `backend-kwargs tune` and serve with "
    "race='never'"
)
OF_STORE = {
    **{f"store_{name}": name for name in ("connect_s", "lookup_s", "label")},
    **{name: name for name in ("min_generation", "signing_key", "trusted_keys")},
}
REMOVED = MappingProxyType(
    {
        **{
            name: f"write store=bk.Store(url, {now}=...), in a file store = {{ {now} = ... }}"
            for name, now in OF_STORE.items()
        },
        "background_share": INSTEAD,
        "share_race": "the first rank to reach a graph races it, and the others wait",
        "tuned_products": "max_autotune_gemm=True tunes all products",
    }
)
OPTIONS = declared(RaceSettings, AUTO_DATA)
RULES = tuple(
    Rule(name, unless=lambda value: "" if value("auto") else "it is read only under auto")
    for name in OPTIONS
    if name not in ("auto", *precisions.OPTIONS)
)
