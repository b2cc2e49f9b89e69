"""Sizes: the functions in torch's expressions of them, which are sympy's and its own, and what is said of them."""

from collections.abc import Callable

import torch
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod


def check(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Raise RuntimeError if a condition on sizes does not hold; where they are unknown, torch takes it for true."""
    torch._check(condition, message)  # type: ignore[no-untyped-call,unused-ignore]
