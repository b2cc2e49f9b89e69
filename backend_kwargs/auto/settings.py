"""Options of `auto`."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from backend_kwargs.errors import BackendKwargsError, removed, wrong_value
from backend_kwargs.options import precisions
from backend_kwargs.options.layers import Options
from backend_kwargs.options.option import Tolerance, Where, declared
from backend_kwargs.options.requirements import Limit, Rule
from backend_kwargs.options.trust import AUTO_DATA
from backend_kwargs.stores import Store

Seconds = Annotated[float, Where("of at least 0", lambda seconds: seconds >= 0)]
Wait = Annotated[float, Where("of at least 0, but finite", lambda seconds: 0 <= seconds < math.inf)]
Count = Annotated[int, Where("of at least 1", lambda count: count >= 1)]
Generation = Annotated[int, Where("of at least 0", lambda generation: generation >= 0)]
Text = Annotated[str, Where("of at most 200 characters", lambda text: len(text) <= 200)]


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
        "seconds for the races of a call's graphs; a candidate whose predicted time exceeds what is left is skipped",
    ] = 30.0
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
        str | list[str | Store] | Store | None,
        "where decisions are kept: a folder, a URL, env:NAME, or a list of these, read in order; None: "
        "BACKEND_KWARGS_STORE, or the user's data folder",
    ] = None
    store_connect_s: Annotated[Wait, "seconds to wait for the first answer of a store"] = 2.0
    store_lookup_s: Annotated[Wait, "seconds to wait for a later one"] = 0.5
    store_label: Annotated[
        Text, "who may be asked about the decisions that are made here, such as a team; written into them"
    ] = ""
    signing_key: Annotated[
        object, "Ed25519 private key, or the path of its PEM file, that signs the decisions that are made here"
    ] = None
    trusted_keys: Annotated[
        list[Any] | tuple[Any, ...],
        "Ed25519 public keys, or paths of their PEM files: of stores that others can write, only decisions that one of "
        "these signed are used",
    ] = ()
    min_generation: Annotated[Generation, "generation of the oldest decision that is used"] = 0
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


def read_store(given: Any) -> Any:
    """Return what was given as `store`; raise at once if a URL has a password, or its client library is missing."""
    from backend_kwargs.stores.opening import check_store

    if isinstance(given, str) and given.lstrip().startswith("["):  # a list, as a command line writes it
        with contextlib.suppress(ValueError, RecursionError):
            given = json.loads(given)
    several = [
        str(each) if isinstance(each, Path) else each
        for each in (given if isinstance(given, list | tuple) else [given])
    ]
    if not several:
        raise wrong_value("Option 'store'", "a store, or a list of at least one", given)
    for each in several:
        check_store(each)
    return several if isinstance(given, list | tuple) else several[0]


def read_signing_key(given: Any) -> Any:
    """Return what was given as `signing_key`; raise at once if it can be none. A file is read when it is used."""
    return _read_key("Option 'signing_key'", "an Ed25519 private key", "sign", given)


def read_trusted_keys(given: Any) -> Any:
    """Return what was given as `trusted_keys`; raise at once if one can be none."""
    for each in given if isinstance(given, list | tuple) else ():
        _read_key("Each of 'trusted_keys'", "an Ed25519 public key", "verify", each)
    return given


def _read_key(what: str, wanted: str, does: str, given: Any) -> Any:
    if given is not None and not isinstance(given, str | Path) and not hasattr(given, does):
        raise wrong_value(what, f"{wanted}, or the path of its PEM file", given)
    return given


def read_race(given: Any) -> Any:
    """Return what was given as `race`; raise for a value that was removed."""
    if given == "background":
        raise removed("race='background'", INSTEAD)
    return given


def unreadable_keys(options: Options) -> Iterator[Limit]:
    """Yield why keys cannot be read here, and what is left out without them: no key makes a compile fail."""
    from backend_kwargs.stores.signing import private_key, public_key

    trusted, signing = options.get("trusted_keys") or (), options.get("signing_key")
    kinds: tuple[tuple[str, Callable[[object], object], Sequence[object], str], ...] = (
        ("trusted_keys", public_key, trusted, "no decision of a store that others can write is used"),
        ("signing_key", private_key, [] if signing is None else [signing], "no decision that is made here is stored"),
    )
    for name, read, keys, otherwise in kinds:
        for key in keys:
            try:
                read(key)
            except BackendKwargsError as error:
                yield Limit(f"Option {name!r}", str(error).rstrip("."), "name a file that can be read", otherwise)


INSTEAD = (
    "the first call races, which adds seconds; to add none, race ahead by `backend-kwargs tune` and serve with "
    "race='never'"
)
REMOVED = MappingProxyType(
    {
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
