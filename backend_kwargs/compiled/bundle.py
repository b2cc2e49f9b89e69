"""A bundle: a folder of parts named by their hashes, and a manifest that is put in place by one rename."""

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import torch

from backend_kwargs.atomic_write import write_whole
from backend_kwargs.compiled.building import device_of
from backend_kwargs.compiled.config import CompileConfig
from backend_kwargs.compiled.extensions import install, loaded_extensions
from backend_kwargs.compiled.fingerprint import differences, fingerprint
from backend_kwargs.compiled.graphs import Folder, Graph
from backend_kwargs.compiled.loading import dtypes_of, load_weights
from backend_kwargs.compiled.manifest import (
    LARGEST,
    SCHEMA,
    GraphPart,
    Manifest,
    Part,
    decoded,
    digest,
    encoded,
    signed,
    signer,
)
from backend_kwargs.compiled.package import Package
from backend_kwargs.compiled.running import Built
from backend_kwargs.compiled.samples import InputCheck
from backend_kwargs.errors import BackendKwargsError, error_text, shown, warn_once, wrong_value

MANIFEST, PARTS, SIGNATURES, LOCK = "manifest.json", "parts", "signatures", ".lock"
OURS = {MANIFEST, PARTS, SIGNATURES, LOCK}
BLOCK = 1 << 20
MOST_TRIES, RETRY_S = 20, 0.005
UNTRUSTED = (
    "its compiled code is not loaded, as it is not trusted, and the module is compiled again: pass trust=True, or the "
    "signer's key in trusted_keys"
)


class MissingPartError(BackendKwargsError):
    """A file that the bundle's manifest names is missing."""


# ---- saving


def save(built: Built, path: Path, signing_key: Any = None, *, factory: str = "") -> None:
    """Write a bundle to `path`; an old one there stays intact until the new manifest is in place."""
    _check_folder(path)
    try:
        for folder in (path, path / PARTS, path / SIGNATURES):
            folder.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            manifest = _write_parts(built, path / PARTS, factory)
            content = encoded(manifest)
            if signing_key is not None:
                write_whole(path / SIGNATURES / digest(content), signed(content, signing_key))
            write_whole(path / MANIFEST, content)
            _sweep(path, manifest, digest(content))
    except OSError as error:
        raise BackendKwargsError(f"Cannot write bundle {str(path)!r}: {error.strerror or error}.") from None


