"""torch's caches of compiled code."""

from contextlib import AbstractContextManager

from torch.compiler._cache import CacheArtifactManager, CacheInfo


def artifacts_apart() -> AbstractContextManager[None]:
    """Record the artifacts of compiles elsewhere: torch.compiler.save_cache_artifacts() saves none of these."""
    return CacheArtifactManager.with_fresh_cache()


def fresh_cache() -> AbstractContextManager[None]:
    """Use an empty folder in place of Inductor's cache."""
    from torch._inductor import utils

    return utils.fresh_cache()
