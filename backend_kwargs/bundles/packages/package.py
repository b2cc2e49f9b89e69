"""An ahead-of-time package, loaded: it reads the module's own weights, and serves what its guards permit."""

import hashlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem, is_
from pathlib import Path
from typing import Any

import torch

from backend_kwargs.bundles.input_check import InputCheck, spot
from backend_kwargs.bundles.packages.guards import PackageGuards, Weight
from backend_kwargs.bundles.samples import Args, Kwargs, content_hash
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts import Call
from backend_kwargs.graphs.memory import addresses_of
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.inductor_code import load_package
from backend_kwargs.torch_internals.modules import buffers_of, children_of, parameters_of
from backend_kwargs.torch_internals.tensors import same_layouts, version_of

PLAIN = (torch.Tensor, torch.nn.Parameter)
MOST_SIZES = 4096  # combinations of sizes that are remembered
ALIGNMENT = 16  # bytes; on CUDA the code copies an input with less, and its writes are lost
AGAIN = "Build with a sample of this kind, or with unmatched='eager'."


@dataclass(frozen=True, slots=True)
class Package:
    """A package's file, its SHA-256, and what its code assumes."""

    path: Path
    sha256: str
    guards: PackageGuards

    def content(self) -> bytes:
        """Return the file's content; raise if it is not the one that was compiled."""
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise BackendKwargsError(f"Cannot read the package {str(self.path)!r}: {error.strerror}.") from None
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise BackendKwargsError(f"The package {str(self.path)!r} was changed since it was compiled: build again.")
        return content


