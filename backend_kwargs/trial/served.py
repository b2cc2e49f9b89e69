"""What is checked, timed and served: one callable, each call of which starts from the state that the user's call had.

A call may advance a counter, write a row of a cache, or append to a list. Called again on what it left, it would go
past the end of its cache: an error on a CPU, and on a GPU an assert after which every call of the process fails.

A race, `compare`, `tune`, `run`, the benchmark suite and TVM's comparison with eager time nothing else. One eager call
on copies shows what a call changes.
"""

import copy
import sys
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch

from backend_kwargs.errors import error_text
from backend_kwargs.torch_internals.tensors import copy_each, in_storage, memory_id, with_bits_of

# Bytes of floating-point numbers that are put back before each call; more of them drift, as in a user's loop.
# Integers always are, since they may be positions.
LARGEST = 64 << 20
ALIGNMENT = 64  # bytes; Inductor needs 16
PIECE = 1 << 26  # elements compared at a time
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

UNINDEXED = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
UNINDEXED |= {torch.uint16, torch.uint32, torch.uint64}

Parts = Mapping[str, Any]  # tensors, generators, lists and dicts of a tree, by their paths
Container = dict[Any, Any] | list[Any]
T = TypeVar("T")


@dataclass(frozen=True)
class ChangedSlice:
    """The part of a tensor that a call changed: a range in each dimension, and in dimension `dim` only those `at`."""

    ranges: tuple[slice, ...]
    dim: int = 0
    at: torch.Tensor | None = None

    @classmethod
    def of(cls, before: torch.Tensor, after: torch.Tensor) -> "ChangedSlice | None":
        """Return where two tensors of one shape differ, in bits; None if nowhere."""
        if not before.ndim:
            return None if same_bits(before, after) else WHOLE
        touched = [places.nonzero().flatten() for places in _touched(memory_of(before), memory_of(after))]
        if not all(places.numel() for places in touched):
            return None
        ranges = tuple(slice(int(places[0]), int(places[-1]) + 1) for places in touched)
        shares = [places.numel() / (r.stop - r.start) for places, r in zip(touched, ranges, strict=True)]
        dim = min(range(len(shares)), key=shares.__getitem__)
        if shares[dim] > 1 / 2:
            return cls(ranges)
        return cls(ranges, dim, touched[dim] - ranges[dim].start)

    def values(self, of: torch.Tensor) -> torch.Tensor:
        """Return the values of this part of a tensor: a view, or a copy of those at indices."""
        part = memory_of(of)[self.ranges]
        return part if self.at is None else part.index_select(self.dim, self.at)

    def drifts(self, of: torch.Tensor) -> bool:
        """Return whether this part is too large to be put back before each call, and holds no positions."""
        return of.is_floating_point() and self.values(of).nbytes > LARGEST


WHOLE = ChangedSlice(())


def bits_of(value: torch.Tensor) -> torch.Tensor:
    """Return floating-point values as integers, so that nan equals nan, and float8 can be compared at all."""
    if value.is_complex():
        return bits_of(torch.view_as_real(value.detach().resolve_conj()))
    return value.detach().resolve_neg().view(BITS[value.itemsize]) if value.is_floating_point() else value


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and, if their memory can be read, the same bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return not (layout_of(a) and layout_of(b)) or torch.equal(bits_of(a), bits_of(b))


def span_of(value: torch.Tensor) -> tuple[int, int]:
    """Return the range of elements of its storage that a tensor covers."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    start = int(value.storage_offset())
    return start, start + (reach if value.numel() else 0)


def memory_of(value: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as it can be written: no lazy conjugate or negative, no element twice.

    Numbers that torch cannot index, such as float8, are there as integers.
    """
    value = value.detach()
    value = value.view(BITS[value.itemsize]) if value.dtype in UNINDEXED else value
    value = with_bits_of(value, value)
    reach = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride < reach:
            start, end = span_of(value)
            return value.as_strided((end - start,), (1,), start)
        reach += stride * (size - 1)
    return value


