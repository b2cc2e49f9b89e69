"""A store in a folder: a file for each document, written beside and renamed. It needs neither links nor locks.

On a network disk a call may fail although it did its work, or fail once: each is done again until what it is for is so.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from backend_kwargs.files import content_of, opened_file, opened_folder, replace_file, retried
from backend_kwargs.stores.documents import LARGEST, check_content, check_name, check_prefix, is_name

BESIDE = ".writing-"  # no name of a document begins so
ABANDONED_S = 3600.0  # age of a file that a killed process left
PAUSES_S = (0.01, 0.02, 0.04, 0.08)  # between tries
PASSING = (errno.ESTALE, errno.EAGAIN, errno.EINTR)
NONE = (None, errno.ENOENT, errno.ENOTDIR)  # None where a file is not regular, or longer than any document

Done = TypeVar("Done")


class Folder:
    """The documents in one folder. If `private`, it is made for its user alone."""

    def __init__(self, path: Path, *, private: bool = False) -> None:
        self.path = path
        self.private = private
        self.label = str(path)

    @property
    def exists(self) -> bool:
        """Whether something is there, which may be unreadable."""
        try:
            self.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return True

    @property
    def is_own(self) -> bool:
        """Whether nobody else can write here, so that no signature is needed."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077

    def get(self, name: str) -> bytes | None:
        """Return the document, None if there is none."""
        return _again(lambda: _content(self._file(name)))

    def put(self, name: str, document: bytes) -> None:
        """Write the document beside the old one, and rename it: both are on the disk when this returns."""
        file = self._file(name)
        check_content(document)
        _again(lambda: self._written(file, document), also=(errno.ENOENT,))

    def list(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Yield the names that begin with `prefix`, with their documents, in order."""
        for name in sorted(self._names(check_prefix(prefix))):
            with suppress(OSError):
                if (content := self.get(name)) is not None:
                    yield name, content

    def forget(self, name: str) -> None:
        """Remove the document if there is one."""
        _again(lambda: self._file(name).unlink(missing_ok=True))

    def _file(self, name: str) -> Path:
        return self.path / check_name(name)

    def _names(self, prefix: str) -> Iterator[str]:
        above = prefix.rpartition("/")[0]
        pending = [above]
        while pending:
            within = pending.pop()
            for each in _again(lambda at=self.path / within: _entries(at)):  # type: ignore[misc]
                name = f"{within}/{each.name}" if within else each.name
                if each.name.startswith(BESIDE):
                    with suppress(OSError):
                        if time.time() - each.stat().st_mtime > ABANDONED_S:
                            Path(each.path).unlink()
                elif each.is_dir(follow_symlinks=False) and (name.startswith(prefix) or prefix.startswith(f"{name}/")):
                    pending.append(name)
                elif name.startswith(prefix) and is_name(name):
                    yield name

    def _written(self, file: Path, document: bytes) -> None:
        self._make(file.parent)
        try:
            replace_file(file, document, 0o600 if self.private else 0o666, prefix=BESIDE)
        except FileNotFoundError:
            if _content(file) != document:  # else it was renamed, and the answer lost
                raise
        with suppress(OSError), opened_folder(file.parent) as folder:  # not every file system can
            os.fsync(folder)

    def _make(self, folder: Path) -> None:
        if folder.is_dir():
            return
        # One folder at most is made above the store's own, for a name that the user gives and may have misspelled.
        if self.private:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700 if self.private else 0o777)
        folder.mkdir(parents=True, exist_ok=True)


def _again(do: Callable[[], Done], also: tuple[int, ...] = ()) -> Done:
    """Return what `do` returns, tried again after an error of a network disk that passes."""
    passing = (*PASSING, *also)
    return retried(do, lambda error: isinstance(error, OSError) and error.errno in passing, PAUSES_S)


def _content(file: Path) -> bytes | None:
    try:
        with opened_file(file) as opened:
            return content_of(opened, LARGEST)
    except OSError as error:
        if error.errno in NONE:
            return None
        raise


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as found:
            return [*found]
    except (FileNotFoundError, NotADirectoryError):
        return []
