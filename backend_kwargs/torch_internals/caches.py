"""torch's caches of compiled code."""

import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch._inductor.codecache import FxGraphCache
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


def compile_kernels_of(key: str) -> None:
    """Compile the Triton kernels of a graph in Inductor's cache, so that loading the graph finds them compiled.

    Its code is executed in a namespace of its own; it defines kernels and calls none. Its kernels are compiled by
    torch's processes, as always, and this thread waits for them without the interpreter's lock.
    """
    folder = Path(FxGraphCache._get_tmp_dir_for_key(key))
    for path in folder.iterdir() if folder.is_dir() else ():
        graph = pickle.loads(path.read_bytes())  # noqa: S301 - as Inductor reads its cache
        names = {"__name__": f"compiled_ahead_{key}", "__file__": str(path)}
        exec(compile(graph.source_code, str(path), "exec"), names)  # noqa: S102 - code that Inductor generated here


def fresh_cache(folder: str | None = None) -> AbstractContextManager[None]:
    """Use an empty folder in place of Inductor's cache, in `folder` if given: torch leaves it there after an error."""
    from torch._inductor import utils

    return utils.fresh_cache(dir=folder)


def forget_loaded() -> None:
    """Forget what Inductor's caches keep in memory, so that kernels are loaded anew."""
    from torch._inductor import utils

    utils.clear_caches()
