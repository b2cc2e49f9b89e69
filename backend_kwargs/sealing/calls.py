"""Inputs of other sizes, made from the example's, what a call of them gives, and whether that is eager's."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from backend_kwargs.bundles.samples import Sample
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts import Call
from backend_kwargs.graphs.memory import SHARED, Memory, overlapping
from backend_kwargs.graphs.writes import has_memory
from backend_kwargs.sealing.declared import Point, UndeclaredError, shown_point
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.tensors import in_storage, version_of
from backend_kwargs.trial import check_within, copied, cotangents, largest_of, same_bits, tensors_of, walk


def resized(tensor: torch.Tensor, sizes: Mapping[int, int], *, values: bool = True) -> torch.Tensor:
    """Return a tensor like this one with other sizes of some dimensions, its rows repeated or left out.

    Repeated rows are valid wherever the example's are: as tokens, indices and masks. The order of its strides stays.
    Without `values` memory is not filled, except for integers.
    """
    order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride()[dim], dim))
    back = [order.index(dim) for dim in range(tensor.ndim)]
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if values:
            made = tensor.detach()
            for dim, size in sizes.items():
                rows = torch.arange(size, device=tensor.device) % max(tensor.shape[dim], 1)
                made = made.index_select(dim, rows)
            made = made.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
        else:
            shape = [sizes.get(dim, tensor.shape[dim]) for dim in order]
            new = tensor.new_empty if tensor.is_floating_point() else tensor.new_zeros
            made = new(shape).permute(back)
        made = in_storage(made.untyped_storage(), made, 0)
    return made.requires_grad_(tensor.requires_grad)


class Apart:
    """The check that inputs share no memory with `buffers` that are written, and none with each other.

    The latter counts if `inputs` are written. Code is compiled for inputs that are apart, which torch does not guard.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], *, inputs: bool) -> None:
        self._buffers, self._inputs = Memory(buffers), inputs

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise UndeclaredError if they do."""
        tensors = [*{id(each): each for each in tensors_of((args, kwargs)) if has_memory(each)}.values()]
        self._buffers = self._buffers.now()
        if (self._inputs and overlapping(tensors)) or any(each in self._buffers for each in tensors):
            raise UndeclaredError(SHARED)


def apart(call: Callable[[Sample], object], sample: Sample, buffers: Collection[torch.Tensor]) -> Apart | None:
    """Return the check for what `call` runs, None if it writes into no input and no buffer."""
    inputs = [each for each in tensors_of(tuple(sample)) if has_memory(each)]
    held = [*inputs, *(each for each in buffers if has_memory(each))]
    # Version counters tell of what a write leaves as it was, values of `torch._foreach_add_` and writes into `.data`.
    before = [(_version(each), copied(each)) for each in held]
    call(sample)
    changed = [
        version != _version(each) or not same_bits(each, values)
        for each, (version, values) in zip(held, before, strict=True)
    ]
    count = len(inputs)
    written = [each for each, is_changed in zip(held[count:], changed[count:], strict=True) if is_changed]
    return Apart(written, inputs=any(changed[:count])) if any(changed) else None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else version_of(tensor)


class Result(NamedTuple):
    """What a call gives: its output, the gradients of its backward pass by the tensors that get them, and what is left.

    That are the inputs and the buffers as the call leaves them.
    """

    output: Any
    gradients: Mapping[str, torch.Tensor]
    left: Mapping[str, Mapping[str, Any]]


def called(call: Call, sample: Sample) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """Return the output and the gradients of a call, and of its backward pass if it has one; none is accumulated."""
    output = call(*sample.args, **sample.kwargs)
    leaves = [leaf for _, leaf in walk("", output)] if torch.is_grad_enabled() else []
    wanted = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
    if not wanted:
        return output, {}
    targets = [*_leaves(wanted)]
    # Not ones, from which the gradients of a softmax are zero but for rounding.
    gradients = torch.autograd.grad(wanted, targets, cotangents(wanted), allow_unused=True)
    inputs = {id(each): f"of input {at}" for at, each in enumerate(tensors_of(tuple(sample)))}
    named = zip(targets, gradients, strict=True)
    return output, {inputs.get(id(leaf), str(id(leaf))): each for leaf, each in named if each is not None}


def _leaves(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that get gradients in a backward pass, in order."""
    yield from (each for each in outputs if each.is_leaf)
    waiting, seen = [each.grad_fn for each in reversed(outputs)], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [each for each, _ in reversed(node.next_functions)]


TIGHT, LOOSE = 1e-3, 3e-2  # of float32 and float64; of shorter types and under autocast
SHORT = (torch.float16, torch.bfloat16)
LEAST_SHARE = 0.01  # of the largest tensor: a smaller one may be zero but for rounding, as gradients of biases are


class Checks:
    """Compares results of compiled code with eager's; those of functions that draw random numbers differ anyhow."""

    def __init__(self, name: str, run_eager: Callable[[Sample], Result], tol: float | None) -> None:
        self.name, self._run, self._tol = name, run_eager, tol
        self.random: bool | None = None

    def eager(self, make: Callable[[], Sample]) -> Result | None:
        """Return eager's result, None if each run gives another."""
        if self.random is None:
            # Without a seed, which other threads' draws would have too.
            self.random = bool(self.difference(self._run(make()), self._run(make())))
        return None if self.random else self._run(make())

    def compare(self, result: Result, make: Callable[[], Sample], point: Point) -> None:
        """Raise if a result is not eager's."""
        wanted = self.eager(make)
        if wanted is not None and (why := self.difference(result, wanted)):
            raise BackendKwargsError(
                f"{self.name!r} is not sealed: compiled for {shown_point(point)} it gives other results than eager, "
                f"{why}. To seal it anyway, pass a larger `tol`, or check=False."
            )

    def difference(self, result: Result, wanted: Result) -> str:
        """Return what differs, "" if nothing does."""
        mine, theirs = dict(result.gradients), dict(wanted.gradients)
        for key in mine.keys() ^ theirs.keys():  # one that is missing is zero
            one, other = (mine, theirs) if key in theirs else (theirs, mine)
            one[key] = torch.zeros_like(other[key])
        compared = {
            "output": (result.output, wanted.output),
            "gradient": ([*mine.values()], [theirs[key] for key in mine]),
            **{what: (each, wanted.left[what]) for what, each in result.left.items()},
        }
        for what, (one, other) in compared.items():
            if pytree.tree_structure(one) != pytree.tree_structure(other):
                return f"the {what} has another structure"
            least = LEAST_SHARE * largest_of(leaf for _, leaf in walk(what, other)) or 1.0
            accuracy = check_within(one, other, other, self._bound, what=what, by="tol", least=least)
            if not accuracy.passed:
                return accuracy.reason
        return ""

    def _bound(self, leaf: torch.Tensor) -> float:
        short = leaf.dtype in SHORT or torch.is_autocast_enabled(leaf.device.type)
        return self._tol or (LOOSE if short else TIGHT)
