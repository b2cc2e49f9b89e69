"""One decision for all ranks: the first rank to reach a graph decides; the others wait for it, with a timeout."""

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from backend_kwargs.auto import logger
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.facts.decision import Decision, Unraced, as_json, parsed
from backend_kwargs.torch_internals.dynamo import AHEAD

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


PREFIX = "backend_kwargs/auto"
GRACE_S = 120.0  # a compile that is running when the budget ends may finish
SHARE = 0.5  # of the process group's timeout: the rest is for compiling, and for collectives that wait for this rank
LOOK_S = 0.2  # a rank that waits looks so often, since a store's own wait() stops other threads' calls and Ctrl-C


def agreed(
    key: str, decide: Callable[[], Decision], default: Callable[[str, Unraced], Decision], settings: RaceSettings
) -> Decision | None:
    """Return to every rank the `decide()` of the first one to ask for `key`; None where there is one rank.

    It uses a key in the process group's store, not a collective: ranks may compile different graphs, in any order. The
    first decision that is stored holds, also for the rank that was to decide: where that one raises, dies or takes too
    long, it is `default(why)`.
    """
    store = _process_group_store()
    if store is None:
        return None
    try:
        place = _place_of(store, key, settings)
        first = store.add(f"{place}/owner", 1) == 1
        came = first or _came(store, place, longest_wait_s(settings))
    except Exception:  # noqa: BLE001 - each kind of store raises its own error
        return _unreachable(default)
    why = "the racing rank failed or was interrupted" if came else "timed out waiting for the racing rank"
    decision = default(why, Unraced.LEFT)
    try:
        if first:
            decision = decide()
    finally:
        stored = _first_stored(store, place, decision, default)
    return stored


def _place_of(store: "Store", key: str, settings: RaceSettings) -> str:
    """Return below which name the ranks write about `key`: another one where they may decide anew."""
    import torch.distributed as dist

    place = f"{PREFIX}/{key}/{settings.budget_s:g}"
    if settings.race != "always":
        return place
    return f"{place}/{store.add(f'{place}/asked by {dist.get_rank()}', 1)}"  # each rank asks equally often


def longest_wait_s(settings: RaceSettings) -> float:
    """Return how long a rank waits for a decision: as long as a race may take, within the process groups' timeouts."""
    from backend_kwargs.torch_internals import distributed

    return min(2 * settings.budget_s + GRACE_S, SHARE * distributed.shortest_timeout_s())


def _came(store: "Store", place: str, longest_s: float) -> bool:
    """Wait for the decision; return whether there is one."""
    ends = time.monotonic() + longest_s
    while not (came := store.check([f"{place}/decision"])) and time.monotonic() < ends:
        time.sleep(LOOK_S)
    return bool(came)


def _first_stored(
    store: "Store", place: str, decision: Decision, default: Callable[[str, Unraced], Decision]
) -> Decision:
    """Store the decision if none is stored; return the stored one."""
    try:
        written = as_json(decision)
    except (TypeError, ValueError):  # then no rank may compile with it
        why = "its winner has an option that JSON cannot represent"
        written = as_json(default(why, Unraced.GRAPH))
    try:
        stored = store.compare_set(f"{place}/decision", "", written)
    except Exception:  # noqa: BLE001 - each kind of store raises its own error
        return _unreachable(default)
    return parsed(json.loads(stored))


def _unreachable(default: Callable[[str, Unraced], Decision]) -> Decision:
    logger.warning("The process group's store cannot be reached; default is compiled.")
    return default("the process group's store cannot be reached", Unraced.ALONE)


def ranks() -> int:
    """Return the number of ranks that decide together."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def may_differ() -> bool:
    """Return whether calls may run in different ways: not where other ranks follow, nor where a function is sealed."""
    import torch.distributed as dist

    return not (AHEAD.get() or (dist.is_available() and dist.is_initialized()))


def _process_group_store() -> "Store | None":
    if ranks() == 1:
        return None
    from backend_kwargs.torch_internals import distributed

    store: Store = distributed.store()
    return store
