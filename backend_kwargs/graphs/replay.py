"""What a race calls candidates on: the graph's real inputs, with copies of those that a call may change."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule

from backend_kwargs.graphs.writes import (
    by_memory,
    copy_of_graph,
    has_memory,
    keep_inputs,
    may_be_written,
    name_of_call,
    nodes_of,
    written_memory,
)
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.replacing import undone
from backend_kwargs.torch_internals.tensors import (
    OperatorMode,
    base_of,
    in_storage,
    memory_id,
    modes_restored,
    overloads_of,
    saves_by_hooks,
    with_bits_of,
    without_modes,
)
from backend_kwargs.torch_internals.threads import running_threads
from backend_kwargs.trial import (
    ChangedSlice,
    Changes,
    DrawsError,
    RestoringCall,
    State,
    all_kept,
    copied,
    cotangents,
    generators,
    layout_of,
    may_draw,
    room_for_copies,
    same_bits,
    span_of,
    tensors_of,
)


def run_apart(gm: GraphModule, inputs: Callable[[], Sequence[Any]]) -> tuple[object, bool]:
    """Run `gm` on `inputs()`, called before each try; return its results, and whether its calls may draw.

    One that draws leaves the random generators as they were, which touches all threads: raise DrawsError if another one
    runs. One that does not touches none.
    """
    if not _draws_backward(gm):
        given = inputs()
        # Whatever fails in the mode may draw, and fails again below if it is not for the mode.
        with suppress(Exception), modes_restored(), undone() as stack:
            stack.enter_context(OperatorMode(_without_draws))
            return gm.forward(*given), False
        del given
    if running := running_threads():
        names = ", ".join(map(repr, running))
        raise DrawsError(f"it may draw random numbers, which a race repeats, while another thread runs: {names}")
    given = inputs()
    with all_kept(), modes_restored():
        return gm.forward(*given), True


def _without_draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Run an operator; raise DrawsError before one that may draw."""
    if may_draw(func, args, kwargs):
        raise DrawsError(str(func))
    return func(*args, **kwargs)


def _draws_backward(gm: GraphModule) -> bool:
    """Return whether an autograd function of the user may draw in its backward pass, by the names that it calls."""
    if not any(node.target is torch.ops.higher_order.autograd_function_apply for node in nodes_of(gm)):
        return False
    packets = {getattr(torch.ops.aten, name_of_call(node), None) for node in nodes_of(gm)} - {None}
    return any(torch.Tag.nondeterministic_seeded in each.tags for packet in packets for each in overloads_of(packet))


# ---- calls that are repeated


class ChangedInputError(RuntimeError):
    """A candidate has written to an input that eager only reads."""


def unpacked() -> AbstractContextManager[None]:
    """Disable a user's saved-tensor hooks, which may offload, for what candidates save for the backward pass."""
    return saved_tensors_hooks(lambda saved: saved, lambda saved: saved) if saves_by_hooks() else nullcontext()


