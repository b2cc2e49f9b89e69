"""A bundle: a folder of parts named by their hashes, and a manifest, put in place by one rename when it is complete."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from backend_kwargs.bundles.building import device_of
from backend_kwargs.bundles.config import CompileConfig
from backend_kwargs.bundles.disk.extensions import install, loaded_extensions
from backend_kwargs.bundles.disk.files import NO_LINK, content_of, opened_file, opened_folder, private_folder
from backend_kwargs.bundles.disk.fingerprint import differences, fingerprint
from backend_kwargs.bundles.disk.manifest import (
    LARGEST,
    SCHEMA,
    GraphPart,
    Manifest,
    Part,
    decoded,
    digest,
    encoded,
    private_key,
    signed,
    signer,
)
from backend_kwargs.bundles.disk.place import (
    MANIFEST,
    PARTS,
    SIGNATURES,
    check_place,
    make_folder,
    new_folder,
    no_bundle,
    opened_bundle,
    write,
)
from backend_kwargs.bundles.disk.weights import checked_weights, dtypes_of, place_of, why_not_plain, why_not_samples
from backend_kwargs.bundles.graphs import Graph, permits_decision
from backend_kwargs.bundles.packages.package import Package
from backend_kwargs.bundles.running import Built
from backend_kwargs.errors import BackendKwargsError, error_text, printable, shown, warn_once, wrong_value

T = TypeVar("T")
BLOCK = 1 << 20
LONGEST_SIGNATURE = 1 << 10
LARGEST_HEADER = 10_000_000  # bytes of a safetensors file besides its tensors
MOST_TRIES, RETRY_S = 20, 0.005
UNTRUSTED = (
    "its compiled code is not loaded, as it is not trusted, and the module is compiled again: pass trust=True, or the "
    "signer's key in trusted_keys"
)


class MissingPartError(BackendKwargsError):
    """A file that the bundle's manifest names is missing."""


# ---- saving


def save(built: Built, path: Path, signing_key: Any = None, *, factory: str = "") -> None:
    """Write a bundle to a folder beside `path`, and put that in place when it is complete."""
    check_save(path, signing_key)
    check_state(built.module)
    if why := why_not_samples(built):
        raise BackendKwargsError(f"Cannot write bundle {str(path)!r}: it would have no valid samples: {why}.")
    with new_folder(path) as new:
        for folder in (PARTS, SIGNATURES):
            make_folder(new / folder)
        content = encoded(_write_parts(built, new / PARTS, factory))
        if len(content) > LARGEST:
            raise BackendKwargsError(f"Cannot write bundle {str(path)!r}: its manifest is longer than {LARGEST} bytes.")
        if signing_key is not None:
            write(new / SIGNATURES / digest(content), signed(content, signing_key))
        write(unnamed := new / f"{MANIFEST}.new", content)
        unnamed.rename(new / MANIFEST)  # a folder with a manifest is complete, or being deleted


def check_save(path: Path, signing_key: Any = None) -> None:
    """Raise if no bundle can be saved to `path` with this key: now, not after minutes of compiling."""
    if signing_key is not None:
        private_key(signing_key)
    check_place(path)


def check_state(module: torch.nn.Module) -> None:
    """Raise if the state of `module` cannot be saved."""
    if not isinstance(module, torch.nn.Module):
        raise wrong_value("build's `module`", "a torch.nn.Module", module)
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise BackendKwargsError(f"A module's state must contain only tensors, got {shown(value)} as {name!r}.")
        if why := why_not_plain(value) or _why_no_dtype(value.dtype):
            raise BackendKwargsError(f"The module's {name!r} cannot be saved: it {why}.")


def _why_no_dtype(dtype: torch.dtype) -> str:
    from safetensors.torch import save as as_safetensors

    try:
        as_safetensors({"": torch.empty(0, dtype=dtype)})
    except Exception:  # noqa: BLE001 - it has no list of the dtypes that it can write
        return f"is {dtype}, which safetensors files cannot contain"
    return ""


def _write_parts(built: Built, parts: Path, factory: str) -> Manifest:
    from safetensors.torch import save as as_safetensors

    def written(content: bytes) -> Part:
        part = Part(digest(content), len(content))
        with suppress(FileExistsError):
            write(parts / part.sha256, content)
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
        place = place_of(value) if value.numel() else name
        if (known := first.setdefault(place, name)) != name:
            shared[name] = known
        else:
            weights[name] = value.detach().resolve_conj().resolve_neg().contiguous().cpu().clone()
    return weights, shared


# ---- reading


