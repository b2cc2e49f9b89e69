"""Inputs of other sizes, made from the example's, and what a call of them gives."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from backend_kwargs.bundles.samples import Sample
from backend_kwargs.facts import Call
from backend_kwargs.graphs.memory import SHARED, Memory, overlapping
from backend_kwargs.graphs.writes import has_memory
from backend_kwargs.sealing.declared import UndeclaredError
from backend_kwargs.torch_internals.tensors import in_storage, version_of
from backend_kwargs.trial import copied, cotangents, same_bits, tensors_of, walk


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
