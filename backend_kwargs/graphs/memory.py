"""Memory that inputs share and compiled code writes, which code that was compiled for separate inputs does not see."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from backend_kwargs.facts import Call
from backend_kwargs.graphs.writes import has_memory, in_eager, written_inputs
from backend_kwargs.torch_internals.dynamo import is_parameter_source, source_of
from backend_kwargs.torch_internals.tensors import may_overlap
from backend_kwargs.trial.served import span_of

SHARED = "inputs share memory that it writes"


def addresses_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses where a strided tensor begins and ends."""
    start, end = span_of(tensor)
    return tensor.data_ptr(), tensor.data_ptr() + (end - start) * tensor.element_size()


class Memory:
    """The memory of tensors, such as a module's: whether another tensor begins in it, at 0.3 µs."""

    def __init__(self, tensors: Collection[torch.Tensor]) -> None:
        self.tensors = tensors
        self._dense = [each for each in tensors if each.layout is torch.strided]
        self._addresses = [*map(torch.Tensor.data_ptr, self._dense)]
        storages = [each.untyped_storage() for each in self._dense]
        spans = sorted({(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages if each.nbytes()})
        self.begins, self.ends = [begin for begin, _ in spans], [end for _, end in spans]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        count = bisect_right(self.begins, at)
        return count > 0 and at < self.ends[count - 1]

    def now(self) -> "Memory":
        """Return the memory that the tensors have now: `.data`, or moving a module, may give them another."""
        return self if [*map(torch.Tensor.data_ptr, self._dense)] == self._addresses else Memory(self.tensors)


def overlapping(tensors: Sequence[torch.Tensor], written: Collection[int] | None = None) -> tuple[int, int] | None:
    """Return the positions of two strided tensors that share memory, if one of them is `written`; None if none do.

    None for `written` means all.
    """
    reaching: list[tuple[int, int]] = []  # the ends and positions of tensors that begin before
    for begin, end, at in sorted((*addresses_of(tensor), at) for at, tensor in enumerate(tensors)):
        if end == begin:
            continue
        reaching = [(other_end, other) for other_end, other in reaching if other_end > begin]
        for _, other in reaching:
            counts = written is None or at in written or other in written
            if counts and may_overlap(tensors[other], tensors[at]):
                return min(at, other), max(at, other)
        reaching.append((end, at))
    return None


class SharedMemory:
    """Whether inputs of dynamo's graph share memory that the graph writes, with each other or with a parameter.

    AOTAutograd compiles for the inputs that it sees, and guards neither that they are apart nor how they overlap.
    """

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        placeholders, written = gm.graph.find_nodes(op="placeholder"), written_inputs(gm, example_inputs)
        self._read: list[int] = []
        self._written: list[int] = []
        owned: list[int] = []
        for at, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
            if has_memory(value):
                inputs = self._written if at in written else self._read
                (owned if is_parameter_source(source_of(node)) else inputs).append(at)
        self._changed = [at for at in owned if at in written]
        self._owned = owned if self._written else self._changed  # those that matter
        self._of_last: tuple[list[int], Memory, Memory] = [], Memory(()), Memory(())

    @property
    def can_occur(self) -> bool:
        """Return whether any call can have such inputs."""
        inputs = len(self._written) + len(self._read)
        return bool((self._written and (inputs > 1 or self._owned)) or (inputs and self._changed))

    def __call__(self, args: Sequence[Any]) -> bool:
        """Return whether a call's inputs do."""
        written, read = [args[at] for at in self._written], [args[at] for at in self._read]
        if self._owned:
            # The memory of the call's parameters, and of those that are written; it may be another module's.
            addresses, owned, changed = self._of_last
            if (now := [args[at].data_ptr() for at in self._owned]) != addresses:
                owned, changed = (Memory([args[at] for at in each]) for each in (self._owned, self._changed))
                self._of_last = now, owned, changed
            if any(each in owned for each in written) or any(each in changed for each in (*written, *read)):
                return True
        return bool(written) and overlapping([*written, *read], range(len(written))) is not None


def unless_shared(shares: SharedMemory, gm: GraphModule, compiled: Call) -> Call:
    """Return a callable of `compiled`, and of dynamo's graph `gm` in eager where inputs share memory."""
    if not shares.can_occur:
        return compiled

    eager = in_eager(gm)

    def call(*args: Any) -> Any:
        return eager(*args) if shares(args) else compiled(*args)

    return call
