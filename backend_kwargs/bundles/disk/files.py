"""Private folders of bundles, also those that killed processes have left."""

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.files.atomic_write import temporary
from backend_kwargs.files.opened import DIRECTORY, NO_LINK, opened_folder

PREFIX = "backend_kwargs.unpacked-"
HEX = "[0-9a-f]{16}"
remove_all: Callable[[Path], None] = partial(shutil.rmtree, ignore_errors=True)


@contextmanager
def private_folder(
    parent: Path | None = None, prefix: str = PREFIX, name: str = "", remove: Callable[[Path], None] = remove_all
) -> Iterator[Path]:
    """Make a folder that only this user can enter, and `remove` it afterwards, unless this is a forked child.

    Its process holds a lock on it. A killed process leaves its folder, and the next one made here removes it.
    """
    parent = parent or _safe()
    process = os.getpid()
    try:
        _sweep(parent, re.escape(prefix) + HEX, remove)
        path, lock = _made(parent, prefix, name)
    except OSError as error:
        raise BackendKwargsError(f"Cannot make a folder in {str(parent)!r}: {error.strerror}.") from None
    try:
        yield path
    finally:
        if process == os.getpid():
            remove(path)
        os.close(lock)


def _made(parent: Path, prefix: str, name: str) -> tuple[Path, int]:
    """Make a private folder; return its path, and the descriptor that holds its lock."""
    while True:
        path = parent / f"{prefix}{name or secrets.token_hex(8)}"
        name = ""  # if somebody has made one of this name, another is taken
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            with suppress(FileNotFoundError):  # until it is locked, another process may take it for a killed one's
                try:
                    path.chmod(0o700)  # whatever the umask is
                    lock = os.open(path, DIRECTORY | NO_LINK)
                except PermissionError:
                    path.rmdir()
                    raise
                with suppress(OSError):  # not every network disk has locks, and then nobody can take it for that
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if path.exists():
                    return path, lock
                os.close(lock)


def _sweep(parent: Path, pattern: str, remove: Callable[[Path], None]) -> None:
    """Remove what killed processes of this user have left under names that match: nobody holds a lock on it."""
    with suppress(OSError):
        for path in [each for each in parent.iterdir() if re.fullmatch(pattern, each.name)]:
            with suppress(OSError), opened_folder(path, NO_LINK) as folder:
                if os.fstat(folder).st_uid == os.geteuid():
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(path)


def _safe() -> Path:
    """Return the folder for temporary files; raise if others can replace what is in it."""
    parent = temporary()
    for folder in (parent, *parent.parents):
        try:
            mode = folder.stat().st_mode
        except OSError as error:
            raise BackendKwargsError(
                f"The temporary folder {str(parent)!r} cannot be used: {error.strerror}; set TMPDIR to another."
            ) from None
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise BackendKwargsError(
                f"The temporary folder {str(parent)!r} is not safe, since everybody can rename what is in "
                f"{str(folder)!r}: set TMPDIR to a folder of your own."
            )
    return parent
