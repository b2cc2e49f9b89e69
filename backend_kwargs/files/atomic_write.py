"""Files, written whole or not at all."""

import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from backend_kwargs.errors import BackendKwargsError

# It does not contain the file's name, which may be as long as a file system permits.
BESIDE = ".backend_kwargs-"
MOST_LINKS = 40  # Linux follows no more


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` to a temporary file and rename it to `path`: a full disk or a kill leaves the old file intact.

    A link stays one, and the file that it names is replaced. A file that exists keeps its mode, owner and attributes;
    a new one has the mode that the umask permits. Anything but a regular file is refused.
    """
    with reported(repr(str(path))):
        file, exists = _resolved(path)
        written = content.encode() if isinstance(content, str) else content
        if exists:
            replace_file(file, written, 0o600, partial(_take_over, file))
        else:
            replace_file(file, written)


def replace_file(
    file: Path,
    content: bytes,
    mode: int = 0o666,
    prepare: Callable[[Path], object] = lambda beside: None,
    prefix: str = BESIDE,
) -> None:
    """Write `content` to a new file beside, which `prepare` may change first, and rename that; raise OSError."""
    beside = file.with_name(f"{prefix}{secrets.token_hex(8)}")
    try:
        with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as opened:
            prepare(beside)
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        beside.replace(file)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise if `write_whole` cannot write to `path`: now, not after minutes of work."""
    with reported(repr(str(path))):
        if not path.parent.is_dir():
            raise OSError(0, f"there is no directory {str(path.parent)!r}")
        if path.is_dir():
            raise OSError(0, "it is a directory")
        with tempfile.TemporaryFile(dir=_resolved(path)[0].parent):
            pass


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Raise errors of files as one line that says `what` cannot be written."""
    try:
        yield
    except BackendKwargsError:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BackendKwargsError(f"Cannot write {what}: {why}.") from None


def _resolved(path: Path) -> tuple[Path, bool]:
    """Return the file that `path` leads to, and whether it exists; raise OSError if it cannot be written."""
    if _follows_device(path):
        raise OSError(0, "it is not a regular file; name another")
    file = Path(os.path.realpath(path))
    try:
        status = path.stat()
    except FileNotFoundError:
        if not file.parent.is_dir():
            raise
        return file, False
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    # /dev/stdout may lead to a file that has no name any more.
    if not stat.S_ISREG(status.st_mode) or not os.path.samestat(status, file.lstat()):
        raise OSError(0, "it is not a regular file; name another")
    if not os.access(file, os.W_OK):
        raise OSError(0, "Permission denied")
    return file, True


def _follows_device(path: Path) -> bool:
    """Return whether a link in /dev or /proc is on the way to a file.

    /dev/stdout leads to one that is open, perhaps in another process, which would go on writing to the old file.
    """
    for _ in range(MOST_LINKS):
        path = Path(os.path.realpath(path.parent), path.name)
        if not path.is_symlink():
            return False
        if re.match(r"/proc/|/dev/(?!shm(/|$))", str(path)):
            return True
        path = path.parent / path.readlink()
    return False


def _take_over(file: Path, beside: Path) -> None:
    """Give the file `beside` the owner, the mode and the attributes of `file`."""
    old, new = file.stat(), beside.stat()
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.chown(beside, old.st_uid, old.st_gid)
    shutil.copystat(file, beside)


def temporary() -> Path:
    """Return the folder for temporary files, which torch's compiler needs too; raise if there is none."""
    try:
        return Path(tempfile.gettempdir()).resolve()
    except OSError:
        raise BackendKwargsError("No temporary folder can be written to: set TMPDIR to one that can.") from None
