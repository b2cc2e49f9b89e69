"""The place of a bundle: a complete folder takes it by one rename, and nothing that is not ours is followed or deleted.

A save renames the old bundle aside, renames the new one to its place, and deletes the old one. A kill between the two
renames leaves no bundle under the name, but the old one aside: a load finds it, and the next save deletes it.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from backend_kwargs.compiled.files import NO_LINK, content_of, named, opened_file, opened_folder, private_folder
from backend_kwargs.compiled.manifest import LARGEST, decoded, digest
from backend_kwargs.errors import BackendKwargsError

MANIFEST, PARTS, SIGNATURES = "manifest.json", "parts", "signatures"
LOCK = ".lock"  # an empty file in the bundles of former releases
ASIDE = ".old"  # the end of the name that an old bundle has while a new one takes its place
MOST_TRIES = 20


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a private folder beside `path`, to be filled, and put it in place; after an error, nothing has changed."""
    with _reported(path):
        target = _resolved(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with private_folder(target.parent, _beside(target)) as new:
            yield new
            _put_in_place(new, target)


def check_place(path: Path) -> None:
    """Raise if a bundle cannot be put at `path`."""
    with _reported(path):
        target = _resolved(path)
        with suppress(FileNotFoundError):
            if target.is_mount() or Path.cwd().is_relative_to(target):
                raise OSError(0, "it is a mounted or the current folder, which cannot be replaced; name a folder in it")
        with suppress(FileNotFoundError):
            _names(target)
        above = next(each for each in target.parents if each.exists())
        for each in (above, target):
            if each.exists() and not (each.is_dir() and os.access(each, os.W_OK | os.X_OK)):
                raise OSError(0, f"{str(each)!r} is not a folder that can be written to")
        with private_folder(above, _beside(target)):  # root may write everywhere, but not on every file system
            pass


@contextmanager
def opened_bundle(path: Path) -> Iterator[int]:
    """Open a bundle's folder; a bundle of which a killed save has left only the old one, by that one's name."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(opened_folder(path))
        except FileNotFoundError as error:
            for each in (*_asides(path), path):  # the new one may have got its name since
                with suppress(OSError):
                    folder = stack.enter_context(opened_folder(each))
                    break
            else:
                raise no_bundle(path, error) from None
        except (OSError, ValueError) as error:
            raise no_bundle(path, error) from None
        yield folder


def no_bundle(path: Path, error: OSError | ValueError) -> BackendKwargsError:
    """Return the error that there is no bundle."""
    why = getattr(error, "strerror", None) or error
    return BackendKwargsError(f"No bundle at {str(path)!r}: cannot read {MANIFEST} ({why}).")


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, BackendKwargsError):
            raise
        why = getattr(error, "strerror", None) or error
        raise BackendKwargsError(f"Cannot write bundle {str(path)!r}: {why}.") from None


def _resolved(path: Path) -> Path:
    """Return the folder that a path leads to: the user's own link stays one."""
    try:
        return Path(os.path.realpath(path))
    except FileNotFoundError:
        raise OSError(0, "the current folder was deleted; change to another") from None


def _beside(target: Path) -> str:
    """Return how names in the folder of a bundle begin that are private to its saves; the bundle's may be long."""
    return f".backend_kwargs-{digest(os.fsencode(target.name))[:16]}-"


def _put_in_place(new: Path, target: Path) -> None:
    """Rename the folder `new` to `target`; a bundle that is there gets another name before, and is then deleted."""
    mode = stat.S_IMODE((new / PARTS).stat().st_mode)
    _sync(new / PARTS, new / SIGNATURES, new)
    for _ in range(MOST_TRIES):
        aside = target.with_name(f"{_beside(target)}{secrets.token_hex(8)}{ASIDE}")
        new.chmod(mode)
        try:
            with suppress(FileNotFoundError):
                target.rename(aside)
                _names(aside)  # again, since nothing of others is deleted
                _take_over(aside, new)
            new.rename(target)
        except BaseException as error:
            with suppress(OSError):
                aside.rename(target)
            # Another process has put its bundle there meanwhile.
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            raise
        _sync(target.parent)
        for old in _asides(target):
            _delete(old)
        return
    raise OSError(0, "other processes keep saving to it")


def _take_over(old: Path, new: Path) -> None:
    """Give the bundle `new` the owner and the mode of the bundle `old`."""
    owner = old.stat()
    if owner.st_uid != os.geteuid():
        for each in (new, *new.rglob("*")):
            os.chown(each, owner.st_uid, owner.st_gid)
    new.chmod(stat.S_IMODE(owner.st_mode))


def _sync(*folders: Path) -> None:
    """Let the names in these folders last if the machine fails."""
    for path in folders:
        with opened_folder(path) as folder:
            os.fsync(folder)


def write(file: Path, content: bytes) -> None:
    """Write a new file that lasts if the machine fails."""
    with file.open("xb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _asides(path: Path) -> list[Path]:
    """Return the bundles that saves to `path` have renamed; one that was killed leaves its."""
    try:
        target = _resolved(path)
    except OSError:
        return []
    return named(target.parent, re.escape(_beside(target)) + "[0-9a-f]{16}" + re.escape(ASIDE))


def _names(path: Path) -> list[str]:
    """Return the names of all files of the bundle in a folder; raise if anything else is there.

    Nothing is followed: a link, and what is no regular file, is not part of a bundle.
    """
    if path.is_file():
        raise OSError(0, "it is a file; name a folder")
    with opened_folder(path, NO_LINK) as folder:
        if not (names := _listed(".", folder)):
            return []
        try:
            with opened_file(MANIFEST, NO_LINK, within=folder) as opened:
                content = content_of(opened, LARGEST)
            manifest = decoded(content, path)
        except (OSError, BackendKwargsError) as error:
            if isinstance(error, FileNotFoundError) and MANIFEST in names:  # another process deletes it
                raise
            foreign = [name for name in names if name not in (PARTS, SIGNATURES, LOCK)]
            raise _not_ours((foreign or names)[0]) from None
        files = {MANIFEST, LOCK, f"{SIGNATURES}/{digest(content)}"}
        files |= {f"{PARTS}/{part.sha256}" for part in manifest.parts}
        found = []
        for name in names:
            kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            inner = name in (PARTS, SIGNATURES) and stat.S_ISDIR(kind)
            found += [f"{name}/{each}" for each in _listed(name, folder)] if inner else [name]
        for name in found:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if name not in files or not stat.S_ISREG(info.st_mode) or (name == LOCK and info.st_size):
                raise _not_ours(name)
        return found


def _listed(name: str, folder: int) -> list[str]:
    with opened_folder(name, NO_LINK, within=folder) as inner:
        return sorted(os.listdir(inner))  # noqa: PTH208 - a descriptor has no iterdir()


def _not_ours(name: str) -> OSError:
    return OSError(0, f"the folder contains {name!r}, which is not part of a bundle; name another")


def _delete(old: Path) -> None:
    """Delete the files of a bundle, and its folders if they are empty then; readers that have one open keep it."""
    with suppress(OSError):
        names = _names(old)
        with opened_folder(old, NO_LINK) as folder:
            for part in (PARTS, SIGNATURES):
                with suppress(FileNotFoundError), opened_folder(part, NO_LINK, within=folder) as inner:
                    for name in names:
                        if name.startswith(f"{part}/"):
                            os.unlink(name.removeprefix(f"{part}/"), dir_fd=inner)
                    os.rmdir(part, dir_fd=folder)
            # The manifest last: what a kill leaves is known by it.
            for name in (LOCK, MANIFEST):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
        old.rmdir()