def read_manifest(path: Path) -> tuple[Manifest, bytes]:
    """Return a bundle's manifest and the file's content; raise if it is missing or not valid."""
    return _complete(path, partial(_manifest, path))


def _complete(path: Path, read: Callable[[int], T]) -> T:
    """Return what `read` finds in a bundle's folder; open it again while files are missing.

    Another process may delete it, since it has saved a new one meanwhile.
    """
    for _ in range(MOST_TRIES - 1):
        with suppress(MissingPartError), opened_bundle(path) as folder:
            return read(folder)
        time.sleep(RETRY_S)
    with opened_bundle(path) as folder:
        return read(folder)


def _manifest(path: Path, folder: int) -> tuple[Manifest, bytes]:
    try:
        with opened_file(MANIFEST, NO_LINK, within=folder) as opened:
            content = content_of(opened, LARGEST)
    except FileNotFoundError as error:
        raise MissingPartError(str(no_bundle(path, error))) from None
    except OSError as error:
        raise no_bundle(path, error) from None
    return decoded(content, path), content


def path_of(path: Any, call: str) -> Path:
    """Return the path of a bundle; raise if it is none."""
    if not isinstance(path, str | Path):
        raise wrong_value(f"{call}'s `path`", "the path of a folder", path)
    return Path(path)


def keys_of(trusted_keys: Any) -> list[Any]:
    """Return the keys that the user trusts, [] for None; raise if they are no list."""
    if trusted_keys is None:
        return []
    if isinstance(trusted_keys, str | bytes) or not isinstance(trusted_keys, Iterable):
        raise wrong_value("load's `trusted_keys`", "a list of public keys or of paths of their PEM files", trusted_keys)
    return [*trusted_keys]


def is_trusted(path: Path, content: bytes, *, trust: bool, trusted_keys: Sequence[Any]) -> bool:
    """Return whether a bundle's code may be run; raise if keys are given and none of them signed it."""
    return _complete(path, partial(_is_trusted, path, content, trust, trusted_keys))


def inspected(path: Path, trusted_keys: Sequence[Any]) -> tuple[Manifest, str]:
    """Return a bundle's manifest, and what is known of its signature; raise if keys are given and none signed it."""

    def read(folder: int) -> tuple[Manifest, str]:
        manifest, content = _manifest(path, folder)
        if _is_trusted(path, content, False, trusted_keys, folder):
            return manifest, "signed by a key that was passed"
        try:
            _signature(content, folder)
        except FileNotFoundError:
            return manifest, "not signed"
        except OSError as error:
            return manifest, f"with a signature that is not valid ({error.strerror})"
        return manifest, "with a signature that is not verified (pass --key)"

    return _complete(path, read)


def _signature(content: bytes, folder: int) -> bytes:
    with (
        opened_folder(SIGNATURES, NO_LINK, within=folder) as signatures,
        opened_file(digest(content), NO_LINK, within=signatures) as opened,
    ):
        return content_of(opened, LONGEST_SIGNATURE)


def _is_trusted(path: Path, content: bytes, trust: bool, trusted_keys: Sequence[Any], folder: int) -> bool:
    if not trusted_keys:
        return trust
    try:
        signature = _signature(content, folder)
    except FileNotFoundError:
        raise MissingPartError(
            f"Bundle {str(path)!r} is not signed; pass trust=True, and no keys, if you trust its author."
        ) from None
    except OSError as error:
        raise BackendKwargsError(f"Bundle {str(path)!r} has no valid signature: {error.strerror}.") from None
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
    return _complete(path, partial(_loaded, path, module, where, trust, trusted_keys))


