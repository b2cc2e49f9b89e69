"""One decision for all ranks: who comes first to a graph decides, the others wait for the word a limited time."""

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from backend_kwargs.compilers.auto.decision import COLUMNS, Decision, packed, unpacked
from backend_kwargs.compilers.auto.settings import Settings

logger = logging.getLogger("backend_kwargs.auto")

PREFIX = "backend_kwargs/auto"
GRACE_S = 120.0  # what is being compiled when the time is over is finished
LONGEST_S = 1e6  # of an endless budget


def agreed(key: str, decide: Callable[[], Decision], stand_in: Decision, settings: Settings) -> Decision:
    """Return `decide()` of the first rank that asks for `key`, to every rank; without torch.distributed, `decide()`.

    A keyed word in the process group's store and no collective: ranks may compile different graphs, in any order.
    """
    store = _process_group_store()
    if store is None:
        return decide()
    word = f"{PREFIX}/{key}/decision"
    if store.add(f"{PREFIX}/{key}/owner", 1) == 1:
        decision = stand_in
        try:
            decision = decide()
        finally:
            store.set(word, _written(decision, stand_in))
    try:
        store.wait([word], timedelta(seconds=min(2 * settings.budget_s, LONGEST_S) + GRACE_S))
    except Exception:  # noqa: BLE001 - each kind of store has a timeout of its own
        logger.warning("No decision for a graph came from the rank that races it; default is compiled.")
        return stand_in
    return unpacked(dict(zip(COLUMNS, json.loads(store.get(word)), strict=True)))


def _written(decision: Decision, stand_in: Decision) -> str:
    try:
        return json.dumps(packed(decision))
    except (TypeError, ValueError):  # an option's value that JSON has no form for: then no rank may compile under it
        return json.dumps(packed(stand_in))


def ranks() -> int:
    """Return how many processes decide together."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _process_group_store() -> Any | None:
    if ranks() == 1:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
