"""torch's caches of compiled code."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch.compiler._cache import CacheArtifact, CacheArtifactManager, CacheInfo

# Records the artifacts of compiles elsewhere: torch.compiler.save_cache_artifacts() saves none of these.
artifacts_apart: Callable[[], AbstractContextManager[None]] = CacheArtifactManager.with_fresh_cache


@contextmanager
def artifacts_noted() -> Iterator[list[CacheArtifact]]:
    """Record the artifacts of compiles elsewhere, and add them to the list that is yielded when this is left."""
    noted: list[CacheArtifact] = []
    with CacheArtifactManager.with_fresh_cache():
        try:
            yield noted
        finally:
            noted += CacheArtifactManager._seen_artifacts


def record_artifacts(artifacts: list[CacheArtifact]) -> None:
    """Record artifacts as those of a compile of this process."""
    for each in artifacts:
        if each not in CacheArtifactManager._seen_artifacts:
            CacheArtifactManager._new_cache_artifacts[each.type()].append(each)
            CacheArtifactManager._seen_artifacts.add(each)


def fresh_cache(folder: str | None = None) -> AbstractContextManager[None]:
    """Use an empty folder in place of Inductor's cache, in `folder` if given: torch leaves it there after an error."""
    from torch._inductor import utils

    return utils.fresh_cache(dir=folder)


def forget_loaded() -> None:
    """Forget what Inductor's caches keep in memory, so that kernels are loaded anew."""
    from torch._inductor import utils

    utils.clear_caches()
