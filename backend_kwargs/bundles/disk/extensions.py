"""Triton's own C extensions, which it compiles when a process first uses a GPU: a bundle includes them."""

import re
from collections.abc import Mapping
from pathlib import Path

from backend_kwargs.errors import BackendKwargsError, warn_once
from backend_kwargs.files import write_whole

MAPS = Path("/proc/self/maps")
# As in Triton's cache: the folder is a hash of the source. A mapped file is deleted where another process, which also
# found the cache empty, has put its own there.
EXTENSION = re.compile(r"(/.*/([A-Z2-7]{20,80}/(?:cuda_utils|__triton_launcher)[\w.\-]*\.so))(?: \(deleted\))?$")


def loaded_extensions() -> dict[str, Path]:
    """Return Triton's extensions loaded by this process, by their path in Triton's cache."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return {}
    extensions = {match[2]: Path(match[1]) for match in map(EXTENSION.search, lines) if match}
    return {place: path for place, path in extensions.items() if path.exists()}


def install(extensions: Mapping[str, bytes]) -> None:
    """Copy extensions to where Triton looks for them, in each folder that lacks them and can be written to."""
    for folder in _caches() if extensions else []:
        try:
            for place, content in extensions.items():
                path = folder / place
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_whole(path, content)
        except (OSError, BackendKwargsError) as error:
            warn_once(f"Triton compiles its extensions itself, as they cannot be copied to its cache: {error}.")


def _caches() -> list[Path]:
    """Return the folders that Triton's cache may use: the current one, and Inductor's."""
    import torch
    from triton import knobs  # type: ignore[import-untyped]

    from backend_kwargs.torch_internals.inductor_code import triton_cache_dir

    devices = range(torch.cuda.device_count())
    return [Path(knobs.cache.dir), *(Path(triton_cache_dir(device)) for device in devices)]
