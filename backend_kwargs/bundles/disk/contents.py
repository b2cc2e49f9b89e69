"""What is in a bundle, read and written: parts named by their hashes, a manifest, and a signature.

Each part is used from what was verified. Weights are loaded all, or there is an error and no change. A new bundle is
put in place by one rename, when it is complete.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import torch
from torch.types import Device

from backend_kwargs.bundles.config import CompileConfig, floating_dtype
from backend_kwargs.bundles.disk.place import (
    DOMAIN,
    LARGEST,
    MANIFEST,
    PARTS,
    SCHEMA,
    SIGNATURES,
    GraphPart,
    Manifest,
    Part,
    check_place,
    decoded,
    differences,
    fingerprint,
    install,
    loaded_extensions,
    manifest_file,
    new_folder,
    private_folder,
    resolved,
    signer_of,
    write,
)
from backend_kwargs.bundles.graphs import Graph, permits_decision
from backend_kwargs.bundles.running import Built, device_of
from backend_kwargs.bundles.samples import InputCheck, content_hash, leaves_of, memory_view, torch_value
from backend_kwargs.errors import BackendKwargsError, error_text, printable, shown, warn_once, wrong_value
from backend_kwargs.files import NO_LINK, content_of, opened_file, opened_folder, retried
from backend_kwargs.keys import digest
from backend_kwargs.options.option import consent
from backend_kwargs.rewrites.table import are_outdated
from backend_kwargs.stores.documents import private_key, several_keys, signed
from backend_kwargs.torch_internals.tensors import copy_each, has_plain_dispatch, in_storage, with_bits_of

SHOWN = 3  # names in an error
MOST_LEAVES = 10_000  # arguments of all samples
# Methods with which a class says how its state is read. Those of torch's own classes only rename old keys.
STATE_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def why_not_samples(built: Built) -> str:
    """Return why the samples of a built module, any JSON values, are not valid, "" if they are."""
    try:
        if not built.samples:
            return "there is none"
        for sample in built.samples:
            match sample:
                case {"tuple": [{"tuple": list()}, {"dict": dict()}]}:
                    pass
                case _:
                    return f"it must be arguments and keywords, got {shown(sample)}"
        leaves = [*islice((leaf for sample in built.samples for leaf in leaves_of(sample)), MOST_LEAVES + 1)]
        if len(leaves) > MOST_LEAVES:
            return f"they have more than {MOST_LEAVES} arguments"
        size = sum(checked_size(*value[:5]) for kind, value in leaves if kind == "tensor")
        if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            return f"tensors of {size / 1e9:.0f} GB are more than this machine's memory"
        InputCheck(built.samples, built.device, dynamic=bool(built.dynamic))
    except Exception as error:  # noqa: BLE001 - they are any JSON values
        return error_text(error)
    return ""


def checked_size(shape: list[int], stride: list[int] | None, dtype: str, device: str, layout: str) -> int:
    """Return the bytes of a tensor as a manifest describes it; raise unless one can be like that."""
    of, laid_out = torch_value(dtype), torch_value(layout)
    if not isinstance(of, torch.dtype) or not isinstance(laid_out, torch.layout):
        raise TypeError(f"{shown(dtype)} or {shown(layout)} is not a dtype and a layout")
    torch.device(device)
    torch.zeros(1, dtype=of)  # raises for dtypes of quantized tensors
    if any(type(size) is not int or size < 0 for size in (*shape, *(stride or ()))):
        raise ValueError(f"sizes and strides must be whole numbers from 0 on, got {shown(shape)}, {shown(stride)}")
    if stride is not None and len(stride) != len(shape):
        raise ValueError(f"{len(shape)} sizes have {len(stride)} strides")
    last = sum((size - 1) * step for size, step in zip(shape, stride or (), strict=False))
    return max(math.prod(shape), 1 + last) * of.itemsize


# ---- weights


def checked_weights(module: torch.nn.Module, weights: Mapping[str, Any]) -> Callable[[], None]:
    """Return the function that copies `weights` into the module; raise unless it will succeed.

    All names, shapes, dtypes and layouts must match the module's, and all of its tensors must be ones that can be
    written and have the saved values at once.
    """
    state = module.state_dict()
    for what, names in (("lack", state.keys() - weights.keys()), ("have unknown", weights.keys() - state.keys())):
        if names:
            some = ", ".join(sorted(map(repr, names))[:SHOWN])
            raise BackendKwargsError(f"The saved weights {what} {some}: load them into a module of the same kind.")
    for name, own in state.items():
        saved = weights[name]
        if not isinstance(own, torch.Tensor) or not isinstance(saved, torch.Tensor):
            raise BackendKwargsError(f"Saved weight {name!r} is {shown(saved)}, the module's is {shown(own)}.")
        if why := why_not_plain(own):
            raise BackendKwargsError(f"The module's {name!r} cannot be loaded: it {why}.")
        if (saved.shape, saved.dtype) != (own.shape, own.dtype):
            raise BackendKwargsError(
                f"Saved weight {name!r} is {saved.dtype} {list(saved.shape)}, the module's is {own.dtype} "
                f"{list(own.shape)}."
            )
    with torch.no_grad():
        _check_shared(state, weights)
    own = [*module.parameters(), *module.buffers()]
    if not {*map(place_of, own)}.issuperset(map(place_of, state.values())) or not _is_plain(module):
        return partial(_load_as_it_says, module, weights)
    memories = {tensor.untyped_storage().data_ptr() for tensor in own}
    values = [weights[name] for name in state]
    apart = [each.clone() if each.untyped_storage().data_ptr() in memories else each for each in values]
    return partial(_copy, [*state.values()], apart)


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common that are the same values in the same memory."""
    bits = (tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), bits


