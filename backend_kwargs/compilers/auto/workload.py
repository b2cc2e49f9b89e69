"""What each candidate of a race is called on: the graph's real inputs, or copies of those that a call may change."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from backend_kwargs.compilers.auto.deadline import capped_backward
from backend_kwargs.compilers.graphs import copy_of_graph, exposes_data, has_memory, may_be_written

SEED = 0
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ALIGNMENT = 64  # bytes, of which Inductor asks for 16


def cuda_devices() -> range:
    """Return the CUDA devices where CUDA is in use; to ask more would start it."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]


def _generators() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators[at] for at in cuda_devices())]


def _seed() -> None:
    # Not torch.manual_seed, which also replaces what a user has set for a CUDA that has not started yet.
    for generator in _generators():
        generator.manual_seed(SEED)


def has_drawn() -> bool:
    """Tell whether the last call that was observed drew random numbers, and seed anew."""
    now = [generator.get_state() for generator in _generators()]
    _seed()
    return any(not torch.equal(state, each.get_state()) for state, each in zip(now, _generators(), strict=True))


@dataclass(frozen=True)
class Inputs:
    """A graph's real inputs; `written` are the positions that a call may change, with all that shares their memory."""

    values: Sequence[Any]
    written: frozenset[int]

    @classmethod
    def of(cls, gm: GraphModule, example_inputs: Sequence[Any]) -> "Inputs":
        """Return the inputs of `gm`, found out by one call in eager in which all but parameters are copies."""
        pairs = list(enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)))
        told = {at for at, (node, value) in pairs if has_memory(value) and may_be_written(node)}
        # What dynamo's fakes do not count, such as the statistics of a batch norm, shows in the values.
        others = {
            at
            for at, (node, value) in pairs
            if has_memory(value) and (type(value) is torch.Tensor or exposes_data(node))
        }
        suspects = cls(example_inputs, _with_memory_shared(example_inputs, told | others))
        with torch.no_grad():
            gm(*(given := suspects.fresh()))
        seen = {at for at in suspects.written if not torch.equal(_bits(given[at]), _bits(example_inputs[at]))}
        return cls(example_inputs, _with_memory_shared(example_inputs, told | seen))

    def fresh(self) -> list[Any]:
        """Return inputs that a candidate may be called with: the memory itself where it is only read, else a copy.

        Detached, so that hooks of the user's tensors stay silent and no gradient reaches them.
        """
        copies: dict[int, torch.Tensor] = {}
        return [self._fresh(at, value, copies) for at, value in enumerate(self.values)]

    def _fresh(self, at: int, value: Any, copies: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return value.node.hint  # the size of this very call
        if not isinstance(value, torch.Tensor):
            return value
        if at not in self.written:
            made = value.detach()
        else:
            made = _copied_alone(value) if at in self._apart else _copied(value, copies)
        return made.requires_grad_() if value.requires_grad and torch.is_grad_enabled() else made

    @cached_property
    def _apart(self) -> frozenset[int]:
        """The positions of written inputs that share no memory with another input."""
        by_storage = defaultdict(list)
        for at, value in enumerate(self.values):
            if has_memory(value):
                by_storage[value.untyped_storage()._cdata].append((*_span(value), at))
        alone = set[int]()
        for spans in by_storage.values():
            spans.sort()
            if all(end <= start for (_, end, _), (start, _, _) in pairwise(spans)):
                alone |= {at for _, _, at in spans}
        return frozenset(
            at for at in alone & self.written if not (self.values[at].is_conj() or self.values[at].is_neg())
        )

    @property
    def aliased(self) -> bool:
        """Whether inputs that are written share memory."""
        return len({self.values[at].untyped_storage()._cdata for at in self.written}) < len(self.written)

    @property
    def bytes(self) -> float:
        """The bytes of the inputs, each storage once."""
        return float(sum(self.storages.values()))

    @property
    def storages(self) -> dict[int, int]:
        """The bytes of each storage that inputs lie in."""
        return {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in self.values if has_memory(v)}


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Return floating numbers as integers: so nan equals nan, and float8, which has no comparison, has one."""
    if value.is_complex():
        return _bits(torch.view_as_real(value.detach().resolve_conj()))
    return value.detach().resolve_neg().view(BITS[value.itemsize]) if value.is_floating_point() else value


def _with_memory_shared(values: Sequence[Any], positions: Iterable[int]) -> frozenset[int]:
    """Return `positions` with those of all tensors that share memory with one of them."""
    sharing = defaultdict(set)
    for at, value in enumerate(values):
        if has_memory(value):
            sharing[value.untyped_storage()._cdata].add(at)
    wanted = set(positions)
    return frozenset(at for group in sharing.values() if group & wanted for at in group)


def _span(value: torch.Tensor) -> tuple[int, int]:
    """Return where the memory that `value` reaches begins and ends, in bytes from the beginning of its storage."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    start = int(value.storage_offset())
    return start * value.itemsize, (start + (reach if value.numel() else 0)) * value.itemsize


def _copied_alone(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of the memory that `value` reaches: the cache that it is a view of may be far larger."""
    start, end = (at // value.itemsize for at in _span(value))
    lead = value.data_ptr() % ALIGNMENT // value.itemsize
    memory = value.new_empty(lead + end - start)
    memory[lead:].copy_(value.detach().as_strided((end - start,), (1,), start))
    return value.new_empty(0).set_(memory.untyped_storage(), lead, value.size(), value.stride())


def _copied(value: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return a copy of `value`; views of one tensor become views of one copy, as AOTAutograd expects them."""
    root = value if value._base is None else value._base
    if id(root) not in copies:
        storage = root.untyped_storage().clone()  # type: ignore[no-untyped-call]
        empty = root.detach().new_empty(0)
        copies[id(root)] = empty.set_(storage, root.storage_offset(), root.size(), root.stride())
    return copies[id(root)] if root is value else _same_view(value, copies[id(root)])


def _same_view(value: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return of `whole` what `value` is of its base: also the real part, or the conjugate, of complex numbers."""
    if value.dtype != whole.dtype:
        whole = torch.view_as_real(whole) if whole.is_complex() else whole.view(value.dtype)
    made = whole.as_strided(value.size(), value.stride(), value.storage_offset())
    made = made.conj() if value.is_conj() else made
    return torch._neg_view(made) if value.is_neg() else made


@dataclass(frozen=True)
class Task:
    """What each candidate does: forward, and backward where the graph is differentiated, on inputs of its own."""

    gm: GraphModule
    inputs: Inputs
    training: bool
    begin: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, gm: GraphModule, example_inputs: Sequence[Any], begin: Callable[[], None] = lambda: None) -> "Task":
        """Return the task that the graph's next call is; `begin` is called before each call, as dynamo would."""
        needs = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
        )
        return cls(gm, Inputs.of(gm, example_inputs), needs, begin)

    def copy(self) -> GraphModule:
        """Return the graph for a compiler to take over, with all that makes it as good as dynamo's own."""
        return copy_of_graph(self.gm)

    def caller(self, fn: Callable[..., Any]) -> Callable[[], Any]:
        """Return a call of `fn` on inputs of its own: outputs, and gradients where it trains."""
        given = self.inputs.fresh()
        leaves = [value for value in given if isinstance(value, torch.Tensor) and value.requires_grad]
        # Drawn by the first call: to draw them for each would hold up the device between forward and backward.
        cotangents: list[torch.Tensor] = []
        return lambda: self._call(fn, given, leaves, cotangents)

    def _call(
        self, fn: Callable[..., Any], given: list[Any], leaves: list[torch.Tensor], cotangents: list[torch.Tensor]
    ) -> dict[str, Any]:
        self.begin()
        outputs = fn(*given)
        if not self.training:
            return {"output": outputs}
        ends = [out for out in pytree.tree_leaves(outputs) if isinstance(out, torch.Tensor) and out.requires_grad]
        cotangents += map(_cotangent, ends[len(cotangents) :])
        with capped_backward(ends):
            grads = torch.autograd.grad(ends, leaves, cotangents, allow_unused=True) if ends else ()
        return {"output": outputs, "gradient": list(grads)}

    def observe(self, fn: Callable[..., Any]) -> dict[str, Any]:
        """Return copies of all that one call gives and changes, under one seed."""
        given = self.inputs.fresh()
        leaves = [value for value in given if isinstance(value, torch.Tensor) and value.requires_grad]
        _seed()
        seen = self._call(fn, given, leaves, []) | {"written": [given[at] for at in sorted(self.inputs.written)]}
        with _disable_current_modes():
            return pytree.tree_map(_kept, seen)  # type: ignore[no-any-return]


def _kept(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _cotangent(end: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    if end.numel() <= 1:
        return torch.ones_like(end)
    # A drawn row times a drawn column: a large output costs no large draw on the host, and rows differ, else a batch
    # norm would cancel them. Laid out as the output is: of another layout each backward pass would first make a copy.
    with _disable_current_modes():  # no operator of the graph, so not counted
        row = torch.randn(end.shape[-1], generator=generator).to(end.device)
        column = torch.randn(*end.shape[:-1], 1, generator=generator).to(end.device)
        return torch.mul(row, column, out=torch.empty_like(end))