def _check_folder(path: Path) -> None:
    if path.is_file():
        raise BackendKwargsError(f"Cannot write bundle {str(path)!r}: it is a file; name a folder.")
    if path.is_dir() and (foreign := sorted({each.name for each in path.iterdir() if each.name[0] != "."} - OURS)):
        raise BackendKwargsError(
            f"Cannot write bundle {str(path)!r}: the folder contains {foreign[0]!r}, which is not part of a "
            "bundle; name another."
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time write this bundle; the lock ends with the process."""
    with (path / LOCK).open("w") as file:
        try:
            import fcntl
        except ImportError:  # Windows: the last process to rename its manifest wins, and removes other parts
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_parts(built: Built, parts: Path, factory: str) -> Manifest:
    from safetensors.torch import save as as_safetensors

    def written(content: bytes) -> Part:
        part = Part(digest(content), len(content))
        write_whole(parts / part.sha256, content)
        return part

    weights, shared = _weights(built.module)
    graphs = tuple(_graph_part(key, graph, written) for key, graph in [*built.graphs.items()])
    extensions = loaded_extensions() if built.device.type == "cuda" and any(graph.code for graph in graphs) else {}
    return Manifest(
        schema=SCHEMA,
        kind=built.config.kind,
        config=built.config.to_dict(),
        environment=fingerprint(built.device),
        device=built.device.type,
        module=f"{type(built.module).__module__}.{type(built.module).__qualname__}",
        samples=built.samples,
        output_dtypes=[None if dtype is None else str(dtype) for dtype in built.output_dtypes],
        weights=written(as_safetensors(weights)),
        shared_weights=shared,
        graphs=graphs,
        package=written(built.package.content()) if built.package else None,
        guards=built.package.guards if built.package else None,
        extensions={place: written(file.read_bytes()) for place, file in extensions.items()},
        notes=built.notes,
        cold_s=built.cold_s,
        factory=factory,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _graph_part(key: str, graph: Graph, written: Callable[[bytes], Part]) -> GraphPart:
    decision = graph.decision or {}
    return GraphPart(
        key=key,
        code=written(graph.code) if graph.code else None,
        frame=written(graph.frame) if graph.frame else None,
        libraries=tuple(written(content) for content in graph.libraries.values()),
        winner=decision.get("winner"),
        options=dict(decision.get("options", {})),
        why=graph.why,
    )


def _weights(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the module's state with each tensor once, and the names of those that share another's memory."""
    first: dict[Any, str] = {}
    weights: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise BackendKwargsError(f"A module's state must contain only tensors, got {shown(value)} as {name!r}.")
        place = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else name
        if (known := first.setdefault(place, name)) != name:
            shared[name] = known
        else:
            weights[name] = value.detach().contiguous().cpu().clone()
    return weights, shared


def _sweep(path: Path, manifest: Manifest, own: str) -> None:
    """Remove files that no manifest names; a load that is reading them starts again with the new manifest."""
    kept = {part.sha256 for part in manifest.parts} | {own}
    # A killed writer leaves an incomplete manifest next to the current one.
    for file in [*(path / PARTS).iterdir(), *(path / SIGNATURES).iterdir(), *path.glob(f".{MANIFEST}.*")]:
        if file.name not in kept:
            with contextlib.suppress(OSError):
                file.unlink()


# ---- reading


def read_manifest(path: Path) -> tuple[Manifest, bytes]:
    """Return a bundle's manifest and the file's content; raise if it is missing or not valid."""
    try:
        content = _content(path / MANIFEST, LARGEST)
    except OSError as error:
        raise BackendKwargsError(f"No bundle at {str(path)!r}: cannot read {MANIFEST} ({error.strerror}).") from None
    return decoded(content, path), content


def is_trusted(path: Path, content: bytes, *, trust: bool, trusted_keys: Sequence[Any]) -> bool:
    """Return whether a bundle's code may be run; raise if keys are given and none of them signed it."""
    if trust or not trusted_keys:
        return trust
    try:
        signature = _content(path / SIGNATURES / digest(content), 1 << 10)
    except OSError:
        raise BackendKwargsError(
            f"Bundle {str(path)!r} is not signed; pass trust=True if you trust its author."
        ) from None
    if signer(content, signature, trusted_keys) is None:
        raise BackendKwargsError(f"Bundle {str(path)!r} is signed by none of the trusted keys, or was changed since.")
    return True


def load(
    path: Path, module: torch.nn.Module, device: Any, *, trust: bool, trusted_keys: Sequence[Any]
) -> tuple[Built, list[str]]:
    """Read a bundle and copy its weights into `module`; return the built module's data, and notes for the user."""
    if not isinstance(module, torch.nn.Module):
        raise wrong_value("load's `module`", "a torch.nn.Module", module)
    where = device_of(module, device)
    for _ in range(MOST_TRIES - 1):
        manifest, content = read_manifest(path)
        with contextlib.suppress(MissingPartError):
            return _loaded(path, manifest, content, module, where, trust=trust, trusted_keys=trusted_keys)
        # Another process may have saved since the manifest was read, even the same bundle again.
        time.sleep(RETRY_S)
    manifest, content = read_manifest(path)
    return _loaded(path, manifest, content, module, where, trust=trust, trusted_keys=trusted_keys)


def _loaded(
    path: Path,
    manifest: Manifest,
    content: bytes,
    module: torch.nn.Module,
    device: torch.device,
    *,
    trust: bool,
    trusted_keys: Sequence[Any],
) -> tuple[Built, list[str]]:
    trusted = is_trusted(path, content, trust=trust, trusted_keys=trusted_keys)
    config = CompileConfig.from_dict(manifest.config, trust=trusted)
    if config.kind != manifest.kind:
        raise BackendKwargsError(f"Bundle {str(path)!r} contradicts itself: kind {manifest.kind!r}, {config.kind!r}.")
    folder = Folder()
    built = Built(
        config=config,
        module=module,
        device=device,
        samples=manifest.samples,
        output_dtypes=dtypes_of(manifest.output_dtypes),
        folder=folder.path,
        cold_s=manifest.cold_s,
        notes=manifest.notes,
        keep_alive=folder,
    )
    try:
        InputCheck(built.samples, device, dynamic=bool(built.dynamic), values=True)
    except Exception as error:  # noqa: BLE001 - they are any JSON values
        raise BackendKwargsError(f"Bundle {str(path)!r} has no valid samples: {error_text(error)}.") from None
    notes = _why_anew(manifest, device, trusted=trusted)
    read = _Parts(path / PARTS)
    if not notes:
        built.graphs = {graph.key: _graph(graph, read) for graph in manifest.graphs}
        if manifest.package and manifest.guards:
            sha256 = manifest.package.sha256
            built.package = Package(built.folder / f"{sha256}.pt2", sha256, manifest.guards)
            read.copy(manifest.package, built.package.path)
        extensions = {place: read.content(part) for place, part in manifest.extensions.items()}
    else:
        built.graphs = {graph.key: _decided_only(graph) for graph in manifest.graphs if graph.winner}
        extensions = {}
    load_weights(module, _read_weights(manifest, read))
    install(extensions)
    for note in notes:
        warn_once(f"Bundle {str(path)!r}: {note}.")
    return built, notes


def _why_anew(manifest: Manifest, device: torch.device, *, trusted: bool) -> list[str]:
    """Return the reasons why the bundle's code cannot be used here, none if it can."""
    if not manifest.code:
        return []
    if not trusted:
        return [UNTRUSTED]
    if manifest.device != device.type:
        return [f"the module is compiled again: device {manifest.device} in the bundle, {device.type} here"]
    differ = differences(manifest.environment, fingerprint(device))
    return [f"the module is compiled again, as its code is for another machine: {'; '.join(differ)}"] if differ else []


def _graph(graph: GraphPart, read: "_Parts") -> Graph:
    code, frame = (read.content(part) if part else b"" for part in (graph.code, graph.frame))
    libraries = {part.sha256: read.content(part) for part in graph.libraries}
    return replace(_decided_only(graph), code=code, frame=frame, libraries=libraries)


def _decided_only(graph: GraphPart) -> Graph:
    decision = None if graph.winner is None else {"winner": graph.winner, "options": graph.options}
    return Graph(decision=decision, why=graph.why)


def _read_weights(manifest: Manifest, read: "_Parts") -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    file = read.verified(manifest.weights)
    try:
        weights: dict[str, torch.Tensor] = load_file(file)
        return weights | {name: weights[known] for name, known in manifest.shared_weights.items()}
    except Exception as error:  # noqa: BLE001 - safetensors raises its own exception classes
        # The file was removed after it was verified; torch's own opening of it raises a RuntimeError.
        if isinstance(error, FileNotFoundError) or "No such file" in str(error):
            raise MissingPartError("The bundle's weights are gone: another process is saving to it.") from None
        raise BackendKwargsError(f"The bundle's weights cannot be read: {error_text(error)}.") from None


class _Parts:
    """The parts of a bundle, each verified before use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def content(self, part: Part) -> bytes:
        """Return a part's content."""
        return b"".join(self._blocks(part))

    def verified(self, part: Part) -> Path:
        """Return the path of a verified part, to be read in place."""
        for _ in self._blocks(part):
            pass
        return self.folder / part.sha256

    def copy(self, part: Part, to: Path) -> None:
        """Copy a part, and verify the bytes written."""
        try:
            with to.open("wb") as copied:
                copied.writelines(self._blocks(part))
        except OSError as error:
            raise BackendKwargsError(f"Cannot write {str(to)!r}: {error.strerror}.") from None

    def _blocks(self, part: Part) -> Iterator[bytes]:
        """Yield a part's content; raise at the end if it does not match the manifest."""
        file = self.folder / part.sha256
        hashed = hashlib.sha256()
        try:
            with _opened(file) as opened:
                if os.fstat(opened.fileno()).st_size != part.size:
                    raise _damaged(file)
                while block := opened.read(BLOCK):
                    hashed.update(block)
                    yield block
        except OSError as error:
            raise MissingPartError(f"Part {file.name[:12]} of the bundle cannot be read: {error.strerror}.") from None
        if hashed.hexdigest() != part.sha256:
            raise _damaged(file)


def _damaged(file: Path) -> BackendKwargsError:
    return BackendKwargsError(
        f"Part {file.name[:12]} of the bundle is damaged: its size or SHA-256 does not match the manifest."
    )


def _content(file: Path, longest: int) -> bytes:
    """Return a regular file's content; raise OSError if it is none, or longer than `longest` bytes."""
    with _opened(file) as opened:
        content = opened.read(longest + 1)
    if len(content) > longest:
        raise OSError(0, f"it is longer than {longest} bytes")
    return content


def _opened(file: Path) -> BinaryIO:
    # O_NONBLOCK: opening a pipe put in place of the file must not block.
    opened = os.fdopen(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise OSError(0, "it is not a regular file")
    return opened
