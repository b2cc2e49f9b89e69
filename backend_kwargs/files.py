"""Files: written whole or not at all, opened for what they are, and read within bounds: they may come from anyone."""

import errno
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from backend_kwargs.errors import BackendKwargsError, error_text

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
        replace_file(file, written, 0o600 if exists else 0o666, partial(_take_over, file) if exists else None)


def replace_file(
    file: Path,
    content: bytes,
    mode: int = 0o666,
    prepare: Callable[[Path], object] | None = None,
    prefix: str = BESIDE,
) -> None:
    """Write `content` to a new file beside, which `prepare` may change first, and rename that; raise OSError."""
    beside = file.with_name(f"{prefix}{secrets.token_hex(8)}")
    try:
        with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as opened:
            if prepare:
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


# Windows lacks these. Opening a pipe put in place of a file must not block.
NO_LINK, AT_ONCE, FOLDER = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY"))
DIRECTORY, READ = os.O_RDONLY | FOLDER, os.O_RDONLY | AT_ONCE


@contextmanager
def opened_folder(path: str | Path, flags: int = 0, *, within: int | None = None) -> Iterator[int]:
    """Open a folder, perhaps within another one; its descriptor leads to it also after it was renamed."""
    folder = os.open(path, DIRECTORY | flags, dir_fd=within)
    try:
        yield folder
    finally:
        os.close(folder)


@contextmanager
def opened_file(path: str | Path, flags: int = 0, *, within: int | None = None) -> Iterator[BinaryIO]:
    """Open a file for reading, perhaps within a folder; raise OSError if it is not a regular one."""
    file = os.open(path, READ | flags, dir_fd=within)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError("it is not a regular file")
    with os.fdopen(file, "rb") as opened:
        yield opened


def content_of(opened: BinaryIO, longest: int) -> bytes:
    """Return a file's content; raise OSError if it is longer than `longest` bytes."""
    content = opened.read(longest + 1)
    if len(content) > longest:
        raise OSError(f"it is longer than {longest} bytes")
    return content


T = TypeVar("T")

LONGEST = 8 << 20  # bytes of a file
DEEPEST, MOST = 32, 1 << 17  # levels of nesting, and values at one level
BITS = 4096  # of an integer: Python prints no more than 4,300 digits
# Python's parser of TOML takes time quadratic in the number of a key's parts. Each match is a comment, a text of
# several lines, a key or a value; only a key has more than two parts. Text without an end is an error for the parser.
PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?)"""
DOT = r"[ \t]*+\.[ \t]*+"
TOKEN = re.compile(
    r"""#[^\n]*+|\"{3}(?:[^"\\]|\\(?s:.)?|"(?!""))*+"{0,5}|'{3}(?:[^']|'(?!''))*+'{0,5}"""
    rf"|(?P<deep>(?:{PART}{DOT}){{{DEEPEST}}})|{PART}(?:{DOT}{PART})*+"
)


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """Return the tables of a TOML file; raise with the reason, naming `what` was to be read."""
    return _read(path, what, _parsed_toml)


def read_json(path: str | Path, what: str) -> Any:
    """Return the value in a JSON file; raise like `read_toml`."""
    return _read(path, what, lambda content: json.loads(content.decode()))


def read_text(path: str | Path, what: str) -> str:
    """Return a file's text; raise like `read_toml`."""
    return _read(path, what, bytes.decode)


def read_bytes(path: str | Path, what: str, longest: int) -> bytes:
    """Return a file's content, of at most `longest` bytes; raise like `read_toml`."""
    return _read(path, what, bytes, longest)


def check_plain(what: str, value: object) -> None:
    """Raise if `value` contains more levels or a larger integer than any option: later steps are recursive."""
    if why := why_not_plain(value):
        raise BackendKwargsError(f"{what} must be plain data: {why}.")


def why_not_plain(value: object) -> str:
    """Return what keeps `value` from being the value of an option, "" if nothing does."""
    level = [value]
    for _ in range(DEEPEST + 1):
        if any(isinstance(each, int) and each.bit_length() > BITS for each in level):
            return f"an integer has more than {BITS} bits"
        level = [*islice((item for each in level for item in _items(each)), MOST + 1)]
        if not level:
            return ""
        if len(level) > MOST:  # in Python, a few lists that contain each other are as many
            return f"it has more than {MOST} values"
    return f"it is nested more than {DEEPEST} levels deep"


def _read(path: str | Path, what: str, parse: Callable[[bytes], T], longest: int = LONGEST) -> T:
    try:
        with opened_file(path) as opened:
            value = parse(content_of(opened, longest))
        why = why_not_plain(value)
    except (OSError, ValueError, RecursionError) as error:
        why = error_text(error)
    if why:
        raise BackendKwargsError(f"Cannot read {what} from {str(path)!r}: {why}.")
    return value


def _parsed_toml(content: bytes) -> dict[str, Any]:
    text = content.decode()
    if any(token.lastgroup for token in TOKEN.finditer(text)):
        raise ValueError(f"a key has more than {DEEPEST} parts")
    return tomllib.loads(text)


def _items(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [*value.values()]
    return [*value] if isinstance(value, list | tuple | set | frozenset) else []


Done = TypeVar("Done")


def retried(do: Callable[[], Done], passes: Callable[[Exception], bool], pauses_s: Iterable[float]) -> Done:
    """Return what `do` returns, done again after each pause as long as its error is one that `passes`."""
    pauses = iter(pauses_s)
    while True:
        try:
            return do()
        except Exception as error:
            # Drawn after the failure: pauses may end at a deadline.
            if not passes(error) or (pause_s := next(pauses, None)) is None:
                raise
        time.sleep(pause_s)