class PackageCall:
    """The callable of a package. `check` compares the inputs with the samples, and guards compare the rest.

    Inputs like those of an earlier call need no further check, so that a call costs a comparison of shapes and strides.
    `otherwise` runs inputs that do not match, None if they are an error.
    """

    def __init__(
        self,
        package: Package,
        module: torch.nn.Module,
        device: torch.device,
        *,
        check: InputCheck,
        otherwise: Call | None,
    ) -> None:
        package.content()
        self._guards, self._check, self._otherwise = package.guards, check, otherwise
        self._reads_offset = any(tensor.offset is not None for tensor in package.guards.tensors)
        loaded = load_package(package.path, device_index=-1 if device.index is None else device.index)
        self._run = loaded.loader.boxed_run
        inputs, self._outputs = map(pytree.treespec_loads, loaded.loader.get_call_spec())
        self._keywords = [*pytree.tree_unflatten(range(inputs.num_leaves), inputs)[1]]
        self._weights = _Weights(package.guards.weights, module, device, loaded)
        self._matched: set[tuple[object, ...]] = set()
        self._repeats = any(tensor.same_as is not None for tensor in package.guards.tensors)
        # torch runs a package's calls one after the other, so this costs nothing; weights change only between them.
        self._lock = threading.RLock()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the package, or `otherwise`."""
        with self._lock:
            try:
                self._weights.follow()
                tensors = self.tensors(args, kwargs)
                if self._repeats or len({*map(id, tensors)}) < len(tensors):
                    self._compare_identity(tensors, args, kwargs)
            except BackendKwargsError:
                if self._otherwise is None:
                    raise
            else:
                return pytree.tree_unflatten(self._run(tensors), self._outputs)
        return self._otherwise(*args, **kwargs)

    def serve(self, module: torch.nn.Module, otherwise: Call | None) -> None:
        """Read the weights of `module` from now on, whose values are those of the module before."""
        with self._lock:
            self._otherwise = otherwise
            self._weights.rebind(module)

    def tensors(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        """Return the tensors among the arguments in the package's order; raise if it was not compiled for them."""
        key: Any = [*kwargs]
        for value in (*args, *kwargs.values()) if kwargs else args:
            if value.__class__ not in PLAIN or value.layout is not torch.strided or value.is_nested:
                key = None
                break
            key += (value.dtype, value.device, value.shape, value.stride(), value.is_conj(), value.is_neg())
            if self._reads_offset:
                key.append(value.storage_offset())
        key = None if key is None else tuple(key)
        if key is not None and key in self._matched:
            tensors = [*args, *map(kwargs.__getitem__, self._keywords)] if kwargs else [*args]
        else:
            tensors = self._compared(args, kwargs)
            if key is not None:
                if len(self._matched) >= MOST_SIZES:
                    self._matched.clear()
                self._matched.add(key)
        if self._guards.writes:
            self._compare_memory(tensors, args, kwargs)
        return tensors

    def _compared(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        """Compare the inputs with the samples and with the guards; return their tensors in order."""
        self._check(args, dict(kwargs))
        in_order = (args, {name: kwargs[name] for name in self._keywords})
        tensors = [leaf for leaf in pytree.tree_leaves(in_order) if isinstance(leaf, torch.Tensor)]
        if problem := self._guards.problem(tensors, lambda: self._names(args, kwargs)):
            raise BackendKwargsError(f"{problem} {AGAIN}")
        return tensors

    def _compare_identity(self, tensors: Sequence[torch.Tensor], args: Args, kwargs: Kwargs) -> None:
        """Raise unless the same inputs as in the sample are one object, which the module may compare."""
        for at, (guard, first) in enumerate(zip(self._guards.tensors, first_uses(tensors), strict=True)):
            if first != guard.same_as:
                names = self._names(args, kwargs)
                other = first if guard.same_as is None else guard.same_as
                wanted = "must not be" if guard.same_as is None else "must be"
                raise BackendKwargsError(f"Input {names[at]} {wanted} the same tensor as {names[other or 0]}. {AGAIN}")

    def _compare_memory(self, tensors: Sequence[torch.Tensor], args: Args, kwargs: Kwargs) -> None:
        """Raise if memory that the package writes to is also that of another input or of a weight."""
        spans = [addresses_of(tensor) for tensor in tensors]
        for at, guard in enumerate(self._guards.tensors):
            if not guard.written:
                continue
            first, end = spans[at]
            if tensors[at].is_cuda and first % ALIGNMENT:
                name = self._names(args, kwargs)[at]
                raise BackendKwargsError(
                    f"Input {name}, which is written to, must be aligned to {ALIGNMENT} bytes. {AGAIN}"
                )
            others = [(other, span) for other, span in enumerate(spans) if other != at]
            for other, (begin, stop) in (*others, *((None, span) for span in self._weights.spans)):
                if begin < end and first < stop:
                    names = self._names(args, kwargs)
                    shared = "a weight" if other is None else names[other]
                    raise BackendKwargsError(
                        f"Input {names[at]}, which is written to, must not share memory with {shared}. {AGAIN}"
                    )

    def _names(self, args: Args, kwargs: Kwargs) -> list[str]:
        """Return the names of the tensors among the arguments, in the package's order."""
        paths, _ = pytree.tree_flatten_with_path((args, {name: kwargs[name] for name in self._keywords}))
        named = [(spot(path), value) for path, value in paths]
        return [name for name, value in named if isinstance(value, torch.Tensor)]


def first_uses(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return for each tensor the position of the same object before it, None if there is none."""
    first: dict[int, int] = {}
    return [
        None if (earlier := first.setdefault(id(tensor), at)) == at else earlier for at, tensor in enumerate(tensors)
    ]


# ---- weights


def misfit(package: Package, module: torch.nn.Module, device: torch.device) -> str:
    """Return what the package cannot use of the module's weights, "" if it can use all."""
    try:
        own = _ModuleTensors(package.guards.weights, module, device)
    except BackendKwargsError as error:
        return str(error).removesuffix(".")
    for weight, tensor in zip(package.guards.weights, own.tensors, strict=True):
        if weight.sha256 and weight.sha256 != content_hash(tensor):
            return f"the values of {weight.names[0]!r}, which are part of the package's code, have changed"
    return ""


class _ModuleTensors:
    """The module's tensors that a package reads; raise if one is missing, or not as the code assumes."""

    def __init__(self, weights: Sequence[Weight], module: torch.nn.Module, device: torch.device) -> None:
        self.tensors: list[torch.Tensor] = []
        self.tables: list[Mapping[str, object]] = []
        self.names: list[str] = []
        self.values: list[object] = []
        self._noted: set[tuple[int, str]] = set()
        for weight in weights:
            tensors = [self._find(module, name) for name in weight.names]
            if any(tensor is not tensors[0] for tensor in tensors):
                raise BackendKwargsError(f"Weights {' and '.join(map(repr, weight.names))} must be the same tensor.")
            wanted = f"{weight.dtype}{list(weight.shape)} with strides {weight.stride} on {device}"
            if (got := _kind(tensors[0])) != wanted:
                raise BackendKwargsError(f"Weight {weight.names[0]!r} must be {wanted}, got {got}.")
            self.tensors.append(tensors[0])

    def _find(self, module: Any, name: str) -> Any:
        """Return a tensor by its dotted name, and note each place on the way to it."""
        *owners, last = name.split(".")
        for owner in owners:
            module = self._note(children_of(module), owner)
        tables = (parameters_of(module), buffers_of(module), vars(module))
        return self._note(next((table for table in tables if last in table), tables[0]), last)

    def _note(self, table: Mapping[str, Any], name: str) -> Any:
        """Return what a module has under a name, and note it, to be compared at each call."""
        if table.get(name) is None:
            raise BackendKwargsError(f"The module lacks {name!r}, which was compiled.")
        if (id(table), name) not in self._noted:  # weights of one module have its place in common
            self._noted.add((id(table), name))
            self.tables.append(table)
            self.names.append(name)
            self.values.append(table[name])
        return table[name]


def _kind(tensor: torch.Tensor) -> str:
    """Return a tensor's properties as text."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return f"a {type(tensor).__name__} of another kind"
    return f"{tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"


class _Weights:
    """The module's tensors that the package reads: compared at each call, and passed to it again if one was replaced.

    A write to a tensor needs nothing, since the package reads the same memory. Values that are part of the code must
    not be written; torch does not tell of a write through `.data`.
    """

    def __init__(self, weights: Sequence[Weight], module: torch.nn.Module, device: torch.device, loaded: Any) -> None:
        self._weights, self._module, self._device, self._loaded = weights, module, device, loaded
        self._own = _ModuleTensors((), module, device)
        self._same: Any = None
        self._pointers: list[int] = []
        self._baked: list[tuple[int, int, int | None]] | None = None
        self._aliases: list[torch.Tensor] = []
        self.spans: list[tuple[int, int]] = []
        weakref.finalize(self, _release, self._aliases)

    def follow(self) -> None:
        """Pass the package the module's tensors if they are others than before; raise if they are of another kind."""
        if self._unchanged():
            return
        own = _ModuleTensors(self._weights, self._module, self._device)
        baked = self._states(own.tensors)
        if self._baked not in (None, baked):
            raise BackendKwargsError(
                "Weights that are part of the package's code have changed: call deactivate() and activate(), or build "
                "without the option 'freezing'."
            )
        aliases = {
            weight.constant: tensor.detach()
            for weight, tensor in zip(self._weights, own.tensors, strict=True)
            if not weight.sha256
        }
        pointers = [*map(torch.Tensor.data_ptr, own.tensors)]
        if aliases and pointers != self._pointers:
            self._loaded.load_constants(aliases, check_full_update=False, user_managed=True)
            _release(self._aliases)
            self._aliases += aliases.values()
        self.spans = [*map(addresses_of, own.tensors)]
        self._own, self._baked, self._same = own, baked, same_layouts(own.tensors)
        self._pointers = pointers

    def rebind(self, module: torch.nn.Module) -> None:
        """Follow the weights of another module, whose values are the same."""
        self._module, self._same, self._baked = module, None, None
        self.follow()

    def _unchanged(self) -> bool:
        """Return whether the module's tensors are those that the package was given."""
        own = self._own
        try:
            same = self._same and all(map(is_, map(getitem, own.tables, own.names), own.values))
        except KeyError:
            return False
        return (
            same
            and self._same.check(*own.tensors)
            and [*map(torch.Tensor.data_ptr, own.tensors)] == self._pointers
            and (not self._baked or self._baked == self._states(own.tensors))
        )

    def _states(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int | None]]:
        """Return what changes if a tensor is replaced or written whose values are part of the code."""
        return [
            (id(tensor), tensor.data_ptr(), None if tensor.is_inference() else version_of(tensor))
            for weight, tensor in zip(self._weights, tensors, strict=True)
            if weight.sha256
        ]


def _release(aliases: list[torch.Tensor]) -> None:
    """Free the memory of tensors that a package was given: torch never frees the tensors themselves."""
    with torch.inference_mode():  # in which tensors of any kind may change
        for alias in aliases:
            alias.set_()  # type: ignore[call-overload]
    aliases.clear()
