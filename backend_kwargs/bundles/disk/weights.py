"""Loading saved weights and metadata: all of it, or an error and no change."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch

from backend_kwargs.bundles.running import Built
from backend_kwargs.bundles.samples import InputCheck, content_hash, leaves_of
from backend_kwargs.errors import BackendKwargsError, error_text, shown
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
    of, laid_out = (getattr(torch, name.removeprefix("torch.")) for name in (dtype, layout))
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
    tensors = {name: own for name, own in state.items() if isinstance(own, torch.Tensor)}
    for name, own in state.items():
        if isinstance(own, torch.Tensor) != isinstance(weights[name], torch.Tensor):
            raise BackendKwargsError(f"Saved weight {name!r} is {shown(weights[name])}, the module's is {shown(own)}.")
    for name, own in tensors.items():
        if why := why_not_plain(own):
            raise BackendKwargsError(f"The module's {name!r} cannot be loaded: it {why}.")
        saved = weights[name]
        if why := why_not_plain(saved):
            raise BackendKwargsError(f"Saved weight {name!r} cannot be loaded: it {why}.")
        if (saved.shape, saved.dtype) != (own.shape, own.dtype):
            raise BackendKwargsError(
                f"Saved weight {name!r} is {saved.dtype} {list(saved.shape)}, the module's is {own.dtype} "
                f"{list(own.shape)}."
            )
    with torch.no_grad():
        _check_shared(tensors, weights)
    own = [*module.parameters(), *module.buffers()]
    own_places = {place_of(tensor) for tensor in own}
    if len(tensors) == len(state) and own_places.issuperset(map(place_of, tensors.values())) and _is_plain(module):
        memories = {tensor.untyped_storage().data_ptr() for tensor in own}
        values = [weights[name] for name in tensors]
        return partial(
            _copy,
            [*tensors.values()],
            [tensor.clone() if tensor.untyped_storage().data_ptr() in memories else tensor for tensor in values],
        )
    return partial(_load_as_it_says, module, weights)


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
    attributes = [(submodule, dict(vars(submodule))) for submodule in module.modules()]
    tables = [submodule[name] for _, submodule in attributes for name in ("_parameters", "_buffers", "_modules")]
    contents = [dict(table) for table in tables]
    try:
        module.load_state_dict(dict(weights), strict=True)
    except BaseException as error:
        for submodule, known in attributes:
            vars(submodule).clear()
            vars(submodule).update(known)
        for table, known in zip(tables, contents, strict=True):
            table.clear()
            table.update(known)
        for tensor, value in zip(tensors, values, strict=True):
            with suppress(RuntimeError):  # expanded ones cannot be written, so nothing has changed them
                _copy([tensor], [value])
        if not isinstance(error, Exception):
            raise
        raise BackendKwargsError(f"The module cannot load the saved weights: {error_text(error)}.") from error
