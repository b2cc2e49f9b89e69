"""Files and folders opened for what they are: a link may be refused, and a pipe is never waited for."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

NO_LINK = os.O_NOFOLLOW
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
READ = os.O_RDONLY | os.O_NONBLOCK  # opening a pipe put in place of a file must not block


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
