"""torch's caches of compiled code."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.compiler._cache import CacheArtifact, CacheArtifactManager, CacheInfo


def artifacts_apart() -> AbstractContextManager[None]:
    """Record the artifacts of compiles elsewhere: torch.compiler.save_cache_artifacts() saves none of these."""
    return CacheArtifactManager.with_fresh_cache()


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


def fresh_cache() -> AbstractContextManager[None]:
    """Use an empty folder in place of Inductor's cache."""
    from torch._inductor import utils

    return utils.fresh_cache()
