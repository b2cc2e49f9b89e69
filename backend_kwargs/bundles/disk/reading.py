"""Reading a bundle: its manifest, its signature, and its parts, each of which is used from what was verified."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch.types import Device

from backend_kwargs.bundles.config import CompileConfig, floating_dtype
from backend_kwargs.bundles.disk.manifest import (
    LARGEST,
    GraphPart,
    Manifest,
    Part,
    decoded,
    differences,
    fingerprint,
    install,
    signer_of,
)
from backend_kwargs.bundles.disk.place import MANIFEST, PARTS, SIGNATURES, private_folder, resolved
from backend_kwargs.bundles.disk.weights import checked_weights, why_not_samples
from backend_kwargs.bundles.graphs import Graph, permits_decision
from backend_kwargs.bundles.running import Built, device_of
from backend_kwargs.errors import BackendKwargsError, error_text, printable, warn_once, wrong_value
from backend_kwargs.files import NO_LINK, content_of, opened_file, opened_folder, retried
from backend_kwargs.keys import digest
from backend_kwargs.options.option import consent
from backend_kwargs.rewrites.table import are_outdated
from backend_kwargs.stores.signing import several_keys

T = TypeVar("T")
BLOCK = 1 << 20
LONGEST_SIGNATURE = 1 << 10
LARGEST_HEADER = 10_000_000  # bytes of a safetensors file besides its tensors
PAUSES_S = (0.005,) * 19  # between tries
UNTRUSTED = (
    "its compiled code is not loaded, as it is not trusted, and the module is compiled again: pass trust=True, or the "
    "signer's key in trusted_keys"
)


class MissingPartError(BackendKwargsError):
    """A file that the bundle's manifest names is missing."""


def _complete(path: Path, read: Callable[[int], T]) -> T:
    """Return what `read` finds in a bundle's folder; open it again while files are missing.

    Another process may delete it, since it has saved a new one meanwhile.
    """

    def opened() -> T:
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(opened_folder(resolved(path)))
            except (OSError, ValueError) as error:
                raise no_bundle(path, error) from None
            return read(folder)

    return retried(opened, lambda error: isinstance(error, MissingPartError), PAUSES_S)


def no_bundle(path: Path, error: OSError | ValueError) -> BackendKwargsError:
    """Return the error that there is no bundle."""
    why = getattr(error, "strerror", None) or error
    return BackendKwargsError(f"No bundle at {str(path)!r}: cannot read {MANIFEST} ({why}).")


def _manifest(path: Path, folder: int) -> tuple[Manifest, bytes]:
    """Return the manifest in a bundle's folder, and its file's content."""
    try:
        with opened_file(MANIFEST, NO_LINK, within=folder) as opened:
            content = content_of(opened, LARGEST)
    except FileNotFoundError as error:
        raise MissingPartError(str(no_bundle(path, error))) from None
    except OSError as error:
        raise no_bundle(path, error) from None
    return decoded(content, path), content


def inspected(path: Path, trusted_keys: Sequence[object]) -> tuple[Manifest, str]:
    """Return a bundle's manifest, and what is known of its signature; raise if keys are given and none signed it."""

    def read(folder: int) -> tuple[Manifest, str]:
        manifest, content = _manifest(path, folder)
        if _is_trusted(path, content, folder, trust=False, trusted_keys=trusted_keys):
            return manifest, "signed by a key that was passed"
        try:
            _signature(content, folder)
        except FileNotFoundError:
            return manifest, "not signed"
        except OSError as error:
            return manifest, f"with a signature that is not valid ({error.strerror or error})"
        return manifest, "with a signature that is not verified (pass --key)"

    return _complete(path, read)


def _signature(content: bytes, folder: int) -> bytes:
    """Return the signature of a manifest's content."""
    with (
        opened_folder(SIGNATURES, NO_LINK, within=folder) as signatures,
        opened_file(digest(content), NO_LINK, within=signatures) as opened,
    ):
        return content_of(opened, LONGEST_SIGNATURE)


