"""Sizes: the functions in torch's expressions of them, which are sympy's and its own, and what is said of them."""

from collections.abc import Callable

import torch
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

# Raises RuntimeError if a condition on sizes does not hold; where they are unknown, torch assumes it.
check: Callable[[bool | torch.SymBool, Callable[[], str]], None] = torch._check
