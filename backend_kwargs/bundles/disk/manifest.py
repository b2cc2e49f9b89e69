"""The manifest of a bundle: its contents, each part's SHA-256, its signer, and the machine that its code is for.

Data, validated when it is read; and Triton's own C extensions, which it lists.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from backend_kwargs.bundles.config import REMOVED
from backend_kwargs.errors import BackendKwargsError, error_text, removed, warn_once
from backend_kwargs.files import write_whole
from backend_kwargs.options.machine import machine
from backend_kwargs.stores.documents import Digest
from backend_kwargs.stores.signing import signer

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

    @property
    def parts(self) -> list[Part]:
        """Every part."""
        return [self.weights, *self.code]


class _Versioned(msgspec.Struct):
    schema: int


def decoded(content: bytes, path: Path) -> Manifest:
    """Parse the content of a manifest file; raise if it is not valid, or from a later release."""
    try:
        schema = msgspec.json.decode(content, type=_Versioned).schema
        if schema == 1:
            return _former(msgspec.json.decode(content, type=dict[str, Any]), path)
        if schema != SCHEMA:
            raise BackendKwargsError(
                f"Bundle {str(path)!r} has schema {schema}, this release reads {SCHEMA}; update backend-kwargs."
            )
        return msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BackendKwargsError(f"Bundle {str(path)!r} has no valid manifest: {error_text(error)}.") from None


def _former(fields: dict[str, Any], path: Path) -> Manifest:
    """Return a manifest of schema 1; raise if it is an ahead-of-time package's."""
    if fields.pop("kind", "inductor") != "inductor":
        raise removed(f"Kind 'aoti' of bundle {str(path)!r}", f"build again, and {REMOVED['kind']}")
    for name in ("package", "guards"):
        fields.pop(name, None)
    graphs = fields.get("graphs")
    for graph in graphs if isinstance(graphs, list) else ():
        if isinstance(graph, dict):
            graph.pop("frame", None)
    return msgspec.convert(fields | {"schema": SCHEMA}, Manifest)


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
