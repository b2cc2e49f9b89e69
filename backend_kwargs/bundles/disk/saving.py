"""Writing a bundle: parts named by their hashes and a manifest, put in place by one rename when it is complete."""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

import msgspec
import torch

from backend_kwargs.bundles.disk.manifest import (
    DOMAIN,
    LARGEST,
    SCHEMA,
    GraphPart,
    Manifest,
    Part,
    fingerprint,
    loaded_extensions,
)
from backend_kwargs.bundles.disk.place import (
    MANIFEST,
    PARTS,
    SIGNATURES,
    UNNAMED,
    check_place,
    make_folder,
    new_folder,
    write,
)
from backend_kwargs.bundles.disk.weights import place_of, why_not_plain, why_not_samples
from backend_kwargs.bundles.graphs import Graph
from backend_kwargs.bundles.running import Built
from backend_kwargs.bundles.samples import memory_view
from backend_kwargs.errors import BackendKwargsError, shown, wrong_value
from backend_kwargs.keys import digest
from backend_kwargs.stores.signing import private_key, signed

# What safetensors calls each dtype that its format has.
DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.complex64: "C64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
        torch.float8_e8m0fnu: "F8_E8M0",
        torch.float4_e2m1fn_x2: "F4",
    }
)
ALIGNED = 8  # bytes: the header is filled with spaces up to a multiple


def save(built: Built, path: Path, signing_key: object = None, *, factory: str = "") -> None:
    """Write a bundle to a folder beside `path`, and put that in place when it is complete."""
    check_save(path, signing_key)
    check_state(built.module)
    if why := why_not_samples(built):
        raise BackendKwargsError(f"Cannot write bundle {str(path)!r}: it would have no valid samples: {why}.")
    with new_folder(path) as new:
        for folder in (PARTS, SIGNATURES):
            make_folder(new / folder)
        manifest = msgspec.json.encode(_write_parts(built, new / PARTS, factory))
        content = msgspec.json.format(manifest, indent=1) + b"\n"
        if len(content) > LARGEST:
            raise BackendKwargsError(f"Cannot write bundle {str(path)!r}: its manifest is longer than {LARGEST} bytes.")
        if signing_key is not None:
            write(new / SIGNATURES / digest(content), signed(DOMAIN, content, signing_key))
        write(unnamed := new / UNNAMED, content)
        unnamed.rename(new / MANIFEST)  # a folder with a manifest is complete, or being deleted


def check_save(path: Path, signing_key: object = None) -> None:
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
        unknown = "" if value.dtype in DTYPES else f"is {value.dtype}, which safetensors files cannot contain"
        if why := why_not_plain(value) or unknown:
            raise BackendKwargsError(f"The module's {name!r} cannot be saved: it {why}.")


def _write_parts(built: Built, parts: Path, factory: str) -> Manifest:
    """Write each part into a folder, and return the manifest that lists them."""

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
        config=built.config.to_dict(),
        environment=fingerprint(built.device),
        device=built.device.type,
        module=f"{type(built.module).__module__}.{type(built.module).__qualname__}",
        samples=built.samples,
        output_dtypes=[None if dtype is None else str(dtype) for dtype in built.output_dtypes],
        weights=written(as_safetensors(weights)),
        shared_weights=shared,
        graphs=graphs,
        extensions={place: written(file.read_bytes()) for place, file in extensions.items()},
        notes=built.notes,
        cold_s=built.cold_s,
        factory=factory,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _graph_part(key: str, graph: Graph, written: Callable[[bytes], Part]) -> GraphPart:
    """Write the parts of a graph, and return its entry in the manifest."""
    decision = graph.decision or {}
    return GraphPart(
        key=key,
        code=written(graph.code) if graph.code else None,
        libraries=tuple(written(content) for content in graph.libraries.values()),
        winner=decision.get("winner"),
        options=dict(decision.get("options", {})),
        why=graph.why,
    )


def _weights(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the module's state with each tensor once, and the names of those that share another's memory."""
    first: dict[object, str] = {}
    weights: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    for name, value in module.state_dict().items():
        place = place_of(value) if value.numel() else name
        if (known := first.setdefault(place, name)) != name:
            shared[name] = known
        else:
            weights[name] = value.detach().resolve_conj().resolve_neg().contiguous().cpu().clone()
    return weights, shared


# ---- weights, in the format of safetensors, whose own writer needs numpy; its reader does not


def as_safetensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the content of a file with `tensors`: contiguous, on the CPU, none sharing memory with another."""
    # The widest dtypes first, as safetensors writes them, so that each tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": _shape(tensor), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(ALIGNED * math.ceil(len(text) / ALIGNED))
    return b"".join((len(text).to_bytes(8, "little"), text, *(memory_view(tensor) for _, tensor in ordered)))


def _shape(tensor: torch.Tensor) -> list[int]:
    """Return the sizes as the format counts them: two numbers of float4 are one element for torch."""
    packed = tensor.dtype is torch.float4_e2m1fn_x2
    return [*tensor.shape[:-1], *(size * 2 if packed else size for size in tensor.shape[-1:])]
