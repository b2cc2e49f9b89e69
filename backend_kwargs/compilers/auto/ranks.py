"""One decision for all ranks: the first rank to reach a graph decides; the others wait for it, with a timeout."""

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from backend_kwargs.compilers.auto.decision import COLUMNS, Decision, packed, unpacked
from backend_kwargs.compilers.auto.settings import Settings

logger = logging.getLogger("backend_kwargs.auto")

PREFIX = "backend_kwargs/auto"
GRACE_S = 120.0  # a compile that is running when the budget ends may finish
LONGEST_S = 1e6  # the timeout for an infinite budget


def agreed(key: str, decide: Callable[[], Decision], stand_in: Decision, settings: Settings) -> Decision:
    """Return to every rank the `decide()` of the first one to ask for `key`; without torch.distributed, `decide()`.

    It uses a key in the process group's store, not a collective: ranks may compile different graphs, in any order.
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
    except Exception:  # noqa: BLE001 - each kind of store raises its own timeout error
        logger.warning("Timed out waiting for the rank that races this graph; default is compiled.")
        return stand_in
    return unpacked(dict(zip(COLUMNS, json.loads(store.get(word)), strict=True)))


def _written(decision: Decision, stand_in: Decision) -> str:
    try:
        return json.dumps(packed(decision))
    except (TypeError, ValueError):  # JSON cannot represent an option's value: then no rank may compile with it
        return json.dumps(packed(stand_in))


def ranks() -> int:
    """Return the number of ranks that decide together."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _process_group_store() -> Any | None:
    if ranks() == 1:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