@dataclass(frozen=True)
class Inputs:
    """A graph's real inputs; `written` are the positions that a call may change, with all that share their memory.

    `changes` has by position what a call in eager changed: a part, or more than values, such as size or memory. `guard`
    is whether a candidate's first call has copies of the others too. `draws` is whether the graph may draw random
    numbers.
    """

    values: Sequence[Any]
    written: frozenset[int]
    changes: Changes = field(default_factory=Changes)
    guard: bool = True
    draws: bool = False

    @classmethod
    def of(cls, gm: GraphModule, example_inputs: Sequence[Any]) -> "Inputs":
        """Return the inputs of `gm`; one eager call, on copies of all but parameters, shows which are written.

        Raise DrawsError if it may draw random numbers, as another thread may.
        """
        pairs = list(enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)))
        nodes = written_memory(gm.graph)
        declared = {at for at, (node, value) in pairs if has_memory(value) and may_be_written(node, nodes)}
        # An operator may write where its schema says that it does not: compare the values, as far as memory allows.
        others = cls(example_inputs, frozenset(declared)).own
        suspects = cls(example_inputs, _with_memory_shared(example_inputs, declared | others))
        given: list[Any] = []
        layouts: dict[int, object] = {}

        def fresh() -> list[Any]:
            # One that is written is no leaf that requires a gradient, in which a write would be an error.
            given[:] = [each.detach() if at in declared else each for at, each in enumerate(suspects.fresh())]
            layouts.update((at, layout_of(given[at])) for at in suspects.written)
            return given

        _, draws = run_apart(gm, fresh)  # in the caller's grad mode, on which derivatives of torch.func depend
        remade = _with_memory_shared(example_inputs, (at for at, was in layouts.items() if layout_of(given[at]) != was))
        found = ((at, ChangedSlice.of(example_inputs[at], given[at])) for at in suspects.written - remade)
        regions = {at: region for at, region in found if region}
        written = _with_memory_shared(example_inputs, declared | regions.keys() | remade)
        changed = {str(at): (regions.get(at), example_inputs[at]) for at in sorted(remade | regions.keys())}
        return cls(example_inputs, written, Changes(changed), draws=draws)

    def fresh(self, positions: Collection[int] | None = None) -> list[Any]:
        """Return inputs to call a candidate with: copies at `positions`, by default all written, else the tensors.

        They are detached, so that the user's hooks do not run and no gradient reaches the user's tensors.
        """
        copies: dict[int, torch.Tensor] = {}
        positions = self.written if positions is None else positions
        return [self._fresh(at, value, copies if at in positions else None) for at, value in enumerate(self.values)]

    def _fresh(self, at: int, value: object, copies: dict[int, torch.Tensor] | None) -> Any:
        """Return one input to call a candidate with: a copy if there are `copies`, kept by what it is a view of."""
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return value.node.hint  # the size in this call
        if not isinstance(value, torch.Tensor):
            return value
        if copies is None:
            tensor = value.detach()
        else:
            tensor = copied(value) if at in self._apart else _copied_with_views(value, copies)
        return tensor.requires_grad_() if value.requires_grad and torch.is_grad_enabled() else tensor

    @cached_property
    def staged(self) -> list[Any]:
        """Inputs on which all candidates are timed: those written are one set of copies, put back before each call."""
        return self.fresh()

    @cached_property
    def state(self) -> State:
        """What calls change in the staged inputs. More than `LARGEST` bytes of floating-point numbers drift."""
        return self.changes.state_of({at: self.staged[int(at)] for at in self.changes.tensors}, {}, timed=True)

    @cached_property
    def guarded(self) -> frozenset[int]:
        """The positions that are only read, and copied for a candidate's first call, as far as memory allows."""
        if not self.guard:
            return frozenset()
        read = frozenset(at for at, value in enumerate(self.values) if has_memory(value)) - self.written
        return read if self._may_copy(read) else self.own

    @property
    def own(self) -> frozenset[int]:
        """The positions of tensors that are only read and no parameters, none if they are too large to be copied."""
        own = frozenset(at for at, v in enumerate(self.values) if has_memory(v) and type(v) is torch.Tensor)
        return own - self.written if self._may_copy(own - self.written) else frozenset()

    def _may_copy(self, positions: Iterable[int]) -> bool:
        """Return whether copies of these inputs, for a candidate's first call, leave memory for the call itself."""
        on_gpu = (value.device for value in self.values if isinstance(value, torch.Tensor) and value.is_cuda)
        return bool(sum(self.values[at].nbytes for at in positions) <= room_for_copies(next(on_gpu, None)))

    @cached_property
    def _apart(self) -> frozenset[int]:
        """The positions of inputs that share no memory with other inputs."""
        alone = set[int]()
        for group in by_memory(self.values):
            values = (self.values[at] for at in group)
            spans = sorted([each * value.itemsize for each in span_of(value)] for value in values)
            if all(end <= start for (_, end), (start, _) in pairwise(spans)):
                alone |= group
        return frozenset(alone)

    @property
    def aliased(self) -> bool:
        """Whether written inputs share memory."""
        return any(len(self.written & group) > 1 for group in by_memory(self.values))

    @property
    def bytes(self) -> float:
        """The bytes of the inputs, counting each storage once."""
        return float(sum({memory_id(v): v.untyped_storage().nbytes() for v in self.values if has_memory(v)}.values()))


def _with_memory_shared(values: Sequence[object], positions: Iterable[int]) -> frozenset[int]:
    """Return `positions` and those of all tensors that share memory with one of them."""
    wanted = set(positions)
    return frozenset(at for group in by_memory(values) if group & wanted for at in group)


