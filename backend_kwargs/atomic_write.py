"""Files, written whole or not at all."""

import os
import tempfile
from pathlib import Path

from backend_kwargs.errors import BackendKwargsError


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` to a temporary file and rename it to `path`: a full disk or a kill leaves the old file intact."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise BackendKwargsError(f"Cannot write {str(path)!r}: {error.strerror}.") from None
    beside = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        beside.chmod(0o644)
        beside.replace(path)
    except OSError as error:
        raise BackendKwargsError(f"Cannot write {str(path)!r}: {error.strerror}.") from None
    finally:
        beside.unlink(missing_ok=True)
