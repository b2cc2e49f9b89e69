"""What a race calls candidates on: the graph's real inputs, with copies of those that a call may change."""

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
from backend_kwargs.compilers.graphs import STAYS_INPUT, copy_of_graph, has_memory, may_be_written, written_memory

SEED = 0
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ALIGNMENT = 64  # bytes; Inductor needs 16


def cuda_devices() -> range:
    """Return the CUDA devices, none before CUDA is initialized; counting them would initialize it."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]


def _generators() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators[at] for at in cuda_devices())]


def _seed() -> None:
    # Not torch.manual_seed, which would replace a seed that the user has set for CUDA before it is initialized.
    for generator in _generators():
        generator.manual_seed(SEED)


def generator_states() -> list[torch.Tensor]:
    """Return the states of torch's generators."""
    return [generator.get_state() for generator in _generators()]


def has_drawn() -> bool:
    """Return whether the last observed call drew random numbers, and seed again."""
    now = generator_states()
    _seed()
    return not all(map(torch.equal, now, generator_states()))


@dataclass(frozen=True)
class Inputs:
    """A graph's real inputs; `written` are the positions that a call may change, with all that share their memory."""

    values: Sequence[Any]
    written: frozenset[int]

    @classmethod
    def of(cls, gm: GraphModule, example_inputs: Sequence[Any]) -> "Inputs":
        """Return the inputs of `gm`; one eager call, on copies of all but parameters, shows which are written."""
        pairs = list(enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)))
        written = written_memory(gm.graph)
        declared = {at for at, (node, value) in pairs if has_memory(value) and may_be_written(node, written)}
        # An operator may write where its schema says that it does not: compare the values.
        others = {at for at, (_, value) in pairs if has_memory(value) and type(value) is torch.Tensor}
        suspects = cls(example_inputs, _with_memory_shared(example_inputs, declared | others))
        with torch.no_grad():
            gm(*(given := suspects.fresh()))
        changed = {at for at in suspects.written if not torch.equal(_bits(given[at]), _bits(example_inputs[at]))}
        return cls(example_inputs, _with_memory_shared(example_inputs, declared | changed))

    def fresh(self) -> list[Any]:
        """Return inputs to call a candidate with: the tensors themselves if they are only read, else copies.

        They are detached, so that the user's hooks do not run and no gradient reaches the user's tensors.
        """
        copies: dict[int, torch.Tensor] = {}
        return [self._fresh(at, value, copies) for at, value in enumerate(self.values)]

    def _fresh(self, at: int, value: Any, copies: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return value.node.hint  # the size in this call
        if not isinstance(value, torch.Tensor):
            return value
        if at not in self.written:
            made = value.detach()
        else:
            made = _copied_alone(value) if at in self._apart else _copied(value, copies)
        return made.requires_grad_() if value.requires_grad and torch.is_grad_enabled() else made

    @cached_property
    def _apart(self) -> frozenset[int]:
        """The positions of written inputs that share no memory with other inputs."""
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
        """Whether written inputs share memory."""
        return len({self.values[at].untyped_storage()._cdata for at in self.written}) < len(self.written)

    @property
    def bytes(self) -> float:
        """The bytes of the inputs, counting each storage once."""
        return float(sum(self.storages.values()))

    @property
    def storages(self) -> dict[int, int]:
        """The bytes of each storage of the inputs, by its address."""
        return {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in self.values if has_memory(v)}


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Return floating-point values as integers, so that nan equals nan, and float8 can be compared at all."""
    if value.is_complex():
        return _bits(torch.view_as_real(value.detach().resolve_conj()))
    return value.detach().resolve_neg().view(BITS[value.itemsize]) if value.is_floating_point() else value


def _with_memory_shared(values: Sequence[Any], positions: Iterable[int]) -> frozenset[int]:
    """Return `positions` and those of all tensors that share memory with one of them."""
    sharing = defaultdict(set)
    for at, value in enumerate(values):
        if has_memory(value):
            sharing[value.untyped_storage()._cdata].add(at)
    wanted = set(positions)
    return frozenset(at for group in sharing.values() if group & wanted for at in group)


def _span(value: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes that `value` covers in its storage."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    start = int(value.storage_offset())
    return start * value.itemsize, (start + (reach if value.numel() else 0)) * value.itemsize


def _copied_alone(value: torch.Tensor) -> torch.Tensor:
    """Return a copy of only the memory that `value` covers: it may be a view of a much larger cache."""
    start, end = (at // value.itemsize for at in _span(value))
    lead = value.data_ptr() % ALIGNMENT // value.itemsize
    memory = value.new_empty(lead + end - start)
    memory[lead:].copy_(value.detach().as_strided((end - start,), (1,), start))
    return value.new_empty(0).set_(memory.untyped_storage(), lead, value.size(), value.stride())


def _copied(value: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return a copy of `value`; views of one tensor become views of one copy, as AOTAutograd expects."""
    root = value if value._base is None else value._base
    if id(root) not in copies:
        storage = root.untyped_storage().clone()  # type: ignore[no-untyped-call]
        empty = root.detach().new_empty(0)
        copies[id(root)] = empty.set_(storage, root.storage_offset(), root.size(), root.stride())
    return copies[id(root)] if root is value else _same_view(value, copies[id(root)])


def _same_view(value: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the view of `whole` that corresponds to `value`, also the real part or conjugate of complex numbers."""
    if value.dtype != whole.dtype:
        whole = torch.view_as_real(whole) if whole.is_complex() else whole.view(value.dtype)
    made = whole.as_strided(value.size(), value.stride(), value.storage_offset())
    made = made.conj() if value.is_conj() else made
    return torch._neg_view(made) if value.is_neg() else made


@dataclass(frozen=True)
class Task:
    """What each candidate does: forward, and backward if the graph is differentiated, on inputs of its own."""

    gm: GraphModule
    inputs: Inputs
    training: bool
    begin: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, gm: GraphModule, example_inputs: Sequence[Any], begin: Callable[[], None] = lambda: None) -> "Task":
        """Return the task of the graph's next call; `begin` is called before each call, in place of dynamo's.

        `gm` is the task's own copy. In it, inputs that a call may change are marked.
        """
        needs = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
        )
        inputs = Inputs.of(gm, example_inputs)
        # Frozen code writes to the user's own buffer, whatever it is called on.
        placeholders = gm.graph.find_nodes(op="placeholder")
        for at in inputs.written:
            placeholders[at].meta[STAYS_INPUT] = True
        return cls(gm, inputs, needs, begin)

    def copy(self) -> GraphModule:
        """Return a copy of the graph for a compiler, with everything that dynamo attached to it."""
        return copy_of_graph(self.gm)

    def caller(self, fn: Callable[..., Any]) -> Callable[[], Any]:
        """Return a call of `fn` on its own inputs: outputs, and gradients if it trains."""
        given = self.inputs.fresh()
        leaves = [value for value in given if isinstance(value, torch.Tensor) and value.requires_grad]
        # Drawn by the first call: drawing them in each call would delay the device between forward and backward.
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
        """Return copies of everything that one call returns and changes, under one seed."""
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
    # An outer product of random vectors: no large draw on the host, and rows differ, since equal rows would cancel in
    # a batch norm. It has the output's strides; otherwise each backward pass would first make a copy.
    with _disable_current_modes():  # not an operator of the graph, so not counted
        row = torch.randn(end.shape[-1], generator=generator).to(end.device)
        column = torch.randn(*end.shape[:-1], 1, generator=generator).to(end.device)
        return torch.mul(row, column, out=torch.empty_like(end))
