"""The process groups of torch.distributed: their store and their timeouts."""

from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import Store
from torch.distributed import constants, distributed_c10d

store: Callable[[], Store] = distributed_c10d._get_default_store  # that all ranks share


def shortest_timeout_s() -> float:
    """Return the shortest timeout of the process groups, after which a collective fails; torch's if none says."""
    timeouts = [constants.default_pg_timeout.total_seconds()]
    for group in distributed_c10d._world.pg_map:
        for device in group._device_types:
            with suppress(RuntimeError, AttributeError):  # not every backend has options
                timeouts.append(group._get_backend(device).options._timeout.total_seconds())
    return min(timeouts)
