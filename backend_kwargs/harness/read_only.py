"""The tensors of a model that eager only reads: which of them a candidate has changed, and their values before."""

from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import torch

from backend_kwargs.trial import bits_of, copied, layout_of, memory_of, parts, room_for_copies, same_bits

Model: TypeAlias = Callable[..., Any]  # a module, or another callable that computes on tensors
PIECE = 1 << 18  # elements of a checksum at a time, which stay in a cache


class ReadOnly:
    """The tensors of a model but those `written`, by name: copies, or checksums if copies take too much memory.

    Version counters would not tell: neither a kernel nor `tensor.data` advances them. Tensor subclasses are not
    compared.
    """

    def __init__(self, model: Model, written: Collection[int], device: torch.device) -> None:
        tensors = {name: tensor for name, tensor in _plain(model).items() if id(tensor) not in written}
        self.copied = sum(tensor.nbytes for tensor in tensors.values()) <= room_for_copies(device)
        keep = copied if self.copied else checksum
        self.before = {name: keep(tensor) for name, tensor in tensors.items()}

    @property
    def lost(self) -> str:
        """Return what to add where a value cannot be put back."""
        return "" if self.copied else "; the model is too large to put it back, so later rows may be wrong"

    def forget(self, model: Model) -> None:
        """Put back what eager has changed in `model` with other inputs, and compare it no more."""
        for name in self.put_back(model):
            del self.before[name]

    def put_back(self, model: Model) -> list[str]:
        """Return the names of what has changed in `model`; put the values back, or without copies accept the new ones.

        Otherwise each later candidate would be blamed.
        """
        there = _plain(model)
        same = same_bits if self.copied else lambda now, before: torch.equal(checksum(now), before)
        changed = [name for name in there if name in self.before and not same(there[name], self.before[name])]
        for name in changed:
            now, before = there[name], self.before[name]
            if not self.copied:
                self.before[name] = checksum(now)
            elif (now.dtype, now.shape, now.stride()) == (before.dtype, before.shape, before.stride()):
                memory_of(now).copy_(memory_of(before))
            else:
                now.data = before.clone()
        return changed


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each piece of a tensor, summed with random weights, so that other orders give other sums."""
    pieces = torch.split(bits_of(memory_of(tensor)).flatten(), PIECE)
    drawn = torch.Generator().manual_seed(0)
    weights = torch.randint(2**62, pieces[0].shape, generator=drawn).to(tensor.device)
    return torch.stack([(piece * weights[: piece.numel()]).sum() for piece in pieces])


def _plain(model: Model) -> dict[str, torch.Tensor]:
    """Return the dense tensors of a model by name, those that are no parameter or buffer by path."""
    of_model = ((path, part) for path, part in parts(model) if isinstance(part, torch.Tensor))
    tensors = {path: tensor for path, tensor in of_model if layout_of(tensor) and not tensor.is_quantized}
    named = [*model.named_parameters(), *model.named_buffers()] if isinstance(model, torch.nn.Module) else []
    names = {id(tensor): name for name, tensor in named}
    return {names.get(id(tensor), path): tensor for path, tensor in tensors.items()}