def why_not_plain(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be saved and loaded, "" if it is one with its own dense values in memory."""
    if torch.nn.parameter.is_lazy(tensor):
        return "has no size before the module is called"
    if not has_plain_dispatch(tensor):
        return f"is a {type(tensor).__name__}, no plain tensor"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        return f"is {'quantized' if tensor.is_quantized else tensor.layout}, not dense"
    return "is on the device meta, without values" if tensor.is_meta else ""


def _check_shared(tensors: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Raise if tensors that share memory cannot have the saved values at once: these are copied into such memory."""
    memories: dict[tuple[torch.device, int], list[str]] = {}
    for name, own in tensors.items():
        if own.numel():
            memories.setdefault((own.device, own.untyped_storage().data_ptr()), []).append(name)
    for names in memories.values():
        own = tensors[names[0]]
        if len(names) == 1 and own.is_contiguous():
            continue
        memory = torch.empty(own.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
        views = [in_storage(memory, tensors[name]) for name in names]
        try:
            for name, view in zip(names, views, strict=True):
                view.copy_(weights[name])
        except RuntimeError:
            raise BackendKwargsError(
                f"The module's {name!r} cannot be loaded: its elements share memory, as expand() makes them; give the "
                "module a contiguous copy."
            ) from None
        for name, view in zip(names, views, strict=True):
            if content_hash(view) != content_hash(weights[name]):
                others = ", ".join(repr(other) for other in names if other != name) or "itself"
                raise BackendKwargsError(
                    f"The module's {name!r} shares memory with {others}, and their saved weights differ: load them "
                    "into a module of the same kind."
                )


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether only torch's own code reads the state of a module."""
    return not any(
        any(getattr(submodule, hooks, None) for hooks in HOOKS)
        or any(
            getattr(getattr(type(submodule), method, None), "__module__", "torch.").partition(".")[0] != "torch"
            for method in STATE_METHODS
        )
        for submodule in module.modules()
    )


def _copy(owns: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy all values at once."""
    with torch.inference_mode(any(own.is_inference() for own in owns)), torch.no_grad():
        if owns:  # one call: Ctrl-C comes before it or after it; torch does not copy to bits in one
            there = [with_bits_of(own, value) for own, value in zip(owns, values, strict=True)]
            copy_each([with_bits_of(own, own) for own in owns], [each.resolve_conj().resolve_neg() for each in there])


def _load_as_it_says(module: torch.nn.Module, weights: Mapping[str, object]) -> None:
    """Load by the module's own code, which may fail at any place: its values and attributes are then put back."""
    tensors = [*module.parameters(), *module.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    attributes = [vars(submodule) for submodule in module.modules()]
    tables = [*attributes, *(own[name] for own in attributes for name in ("_parameters", "_buffers", "_modules"))]
    contents = [dict(table) for table in tables]
    try:
        module.load_state_dict(dict(weights), strict=True)
    except BaseException as error:
        for table, known in zip(tables, contents, strict=True):
            table.clear()
            table.update(known)
        for tensor, value in zip(tensors, values, strict=True):
            with suppress(RuntimeError):  # expanded ones cannot be written, so nothing has changed them
                _copy([tensor], [value])
        if not isinstance(error, Exception):
            raise
        raise BackendKwargsError(f"The module cannot load the saved weights: {error_text(error)}.") from error


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


@dataclass(frozen=True)
class _Bundle:
    """A bundle that is open: its folder, its manifest, and that file's content.

    Each part is verified while it is read, and used from what was read.
    """

    path: Path
    folder: int
    manifest: Manifest
    content: bytes

    def signature(self) -> bytes:
        """Return the signature of the manifest's content; raise OSError if there is none."""
        with (
            opened_folder(SIGNATURES, NO_LINK, within=self.folder) as signatures,
            opened_file(digest(self.content), NO_LINK, within=signatures) as opened,
        ):
            return content_of(opened, LONGEST_SIGNATURE)

    def is_trusted(self, trusted_keys: Sequence[object], *, trust: bool = False) -> bool:
        """Return whether the bundle's code may be run; raise if keys are given and none of them signed it."""
        if not trusted_keys:
            return consent(trust)
        bundle = f"Bundle {str(self.path)!r}"
        try:
            signature = self.signature()
        except FileNotFoundError:
            raise MissingPartError(
                f"{bundle} is not signed; pass trust=True, and no keys, if you trust its author."
            ) from None
        except OSError as error:
            raise BackendKwargsError(f"{bundle} has no valid signature: {error.strerror or error}.") from None
        if signer_of(self.content, signature, trusted_keys) is None:
            raise BackendKwargsError(f"{bundle} is signed by none of the trusted keys, or was changed since.")
        return True

    def part(self, part: Part) -> bytes:
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
                matches = os.fstat(opened.fileno()).st_size == part.size
                while matches and (block := opened.read(BLOCK)):
                    hashed.update(block)
                    yield block
        except OSError as error:
            raise MissingPartError(
                f"Part {part.sha256[:12]} of the bundle cannot be read: {error.strerror or error}."
            ) from None
        if not matches or hashed.hexdigest() != part.sha256:
            raise BackendKwargsError(
                f"Part {part.sha256[:12]} of the bundle is damaged: its size or SHA-256 does not match the manifest."
            )


def _opened(path: Path, read: Callable[[_Bundle], T]) -> T:
    """Return what `read` finds in a bundle; open it again while files are missing.

    Another process may delete it, since it has saved a new one meanwhile.
    """

    def once() -> T:
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(opened_folder(resolved(path)))
                content = manifest_file(folder)
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                kind = MissingPartError if isinstance(error, FileNotFoundError) else BackendKwargsError
                raise kind(f"No bundle at {str(path)!r}: cannot read {MANIFEST} ({why}).") from None
            return read(_Bundle(path, folder, decoded(content, path), content))

    return retried(once, lambda error: isinstance(error, MissingPartError), PAUSES_S)


def inspected(path: Path, trusted_keys: Sequence[object]) -> tuple[Manifest, str]:
    """Return a bundle's manifest, and what is known of its signature; raise if keys are given and none signed it."""

    def read(bundle: _Bundle) -> tuple[Manifest, str]:
        if bundle.is_trusted(trusted_keys):
            return bundle.manifest, "signed by a key that was passed"
        try:
            bundle.signature()
        except FileNotFoundError:
            return bundle.manifest, "not signed"
        except OSError as error:
            return bundle.manifest, f"with a signature that is not valid ({error.strerror or error})"
        return bundle.manifest, "with a signature that is not verified (pass --key)"

    return _opened(path, read)


def load(
    path: Path, module: torch.nn.Module, device: Device, *, trust: bool, trusted_keys: object
) -> tuple[Built, list[str]]:
    """Read a bundle and copy its weights into `module`; return the built module's data, and notes for the user."""
    keys = several_keys("load's", trusted_keys)
    if not isinstance(module, torch.nn.Module):
        raise wrong_value("load's `module`", "a torch.nn.Module", module)
    where = device_of(module, device)
    return _opened(path, lambda bundle: _loaded(bundle, module, where, trusted=bundle.is_trusted(keys, trust=trust)))


def _loaded(
    bundle: _Bundle, module: torch.nn.Module, device: torch.device, *, trusted: bool
) -> tuple[Built, list[str]]:
    """Return the data of a bundle after its weights were copied into the module, and notes for the user."""
    path, manifest = bundle.path, bundle.manifest
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
    code = None if notes else bundle
    built.graphs = {graph.key: _graph(graph, code) for graph in graphs if code or graph.winner}
    extensions = {place: bundle.part(part) for place, part in manifest.extensions.items()} if code else {}
    copy_weights = checked_weights(module, _read_weights(bundle, module))
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


def _graph(graph: GraphPart, bundle: _Bundle | None) -> Graph:
    """Return a graph with its code, or with auto's decision alone if there is nothing to read."""
    # Places of an earlier version of a rewrite are in no graph now.
    is_known = graph.winner is not None and not are_outdated(graph.options.get("rewrites"))
    decision = {"winner": graph.winner, "options": graph.options} if is_known else None
    if bundle is None:
        return Graph(decision=decision, why=graph.why)
    code = bundle.part(graph.code) if graph.code else b""
    libraries = {part.sha256: bundle.part(part) for part in graph.libraries}
    return Graph(code, libraries, decision, graph.why)


def _read_weights(bundle: _Bundle, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a bundle, read from a copy that is verified."""
    from safetensors.torch import load_file

    saved, state = bundle.manifest.weights, module.state_dict().values()
    own = sum(tensor.nbytes for tensor in state if isinstance(tensor, torch.Tensor) and tensor.numel())
    if saved.size > own + LARGEST_HEADER:
        raise BackendKwargsError(
            f"The saved weights take {saved.size} bytes, the module's {own}: load them into a module of the same kind."
        )
    with private_folder() as private:
        bundle.copy(saved, file := private / "weights")
        with file.open("rb") as opened:
            if int.from_bytes(opened.read(8), "little") > LARGEST_HEADER:
                raise BackendKwargsError(
                    f"The bundle's weights cannot be read: their header is longer than {LARGEST_HEADER} bytes."
                )
        try:
            weights: dict[str, torch.Tensor] = load_file(file)
            return weights | {name: weights[known] for name, known in bundle.manifest.shared_weights.items()}
        except Exception as error:  # noqa: BLE001 - safetensors raises its own exception classes
            raise BackendKwargsError(f"The bundle's weights cannot be read: {error_text(error)}.") from None


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
        manifest = msgspec.json.encode(_write_parts(built, new / PARTS, factory))
        content = msgspec.json.format(manifest, indent=1) + b"\n"
        if len(content) > LARGEST:
            raise BackendKwargsError(f"Cannot write bundle {str(path)!r}: its manifest is longer than {LARGEST} bytes.")
        if signing_key is not None:
            write(new / SIGNATURES / digest(content), signed(DOMAIN, content, signing_key))
        write(new / MANIFEST, content)  # last: a folder with a manifest is complete, or being deleted


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
        # As the format counts them: two numbers of float4 are one element for torch.
        packed = tensor.dtype is torch.float4_e2m1fn_x2
        shape = [*tensor.shape[:-1], *(size * 2 if packed else size for size in tensor.shape[-1:])]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(ALIGNED * math.ceil(len(text) / ALIGNED))
    return b"".join((len(text).to_bytes(8, "little"), text, *(memory_view(tensor) for _, tensor in ordered)))
