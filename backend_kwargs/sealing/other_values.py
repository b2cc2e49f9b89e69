"""Inputs with values that the example does not have, on which padding is checked too.

A maximum over padded numbers is right for positive ones and wrong for negative ones. Values stay valid where they are
positions: integers of a function that indexes by any are within the example's and the fill. A mask keeps, in each row,
something that is not the fill, since a row of nothing real means nothing. Whole numbers that are neither padded nor a
mask keep their values, since lengths have a largest one. Inputs are changed one at a time, and once more while all
others are changed too, since zeros hide what they are multiplied with.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from backend_kwargs.bundles.samples import is_dense
from backend_kwargs.sealing.calls import SHORT
from backend_kwargs.torch_internals.modes import OPERATORS, OperatorMode, arguments_of
from backend_kwargs.trial.trees import tensors_of

Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
FLOATS = (*SHORT, torch.float32, torch.float64, torch.complex64, torch.complex128)
LARGE = 64
WORDS = ("ind", "offset", "target", "length", "repeats")  # in names of arguments that are positions or sizes


def changes_of(name: str, example: object, fill: float, dims: Sequence[int], *, free: bool) -> Mapping[str, Change]:
    """Return how to change an input's values, by how the new ones differ.

    `dims` are those that are padded with `fill`. Integers are `free` if none is a position; else of those that are all
    the fill no other one is known to be valid.
    """
    if not isinstance(example, torch.Tensor) or not is_dense(example) or not example.numel():
        return {}
    found: dict[str, Change] = {}
    if _is_mask(name, example):
        # For what is real: a value of its own, or 0 for a fill that is not 0, else 1.
        real = example[example != fill]
        other = real.flatten()[0] if real.numel() else example.new_full((), not fill)
        found = {
            "all real": lambda x: torch.where(x == fill, other, x),
            "inverted in part": lambda x: torch.where(_odd(x, dims), torch.where(x == fill, other, fill), x),
        }
    elif example.dtype in FLOATS:
        found = {
            "positive": lambda x: x.abs() + 1,
            "negative": lambda x: -x.abs() - 1,
            "of the other sign": torch.neg,
            "zero in part": lambda x: x.masked_fill(_odd(x, dims), 0),
        }
        if example.dtype not in SHORT and not torch.is_autocast_enabled(example.device.type):
            found |= {"large": lambda x: LARGE * (x.abs() + 1), "large and negative": lambda x: -LARGE * (x.abs() + 1)}
    elif dims and not (example.is_floating_point() or example.is_complex()):
        least, largest = (int(end) for end in example.aminmax())
        least, largest = min(least, int(fill)), max(largest, int(fill))
        if least < largest:
            found = {
                "mirrored": lambda x: least + largest - x,
                "shifted": lambda x: (x - least + 1) % (largest - least + 1) + least,
            }
        if free:
            found |= {"positive": lambda x: x.abs() + 1, "negative": lambda x: -x.abs() - 1}
    return {how: partial(_kept_real, change, fill, dims) for how, change in found.items()}


class Positions(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator takes integers as positions, lengths or sizes; one that is not torch's may."""

    def __init__(self) -> None:
        super().__init__(self.called)
        self.found = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: else dynamo skips what `torch.cond` compiles in eager, also in later calls, which then raise."""
        return True

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """Call an operator that runs graphs, which may index in them."""
        self.found = True
        return func(*args, **kwargs)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """Call an operator."""
        named = dict(zip((each.name for each in arguments_of(func)), args, strict=False)) | dict(kwargs)
        every = func.namespace not in OPERATORS or torch.Tag.data_dependent_output in func.tags
        for name, value in named.items():
            integers = [each for each in tensors_of(value) if not each.is_floating_point() and each.dtype != torch.bool]
            self.found |= bool(integers) and (every or any(word in name for word in WORDS))
        return func(*args, **kwargs)


def _is_mask(name: str, example: torch.Tensor) -> bool:
    """Return whether an input says what is real: a bool, one that is called a mask, or one of zeros and ones."""
    zeros, ones = example == 0, example == 1
    both = bool(zeros.any() and ones.any() and (zeros | ones).all())
    return both or example.dtype == torch.bool or "mask" in name.lower()


def _odd(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Return a mask of every second element along the last of the padded dimensions, the first one not among them."""
    odd = torch.zeros_like(x, dtype=torch.bool)
    if x.ndim:
        odd.transpose(dims[-1] if dims else -1, -1)[..., 1::2] = True
    return odd


def _kept_real(change: Change, fill: float, dims: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """Return changed values; rows that would hold nothing but the fill keep their own."""
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        made = change(x.detach()).to(x.dtype)
        for dim in dims:
            made = torch.where((made == fill).all(dim, keepdim=True), x.detach(), made)
        made = torch.empty_like(x).copy_(made)
    return made.requires_grad_(x.requires_grad)