def _loaded(
    path: Path, module: torch.nn.Module, device: torch.device, trust: bool, trusted_keys: Sequence[Any], folder: int
) -> tuple[Built, list[str]]:
    manifest, content = _manifest(path, folder)
    trusted = _is_trusted(path, content, trust, trusted_keys, folder)
    config = CompileConfig.from_dict(manifest.config, trust=trusted)
    if config.kind != manifest.kind:
        raise BackendKwargsError(f"Bundle {str(path)!r} contradicts itself: kind {manifest.kind!r}, {config.kind!r}.")
    built = Built(
        config=config,
        module=module,
        device=device,
        samples=manifest.samples,
        output_dtypes=dtypes_of(manifest.output_dtypes),
        cold_s=manifest.cold_s,
        notes=[*map(printable, manifest.notes)],
    )
    if why := why_not_samples(built):
        raise BackendKwargsError(f"Bundle {str(path)!r} has no valid samples: {why}.")
    graphs = manifest.graphs if trusted else [_as_permitted(graph, config, path) for graph in manifest.graphs]
    notes = [*map(printable, _why_anew(manifest, device, trusted=trusted))]
    extensions = {}
    with opened_parts(folder) as read, private_folder() as private:
        if not notes:
            built.graphs = {graph.key: _graph(graph, read) for graph in graphs}
            if manifest.package and manifest.guards:
                sha256 = manifest.package.sha256
                built.package = Package(built.folder / f"{sha256}.pt2", sha256, manifest.guards)
                read.copy(manifest.package, built.package.path)
            extensions = {place: read.content(part) for place, part in manifest.extensions.items()}
        else:
            built.graphs = {graph.key: _decided_only(graph) for graph in graphs if graph.winner}
        copy_weights = checked_weights(module, _read_weights(manifest, module, read, private / "weights"))
    for note in notes:
        warn_once(f"Bundle {str(path)!r}: {note}.")
    install(extensions)
    copy_weights()  # last, since nothing may fail after it
    return built, notes


def _as_permitted(graph: GraphPart, config: CompileConfig, path: Path) -> GraphPart:
    """Return a graph of an untrusted bundle, without auto's decision if the config does not permit that."""
    if graph.winner is None or permits_decision(config.resolved, graph.winner, graph.options):
        return graph
    warn_once(f"Bundle {str(path)!r}: a decision of auto is not used, since its config does not permit that.")
    return msgspec.structs.replace(graph, winner=None, options={})


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


def _read_weights(manifest: Manifest, module: torch.nn.Module, read: "_Parts", file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    own = sum(each.nbytes for each in module.state_dict().values() if isinstance(each, torch.Tensor) and each.numel())
    if manifest.weights.size > own + LARGEST_HEADER:
        raise BackendKwargsError(
            f"The saved weights take {manifest.weights.size} bytes, the module's {own}: load them into a module of the "
            "same kind."
        )
    read.copy(manifest.weights, file)
    with file.open("rb") as opened:
        if int.from_bytes(opened.read(8), "little") > LARGEST_HEADER:
            raise BackendKwargsError(
                f"The bundle's weights cannot be read: their header is longer than {LARGEST_HEADER} bytes."
            )
    try:
        weights: dict[str, torch.Tensor] = load_file(file)
        return weights | {name: weights[known] for name, known in manifest.shared_weights.items()}
    except Exception as error:  # noqa: BLE001 - safetensors raises its own exception classes
        raise BackendKwargsError(f"The bundle's weights cannot be read: {error_text(error)}.") from None


@contextmanager
def opened_parts(folder: int) -> Iterator["_Parts"]:
    """Open the folder of a bundle's parts."""
    with ExitStack() as stack:
        try:
            parts = stack.enter_context(opened_folder(PARTS, NO_LINK, within=folder))
        except OSError as error:
            raise MissingPartError(f"The bundle's parts cannot be read: {error.strerror}.") from None
        yield _Parts(parts)


class _Parts:
    """The parts of a bundle: each is verified while it is read, and used from what was read."""

    def __init__(self, folder: int) -> None:
        self.folder = folder

    def content(self, part: Part) -> bytes:
        """Return a part's content."""
        return b"".join(self._blocks(part))

    def copy(self, part: Part, to: Path) -> None:
        """Copy a part to a file, which nobody else can change, and verify the bytes written."""
        try:
            with to.open("xb") as copied:
                os.fchmod(copied.fileno(), 0o600)  # whatever the umask is
                copied.writelines(self._blocks(part))
        except OSError as error:
            raise BackendKwargsError(
                f"Cannot write {str(to)!r}: {error.strerror}; it takes {part.size} bytes, and TMPDIR names its folder."
            ) from None

    def _blocks(self, part: Part) -> Iterator[bytes]:
        """Yield a part's content; raise at the end if it does not match the manifest."""
        hashed = hashlib.sha256()
        try:
            with opened_file(part.sha256, NO_LINK, within=self.folder) as opened:
                if os.fstat(opened.fileno()).st_size != part.size:
                    raise _damaged(part)
                while block := opened.read(BLOCK):
                    hashed.update(block)
                    yield block
        except OSError as error:
            raise MissingPartError(f"Part {part.sha256[:12]} of the bundle cannot be read: {error.strerror}.") from None
        if hashed.hexdigest() != part.sha256:
            raise _damaged(part)


def _damaged(part: Part) -> BackendKwargsError:
    return BackendKwargsError(
        f"Part {part.sha256[:12]} of the bundle is damaged: its size or SHA-256 does not match the manifest."
    )