def _is_trusted(path: Path, content: bytes, folder: int, *, trust: bool, trusted_keys: Sequence[object]) -> bool:
    """Return whether a bundle's code may be run; raise if keys are given and none of them signed it."""
    if not trusted_keys:
        return consent(trust)
    try:
        signature = _signature(content, folder)
    except FileNotFoundError:
        raise MissingPartError(
            f"Bundle {str(path)!r} is not signed; pass trust=True, and no keys, if you trust its author."
        ) from None
    except OSError as error:
        raise BackendKwargsError(f"Bundle {str(path)!r} has no valid signature: {error.strerror or error}.") from None
    if signer_of(content, signature, trusted_keys) is None:
        raise BackendKwargsError(f"Bundle {str(path)!r} is signed by none of the trusted keys, or was changed since.")
    return True


def load(
    path: Path, module: torch.nn.Module, device: Device, *, trust: bool, trusted_keys: object
) -> tuple[Built, list[str]]:
    """Read a bundle and copy its weights into `module`; return the built module's data, and notes for the user."""
    keys = several_keys("load's", trusted_keys)
    if not isinstance(module, torch.nn.Module):
        raise wrong_value("load's `module`", "a torch.nn.Module", module)
    where = device_of(module, device)

    def read(folder: int) -> tuple[Built, list[str]]:
        manifest, content = _manifest(path, folder)
        trusted = _is_trusted(path, content, folder, trust=trust, trusted_keys=keys)
        return _loaded(path, folder, module, where, manifest, trusted)

    return _complete(path, read)


def _loaded(
    path: Path, folder: int, module: torch.nn.Module, device: torch.device, manifest: Manifest, trusted: bool
) -> tuple[Built, list[str]]:
    """Return the data of a bundle after its weights were copied into the module, and notes for the user."""
    config = CompileConfig.from_dict(manifest.config, trust=trusted)
    built = Built(
        config=config,
        module=module,
        device=device,
        samples=manifest.samples,
        output_dtypes=tuple(floating_dtype("An output dtype", name) for name in manifest.output_dtypes),
        cold_s=manifest.cold_s,
        notes=[*map(printable, manifest.notes)],
    )
    if why := why_not_samples(built):
        raise BackendKwargsError(f"Bundle {str(path)!r} has no valid samples: {why}.")
    graphs = manifest.graphs if trusted else [_as_permitted(graph, config, path) for graph in manifest.graphs]
    notes = [*map(printable, _why_anew(manifest, device, trusted=trusted))]
    extensions = {}
    with private_folder() as private:
        read = _Parts(folder)
        code = None if notes else read
        built.graphs = {graph.key: _graph(graph, code) for graph in graphs if code or graph.winner}
        if code:
            extensions = {place: read.content(part) for place, part in manifest.extensions.items()}
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


def _graph(graph: GraphPart, read: "_Parts | None") -> Graph:
    """Return a graph with its code, or with auto's decision alone if there is nothing to read."""
    # Places of an earlier version of a rewrite are in no graph now.
    is_known = graph.winner is not None and not are_outdated(graph.options.get("rewrites"))
    decision = {"winner": graph.winner, "options": graph.options} if is_known else None
    if read is None:
        return Graph(decision=decision, why=graph.why)
    code = read.content(graph.code) if graph.code else b""
    libraries = {part.sha256: read.content(part) for part in graph.libraries}
    return Graph(code, libraries, decision, graph.why)


def _read_weights(manifest: Manifest, module: torch.nn.Module, read: "_Parts", file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a bundle, read from a copy that is verified."""
    from safetensors.torch import load_file

    own = sum(
        tensor.nbytes for tensor in module.state_dict().values() if isinstance(tensor, torch.Tensor) and tensor.numel()
    )
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
            with (
                opened_folder(PARTS, NO_LINK, within=self.folder) as parts,
                opened_file(part.sha256, NO_LINK, within=parts) as opened,
            ):
                if os.fstat(opened.fileno()).st_size != part.size:
                    raise _damaged(part)
                while block := opened.read(BLOCK):
                    hashed.update(block)
                    yield block
        except OSError as error:
            raise MissingPartError(
                f"Part {part.sha256[:12]} of the bundle cannot be read: {error.strerror or error}."
            ) from None
        if hashed.hexdigest() != part.sha256:
            raise _damaged(part)


def _damaged(part: Part) -> BackendKwargsError:
    return BackendKwargsError(
        f"Part {part.sha256[:12]} of the bundle is damaged: its size or SHA-256 does not match the manifest."
    )
