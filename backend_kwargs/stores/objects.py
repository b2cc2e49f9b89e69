"""Documents as objects, by fsspec: S3 and what else it has a file system for."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from backend_kwargs.errors import BackendKwargsError, pip_install
from backend_kwargs.stores import Documents
from backend_kwargs.stores.connections import AT_ONCE, LIMIT_S
from backend_kwargs.stores.documents import LARGEST, check_content, check_name, check_prefix, is_name
from backend_kwargs.stores.folder import Folder
from backend_kwargs.stores.opening import unknown_scheme
from backend_kwargs.stores.urls import failure, label_of


def open(url: str, limit_s: float = LIMIT_S) -> Documents:  # noqa: A001 - the drivers' common name
    """Return the store below `url`, whose calls take about `limit_s` seconds at most if fsspec can bound them."""
    label = label_of(url)
    protocols = url.partition("://")[0].split("::")
    protocol = protocols[0]
    if protocol in ("file", "local"):
        if url != label:  # else what may be secret is a folder's name
            raise BackendKwargsError(f"Store {label!r} must have a path and nothing else, such as file:///decisions.")
        folder = Folder(Path(url.partition("://")[2]))  # which writes a file whole, as an object is
        folder.label = label
        return folder
    for each in protocols:
        _check_implemented(each, label)
    return Objects(url, label, limit_s)


def _check_implemented(protocol: str, label: str) -> None:
    """Raise if fsspec knows no file system of this name, or the package that it names is not installed."""
    from importlib.util import find_spec

    from fsspec.registry import known_implementations, registry

    if protocol in registry:
        return
    if protocol not in known_implementations:
        raise unknown_scheme(label, protocol, [*known_implementations, *registry])
    package = known_implementations[protocol]["class"].partition(".")[0]
    if not find_spec(package):
        install = pip_install("fsspec") if package == "s3fs" else f"pip install {package}"
        raise BackendKwargsError(
            f"Store {label!r} needs the package {package}: {install} ({package} is not importable)."
        )


class Objects:
    """A store of an object for each document, named as the files of a folder are. It cannot claim."""

    def __init__(self, url: str, label: str, limit_s: float) -> None:
        self.label = label
        self._url, self._limit_s = url, limit_s
        self._pid, self._lock = 0, threading.Lock()
        self._opened: tuple[Any, str, dict[str, float]] | None = None

    def __repr__(self) -> str:
        return f"<Objects {self.label}>"

    def get(self, name: str) -> bytes | None:
        """Return the document, None if there is none."""
        with self._files(check_name(name)) as (files, path, bounds):
            try:
                document: bytes = files.cat_file(path, start=0, end=LARGEST + 1, **bounds)
            except FileNotFoundError:
                return None
            except Exception:
                files.invalidate_cache()
                if files.info(path, **bounds)["size"]:
                    raise
                return None  # a part of an object without bytes is an error of S3
        return document if 0 < len(document) <= LARGEST else None

    def put(self, name: str, document: bytes) -> None:
        """Keep `document` in place of any other, by one write of an object."""
        check_content(document)
        with self._files(check_name(name)) as (files, path, bounds):
            files.pipe_file(path, document, **bounds)

    def list(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Yield the names that begin with `prefix`, with their documents."""
        folder = check_prefix(prefix).rpartition("/")[0]
        with self._files(folder) as (files, path, bounds):
            files.invalidate_cache()  # else another process's objects are missing
            try:
                found = files.find(path, detail=True, **bounds)
                if not found:  # `find` also leaves out what fails, which `ls` raises
                    files.ls(path, **bounds)
            except FileNotFoundError:
                return iter(())
            sized = [each for each, about in found.items() if 0 < about["size"] <= LARGEST]
        names = (f"{folder}/{each.removeprefix(f'{path}/')}".removeprefix("/") for each in sized)
        return self._documents(sorted(name for name in names if name.startswith(prefix) and is_name(name)))

    def _documents(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        for start in range(0, len(names), AT_ONCE):
            some = names[start : start + AT_ONCE]
            with self._files() as (files, root, bounds):
                paths = [f"{root}/{name}" for name in some]
                documents = files.cat_ranges(paths, 0, LARGEST + 1, on_error="return", **bounds)
                for document in documents:
                    if isinstance(document, Exception) and not isinstance(document, FileNotFoundError):
                        raise document
            # One that was removed since it was listed is not there.
            for name, document in zip(some, documents, strict=True):
                if isinstance(document, bytes) and len(document) <= LARGEST:
                    yield name, document

    def forget(self, name: str) -> None:
        """Remove the document if there is one."""
        with self._files(check_name(name)) as (files, path, bounds), suppress(FileNotFoundError):
            files.rm_file(path, **bounds)

    @contextmanager
    def _files(self, below: str = "") -> Iterator[tuple[Any, str, dict[str, float]]]:
        """Yield this process's file system, a path in it, and what bounds a call; errors are of this package."""
        try:
            with self._lock:
                if self._opened is None or self._pid != os.getpid():  # none works across a fork
                    import fsspec
                    from fsspec.asyn import AsyncFileSystem

                    files, root = fsspec.url_to_fs(self._url, **_options(self._url))
                    bounds = {"timeout": self._limit_s} if isinstance(files, AsyncFileSystem) else {}
                    self._opened, self._pid = (files, root.rstrip("/"), bounds), os.getpid()
            files, root, bounds = self._opened
            yield files, f"{root}/{below}".rstrip("/"), bounds
        except Exception as error:  # noqa: BLE001 - each library has its own, and its text may contain a password
            raise failure(self.label, self._url, error) from None


def _options(url: str) -> dict[str, dict[str, Any]]:
    """Return what fsspec passes to S3's client: only s3fs tries again, since botocore draws its pauses of `random`."""
    from fsspec.config import conf

    scheme = url.partition("://")[0].rpartition("::")[2]
    given = conf.get("s3", {}).get("config_kwargs", {})
    once = {"config_kwargs": {**given, "retries": {"total_max_attempts": 1}}}
    return {scheme: once} if scheme in ("s3", "s3a") else {}