def _copied_with_views(value: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return a copy of `value`; views of one tensor become views of one copy, as AOTAutograd expects."""
    root = value if base_of(value) is None else base_of(value)
    if id(root) not in copies:
        copies[id(root)] = in_storage(root.untyped_storage().clone(), root)
    whole = copies[id(root)]
    if root is value:
        return whole
    if value.dtype != whole.dtype:  # as of the real part of complex numbers
        whole = torch.view_as_real(whole) if whole.is_complex() else whole.view(value.dtype)
    return with_bits_of(value, whole.as_strided(value.size(), value.stride(), value.storage_offset()))


@dataclass(frozen=True)
class Task:
    """What each candidate does: forward, and backward if the graph is differentiated, on inputs of its own.

    `begin` is called before each call, in place of dynamo's.
    """

    gm: GraphModule
    inputs: Inputs
    training: bool
    begin: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, gm: GraphModule, example_inputs: Sequence[object], begin: Callable[[], None] = lambda: None) -> "Task":
        """Return the task of the graph's next call.

        `gm` is the task's own copy. In it, inputs that a call may change are marked.
        """
        needs = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
        )
        inputs = Inputs.of(gm, example_inputs)
        # Frozen code writes to the user's own buffer, whatever it is called on.
        placeholders = gm.graph.find_nodes(op="placeholder")
        keep_inputs(placeholders[at] for at in inputs.written)
        return cls(gm, inputs, needs, begin)

    def generators_kept(self) -> AbstractContextManager[None]:
        """Put the random generators back at the end if the graph may draw, and otherwise leave them alone."""
        return all_kept() if self.inputs.draws else nullcontext()

    def drawn(self) -> list[torch.Tensor]:
        """Return the states of torch's generators after an observed call, none if the graph does not draw."""
        return generators.states() if self.inputs.draws else []

    def has_drawn(self) -> bool:
        """Return whether the last observed call drew random numbers, and seed again."""
        return self.inputs.draws and generators.drawn()

    def copy(self) -> GraphModule:
        """Return a copy of the graph for a compiler, with everything that dynamo attached to it."""
        return copy_of_graph(self.gm)

    def caller(self, fn: Callable[..., object]) -> RestoringCall:
        """Return a call of `fn` from the state of the user's call: outputs, and gradients if it trains."""
        args = self.inputs.staged
        leaves = [value for value in args if isinstance(value, torch.Tensor) and value.requires_grad]
        # Drawn by the first call: drawing them in each call would delay the device between forward and backward.
        given: list[torch.Tensor] = []
        return RestoringCall(lambda: self._call(fn, args, leaves, given), self.inputs.state)

    def _call(
        self, fn: Callable[..., object], args: list[object], leaves: list[torch.Tensor], given: list[torch.Tensor]
    ) -> dict[str, object]:
        """Call `fn`, and run its backward pass from the cotangents `given` if it trains; return its results by name."""
        self.begin()
        outputs = fn(*args)
        if not self.training:
            return {"output": outputs}
        ends = [out for out in tensors_of(outputs) if out.requires_grad]
        given += cotangents(ends[len(given) :])
        grads = torch.autograd.grad(ends, leaves, given, allow_unused=True) if ends else ()
        return {"output": outputs, "gradient": list(grads)}

    def observe(self, fn: Callable[..., object]) -> dict[str, object]:
        """Return copies of everything that one call returns and changes, under one seed if it may draw.

        Raise ChangedInputError if it changes an input that eager only reads; the user's input stays as it is.
        """
        guarded = self.inputs.guarded
        with without_modes():  # what a mode counts are the graph's operators
            args = self.inputs.fresh(self.inputs.written | guarded)
        layouts = {at: layout_of(args[at]) for at in guarded}
        leaves = [value for value in args if isinstance(value, torch.Tensor) and value.requires_grad]
        if self.inputs.draws:
            generators.seed()
        with modes_restored():
            results = self._call(fn, args, leaves, []) | {"written": [args[at] for at in sorted(self.inputs.written)]}
        with without_modes():
            for at in guarded:
                if layout_of(args[at]) != layouts[at] or not same_bits(args[at], self.inputs.values[at]):
                    name = self.gm.graph.find_nodes(op="placeholder")[at].name
                    raise ChangedInputError(f"it changes {name}, an input that eager only reads")
            return pytree.tree_map(detached_copy, results)  # type: ignore[no-any-return]


def detached_copy(leaf: Any) -> Any:
    """Return a copy of what a call has returned; an empty tensor for one whose memory it has freed."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    freed = has_memory(leaf) and leaf.untyped_storage().nbytes() < span_of(leaf)[1] * leaf.itemsize
    return leaf.new_empty(0) if freed else leaf.detach().clone()