def copied(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of the memory that `value` covers, which may be a view of a much larger cache, in its layout.

    `clone()` would give an expanded or sliced tensor other strides.
    """
    if not layout_of(value) or value.is_quantized or value.is_nested:
        return value.detach().clone()
    raw = with_bits_of(value, value.detach())
    start, end = span_of(raw)
    lead = raw.data_ptr() % ALIGNMENT // raw.itemsize
    memory = raw.new_empty(lead + end - start)
    memory[lead:].copy_(raw.as_strided((end - start,), (1,), start))
    return in_storage(memory.untyped_storage(), value, lead)


def _touched(before: torch.Tensor, after: torch.Tensor) -> list[torch.Tensor]:
    """Return, for each dimension, the places at which two tensors differ."""
    touched = [torch.zeros(size, dtype=torch.bool, device=before.device) for size in before.shape]
    rows = max(PIECE * before.shape[0] // max(before.numel(), 1), 1)
    for start in range(0, before.shape[0], rows):
        old, new = (bits_of(side[start : start + rows]) for side in (before, after))
        differs = (old != new).any(-1) if before.is_complex() else old != new
        for dim, places in enumerate(touched):
            others = [each for each in range(before.ndim) if each != dim]
            found = differs.any(others) if others else differs
            (places if dim else places[start : start + rows]).logical_or_(found)
    return touched


@dataclass
class State:
    """What calls change, and how it is put back before each of them."""

    _whole: tuple[list[torch.Tensor], list[torch.Tensor]] = field(default_factory=lambda: ([], []))
    _indexed: list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _others: list[Callable[[], object]] = field(default_factory=list)

    def add(self, tensor: torch.Tensor, before: torch.Tensor, region: ChangedSlice = WHOLE) -> None:
        """Put the region of `tensor` back to what it is in `before`, which may have another dtype."""
        before = before if before.dtype == tensor.dtype else before.to(tensor.dtype)
        part, values = memory_of(tensor)[region.ranges], region.values(before)
        if region.at is None:
            for side, each in zip(self._whole, (part, values), strict=True):
                side.append(each)
        else:
            self._indexed.append((part, region.dim, region.at, values))

    def add_action(self, action: Callable[[], object]) -> None:
        """Put something else back by `action`."""
        self._others.append(action)

    def __bool__(self) -> bool:
        """Return whether calls change anything."""
        return bool(self._whole[0] or self._indexed or self._others)

    def restore(self) -> None:
        """Put everything back; on a GPU this is queued, like the call."""
        for action in self._others:
            action()
        with torch.no_grad():
            if self._whole[0]:
                copy_each(*self._whole)
            for part, dim, at, values in self._indexed:
                part.index_copy_(dim, at, values)


@dataclass(frozen=True)
class RestoringCall:
    """A call as its user makes it, from the state that the user's call had."""

    call: Callable[[], object]
    state: State = field(default_factory=State)

    def __call__(self) -> object:
        """Put the state back, and call."""
        self.state.restore()
        return self.call()


class _Before:
    """The parts of a tree before calls of a copy of it change that copy's."""

    def __init__(self, tree: Parts, there: Parts) -> None:
        tensors = {path: part for path, part in there.items() if isinstance(part, torch.Tensor) and path in tree}
        # What a function holds is not copied with it, and parameters are not written there.
        shared = {path for path, part in tensors.items() if part is tree[path] and type(part) is torch.Tensor}
        self.tensors = {path: copied(part) if path in shared else tree[path] for path, part in tensors.items()}
        self.layouts = {path: layout_of(part) for path, part in tensors.items()}
        self.contents = {path: copy.copy(part) for path, part in there.items() if isinstance(part, dict | list)}
        self.drawn = {path: part.get_state() for path, part in there.items() if isinstance(part, torch.Generator)}

    def changes(self, there: Parts) -> "Changes":
        """Return what a call has changed."""
        tensors: dict[str, tuple[ChangedSlice | None, torch.Tensor]] = {}
        for path, layout in self.layouts.items():
            old, new = self.tensors[path], there[path]
            region = ChangedSlice.of(old, new) if layout and layout == layout_of(new) else None
            if region or layout != layout_of(new):
                tensors[path] = region, copied(old)
        drawn = {path: old for path, old in self.drawn.items() if not torch.equal(old, there[path].get_state())}
        return Changes(
            tensors, drawn, frozenset(path for path, old in self.contents.items() if _changed(there[path], old))
        )

    def added(self, there: Parts) -> dict[str, dict[Hashable, object]]:
        """Return what a call has added to dicts."""
        dicts = ((path, old) for path, old in self.contents.items() if isinstance(old, dict))
        added = ((path, {key: value for key, value in there[path].items() if key not in old}) for path, old in dicts)
        return {path: new for path, new in added if new}


class CopyError(Exception):
    """A model or its inputs cannot be copied; the message says why."""


@dataclass(frozen=True)
class Changes:
    """What one call changes in a tree of modules, objects and tensors, with the values before, by path.

    `tensors` are changed in place, in a region; those without one are given other memory, or free theirs. `added` has
    the keys that calls add to dicts, and change.
    """

    tensors: dict[str, tuple[ChangedSlice | None, torch.Tensor]] = field(default_factory=dict)
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    containers: frozenset[str] = frozenset()
    added: Mapping[str, frozenset[Hashable]] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Callable[[T], object], tree: T) -> "Changes":
        """Return what `call` changes in a copy of `tree`; raise CopyError if it cannot be copied.

        It is called twice: what the first call adds to a dict or an object is part of the state if the second changes
        it, and otherwise what it computes only once, which stays.
        """
        try:
            worked = copy.deepcopy(tree)
        except Exception as error:
            raise CopyError(error_text(error)) from error
        there = dict(parts(worked))
        before = _Before(dict(parts(tree)), there)
        call(worked)
        found, added = before.changes(there), before.added(there)
        state = found.state_of(there, {path: before.contents[path] for path in found.containers}, timed=False)
        if added:
            state.restore()
            call(worked)
            keys = {
                path: frozenset(key for key, value in new.items() if _differ(there[path].get(key), value))
                for path, new in added.items()
            }
            found = replace(found, added={path: moved for path, moved in keys.items() if moved})
        state.restore()  # of what a function holds, which is not copied with it
        return found

    @classmethod
    def of_calls(cls, call: Callable[..., object], args: object, kwargs: object) -> State:
        """Return what timed calls with these arguments change; raise what the first one, in eager and apart, raises."""
        tree: Any = (call, args, kwargs)
        return cls.of(lambda own: own[0](*own[1], **own[2]), tree).on(tree, timed=True)

    def on(self, tree: object, *, timed: bool = False) -> State:
        """Return the state of `tree`, a copy of the original in which nothing has changed yet, as in `state_of`."""
        there = dict(parts(tree))
        contents = {path: copy.copy(there[path]) for path in self.containers | self.added.keys() if path in there}
        return self.state_of(there, contents, timed=timed)

    def state_of(self, there: Parts, contents: dict[str, Container], *, timed: bool) -> State:
        """Return what puts the tree whose parts are `there` back; lists and dicts to these `contents`.

        If it is `timed`, large regions of floating-point numbers drift, and other rows than a call wrote stay.
        """
        state = State()
        for path, content in contents.items():
            state.add_action(partial(_put_back, there[path], content, self.added.get(path, frozenset())))
        for path, (region, before) in self.tensors.items():
            tensor = there.get(path)
            if not isinstance(tensor, torch.Tensor):
                continue
            if region is None:
                # A call replaces, frees or resizes it: it gets memory of its own.
                state.add_action(lambda it=tensor, was=before: setattr(it, "data", copied(was)))  # type: ignore[misc]
            elif not (timed and region.drifts(before)):
                state.add(tensor, before, region if timed else WHOLE)
        for path, drawn in self.generators.items():
            if isinstance(there.get(path), torch.Generator):
                state.add_action(partial(there[path].set_state, drawn))
        return state


