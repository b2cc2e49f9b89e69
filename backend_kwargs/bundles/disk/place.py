"""A bundle's folder and its manifest: contents, each part's SHA-256, the signer, the machine that its code is for.

A complete folder takes its place by one rename, and nothing that is not ours is followed or deleted.

A save fills a private folder, exchanges its name with that of the old bundle, and deletes the old one; what a kill
leaves under a private name is never loaded, and the next save deletes it. On a file system that cannot exchange names
no bundle is replaced. Triton's C extensions, which a bundle includes, are listed and installed here too.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from backend_kwargs.bundles.config import REMOVED
from backend_kwargs.errors import BackendKwargsError, error_text, removed, warn_once
from backend_kwargs.files import (
    BESIDE,
    DIRECTORY,
    NO_LINK,
    content_of,
    opened_file,
    opened_folder,
    replace_file,
    reported,
    temporary,
    write_whole,
)
from backend_kwargs.keys import digest
from backend_kwargs.options.machine import machine
from backend_kwargs.stores.documents import Digest, signer

# The names that `load` prints; code is compiled again if one of these differs.
WORDS = {
    "cpu": "instruction sets of the processor",
    "git": "torch's sources",
    "gpu": "GPU",
    "capability": "compute capability",
    "cuda": "CUDA",
}


def fingerprint(device: torch.device) -> dict[str, str]:
    """Return this machine and its releases, as far as code for `device` depends on them."""
    found = machine().on(device).stored("code for a GPU" if device.type == "cuda" else "code for a CPU")
    return {name: str(value) for name, value in found.items()}


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return the differences as text."""
    return [
        f"{WORDS.get(name, name)}: {there.get(name, 'none')} in the bundle, {here.get(name, 'none')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


# ---- the manifest

SCHEMA = 2  # 1 had ahead-of-time packages, and dynamo's bytecode
LARGEST = 8 << 20  # bytes of a manifest
DOMAIN = "backend-kwargs bundle 1"
ExtensionPath = Annotated[str, msgspec.Meta(pattern=r"^[A-Z2-7]{20,80}/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,100}\.so\Z")]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a bundle, named by its hash: so a manifest contains no path."""

    sha256: Digest
    size: Annotated[int, msgspec.Meta(ge=0)]


class GraphPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled graph: its code and libraries, or the reason why it has none; auto's decision."""

    key: Digest
    code: Part | None = None
    libraries: tuple[Part, ...] = ()
    winner: str | None = None
    options: dict[str, Any] = {}
    why: str = ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a bundle. `factory` is the argument of `backend-kwargs bundle build`, "" otherwise."""

    schema: int
    config: dict[str, Any]
    environment: dict[str, str]
    device: str
    module: str
    samples: Annotated[list[Any], msgspec.Meta(min_length=1)]
    output_dtypes: list[str | None]
    weights: Part
    shared_weights: dict[str, str] = {}
    graphs: tuple[GraphPart, ...] = ()
    extensions: dict[ExtensionPath, Part] = {}
    notes: list[str] = []
    cold_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    factory: str = ""
    made: str = ""

    @property
    def code(self) -> list[Part]:
        """The parts that are code."""
        of_graphs = [part for graph in self.graphs for part in (graph.code, *graph.libraries) if part]
        return [*of_graphs, *self.extensions.values()]


def decoded(content: bytes, path: Path) -> Manifest:
    """Parse the content of a manifest file; raise if it is not valid, or from a later release."""
    try:
        fields = msgspec.json.decode(content, type=dict[str, Any])
        schema = fields.get("schema")
        if type(schema) is int and schema != SCHEMA:
            if schema != 1:
                raise BackendKwargsError(
                    f"Bundle {str(path)!r} has schema {schema}, this release reads {SCHEMA}; update backend-kwargs."
                )
            fields = _as_now(fields, path)
        return msgspec.convert(fields, Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BackendKwargsError(f"Bundle {str(path)!r} has no valid manifest: {error_text(error)}.") from None


def _as_now(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of a manifest of schema 1 as this release writes them; raise if it has an AOTI package."""
    if fields.get("kind", "inductor") != "inductor":
        raise removed(f"Kind 'aoti' of bundle {str(path)!r}", f"build again, and {REMOVED['kind']}")
    graphs = fields.get("graphs")
    for graph in graphs if isinstance(graphs, list) else ():
        if isinstance(graph, dict):
            graph.pop("frame", None)
    former = ("kind", "package", "guards")
    return {name: value for name, value in fields.items() if name not in former} | {"schema": SCHEMA}


# ---- signatures


def signer_of(content: bytes, signature: bytes, keys: Sequence[object]) -> object:
    """Return the one of the public `keys` that signed a manifest's content, None if none did.

    Earlier releases signed the content without a domain. It begins with a brace, as nothing with a domain does.
    """
    return signer(DOMAIN, content, signature, keys) or signer("", content, signature, keys)


# ---- Triton's own C extensions, which it compiles when a process first uses a GPU: a bundle includes them

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
        # What killed processes of this user have left: nobody holds a lock on it.
        with suppress(OSError):
            for path in [each for each in parent.iterdir() if re.fullmatch(re.escape(prefix) + HEX, each.name)]:
                with suppress(OSError), opened_folder(path, NO_LINK) as folder:
                    if os.fstat(folder).st_uid == os.geteuid():
                        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        remove(path)
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


# ---- a bundle's own folder

MANIFEST, PARTS, SIGNATURES = "manifest.json", "parts", "signatures"
LOCK = ".lock"  # an empty file in the bundles of former releases
MOST_TRIES, RETRY_S = 20, 0.005
RENAME_EXCHANGE, AT_FDCWD = 2, -100  # of Linux


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a private folder beside `path`, with a bundle's folders to be filled, and put it in place.

    After an error, nothing has changed.
    """
    with reported(f"bundle {str(path)!r}"):
        target = resolved(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with private_folder(target.parent, _beside(target), remove=_remove) as new:
            for folder in (new / PARTS, new / SIGNATURES):
                folder.mkdir()
                folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IRWXU)  # whatever the umask is
            yield new
            _put_in_place(new, target)
        for _ in range(MOST_TRIES):  # another save may be deleting it
            if not new.exists():
                return
            time.sleep(RETRY_S)
            _remove(new)
        if new.exists():
            warn_once(f"Bundle {str(path)!r} is saved; the old one cannot be deleted: {str(new)!r} stays.")


def check_place(path: Path) -> None:
    """Raise if a bundle cannot be put at `path`."""
    with reported(f"bundle {str(path)!r}"):
        target = resolved(path)
        with suppress(FileNotFoundError):
            if target.is_mount() or Path.cwd().is_relative_to(target):
                raise OSError(0, "it is a mounted or the current folder, which cannot be replaced; name a folder in it")
        old: list[str] = []
        with suppress(FileNotFoundError):
            old = _names(target)
        above = next(where for where in target.parents if where.exists())
        for where in (above, target):
            # Opened, since another process may put its bundle there between two looks.
            with suppress(FileNotFoundError), opened_folder(where) as folder:
                if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
                    raise OSError(0, f"{str(where)!r} is not a folder that can be written to")
        # Root may write everywhere, but not on every file system.
        with private_folder(above, _beside(target), remove=_remove) as new:
            if old:  # an empty folder gives way to a rename
                (new / PARTS).mkdir()
                (new / SIGNATURES).mkdir()
                _exchange(new / PARTS, new / SIGNATURES)


def resolved(path: Path) -> Path:
    """Return the folder that a path leads to: the user's own link stays one."""
    try:
        return Path(os.path.realpath(path))
    except FileNotFoundError:
        raise OSError(0, "the current folder was deleted; change to another") from None


def _beside(target: Path) -> str:
    """Return how names in the folder of a bundle begin that are private to its saves; the bundle's may be long."""
    return f".backend_kwargs-{digest(os.fsencode(target.name))[:16]}-"


def _put_in_place(new: Path, target: Path) -> None:
    """Rename the folder `new` to `target`; a bundle that is there gets the name `new`."""
    mode = stat.S_IMODE((new / PARTS).stat().st_mode)
    _sync(new / PARTS, new / SIGNATURES, new)
    for _ in range(MOST_TRIES):
        new.chmod(mode)
        try:
            if not _replaced(new, target):
                new.rename(target)
                _sync(target.parent)
        except OSError as error:
            # Another process has put its bundle there meanwhile.
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            raise
        return
    raise OSError(0, "other processes keep saving to it")


def _replaced(new: Path, target: Path) -> bool:
    """Let the folder `new` and the bundle `target` swap their names; return False where there is none."""
    with suppress(FileNotFoundError), opened_folder(target, NO_LINK) as old:
        # Locked, no other save takes it for a killed one's; its own maker may hold that lock still.
        with suppress(OSError):
            fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _take_over(target, new)
        if not _listed(".", old):
            return False
        _exchange(new, target)
        try:
            _names(new)  # again, since nothing of others is deleted
        except FileNotFoundError:  # another save deletes it already
            return True
        except BaseException:
            _exchange(new, target)
            raise
        _sync(target.parent)
        _remove(new)  # as long as it is locked
        return True
    return False


def _exchange(one: Path, other: Path) -> None:
    """Exchange the names of two folders at once; raise if this system or file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(one), AT_FDCWD, os.fsencode(other), ctypes.c_uint(RENAME_EXCHANGE)
    if rename is None or rename(AT_FDCWD, *names):
        if rename is not None and ctypes.get_errno() == errno.ENOENT:
            raise FileNotFoundError
        raise OSError(0, "its file system cannot exchange two folders; delete the old bundle first, or name another")


def _take_over(old: Path, new: Path) -> None:
    """Give the bundle `new` the owner and the mode of the bundle `old`."""
    owner = old.stat()
    if owner.st_uid != os.geteuid():
        for path in (new, *new.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid)
    new.chmod(stat.S_IMODE(owner.st_mode))


def _sync(*folders: Path) -> None:
    """Let the names in these folders last if the machine fails."""
    for path in folders:
        with opened_folder(path) as folder:
            os.fsync(folder)


def write(file: Path, content: bytes) -> None:
    """Write a file whole, that lasts if the machine fails, and that its owner can read whatever the umask is."""
    replace_file(file, content, prepare=lambda new: new.chmod(stat.S_IMODE(new.stat().st_mode) | 0o600))


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
            content = manifest_file(folder)
            manifest = decoded(content, path)
        except (OSError, BackendKwargsError) as error:
            if isinstance(error, FileNotFoundError) and MANIFEST in names:  # another process deletes it
                raise
            foreign = [name for name in names if name not in (PARTS, SIGNATURES, LOCK)]
            raise _not_ours((foreign or names)[0]) from None
        files = {MANIFEST, LOCK, f"{SIGNATURES}/{digest(content)}"}
        files |= {f"{PARTS}/{part.sha256}" for part in (manifest.weights, *manifest.code)}
        files_here = []
        for name in names:
            kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            inner = name in (PARTS, SIGNATURES) and stat.S_ISDIR(kind)
            files_here += [f"{name}/{file}" for file in _listed(name, folder)] if inner else [name]
        for name in files_here:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if name not in files or not stat.S_ISREG(info.st_mode) or (name == LOCK and info.st_size):
                raise _not_ours(name)
        return files_here


def manifest_file(folder: int) -> bytes:
    """Return the content of the manifest's file in a bundle's folder; raise OSError if it cannot be read."""
    with opened_file(MANIFEST, NO_LINK, within=folder) as opened:
        return content_of(opened, LARGEST)


def _listed(name: str, folder: int) -> list[str]:
    """Return the names in a folder, which is in another one."""
    with opened_folder(name, NO_LINK, within=folder) as inner:
        return sorted(os.listdir(inner))  # noqa: PTH208 - a descriptor has no iterdir()


def _not_ours(name: str) -> OSError:
    return OSError(0, f"the folder contains {name!r}, which is not part of a bundle; name another")


def _remove(path: Path) -> None:
    """Delete a folder of a save, file by file, and of a complete bundle only its own: what others add meanwhile stays.

    The manifest goes last, so that what a kill leaves is known for a bundle.
    """
    with suppress(OSError):
        own = _names(path) if os.path.lexists(path / MANIFEST) else []
        for folder in (path / PARTS, path / SIGNATURES):
            with suppress(FileNotFoundError):
                folder.chmod(0o700)  # a folder that cannot be written to keeps its files
                if not own:
                    shutil.rmtree(folder)
                for name in own:
                    if Path(name).parent.name == folder.name:
                        (path / name).unlink(missing_ok=True)
                folder.rmdir()
        for file in (path / LOCK, *path.glob(f"{BESIDE}*"), path / MANIFEST):
            file.unlink(missing_ok=True)
        path.rmdir()