def parts(tree: object, path: str = "", seen: dict[int, object] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, generators, lists and dicts of a tree with their paths, each once.

    The attributes of modules and other objects are dicts. What a function or a bound method holds is part of it, and
    so are globals that a function names.
    """
    seen = {} if seen is None else seen
    if id(tree) in seen:
        return
    seen[id(tree)] = tree  # kept, so that its number is not used again
    if isinstance(tree, torch.Tensor | torch.Generator):
        yield path, tree
        return
    if isinstance(tree, dict | list):
        yield path, tree
    for key, part in _parts_of(tree):
        yield from parts(part, path if key is None else f"{path}[{key!r}]", seen)


def _parts_of(value: object) -> list[tuple[object, object]]:
    """Return the parts of a value by texts or positions, since other keys differ in each copy; by None its only one."""
    if isinstance(value, dict):
        return [(key if isinstance(key, str) else at, part) for at, (key, part) in enumerate(value.items())]
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    if isinstance(value, MethodType):
        return [(None, value.__self__)]
    if isinstance(value, partial):
        return list(enumerate((value.func, value.args, value.keywords)))
    if isinstance(value, FunctionType):
        cells = enumerate(cell.cell_contents for cell in value.__closure__ or () if cell != CellType())
        return [*cells, *_globals_of(value)]
    root = type(value).__module__.partition(".")[0]
    own = isinstance(value, torch.nn.Module) or (root != "torch" and root not in sys.stdlib_module_names)
    return [(None, vars(value))] if own and hasattr(value, "__dict__") else []


def _globals_of(function: FunctionType) -> Iterator[tuple[object, object]]:
    """Yield the tensors, modules and containers that a function names, and objects and functions of its own file."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        beside = getattr(value, "__module__", None) == function.__module__
        if beside or isinstance(value, torch.Tensor | torch.Generator | torch.nn.Module | dict | list):
            yield name, value


def layout_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's memory and how it lies there; () for one that is not plain."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
        return ()
    return memory_id(tensor), tensor.untyped_storage().nbytes(), tensor.size(), tensor.stride(), tensor.storage_offset()


def _changed(now: Container, before: Container) -> list[Any]:
    """Return the keys from before whose values are others."""
    if isinstance(before, list):
        changed = len(now) != len(before) or any(map(_differ, now, before))
        return [slice(None)] if changed else []
    return [key for key, value in before.items() if key not in now or _differ(now[key], value)]


def _differ(a: object, b: object) -> bool:
    """Return whether two values are others: by identity, plain ones by value."""
    plain = type(a) is type(b) and isinstance(a, int | float | str)
    return a is not b and not (plain and a == b)


def _put_back(container: Container, before: Container, added: Collection[Any]) -> None:
    """Give a container its items from before, without the keys that calls `added`."""
    for key in _changed(container, before):
        container[key] = before[key]
    for key in added:
        container.pop(key, None)  # type: ignore[call-arg]
