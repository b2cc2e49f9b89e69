"""Small functions that give wrong results if floats are simplified as reals, or integers as if they cannot overflow."""

import torch

NAN, INF = float("nan"), float("inf")
X = torch.tensor([NAN, 0.3, 1.7, -0.0, INF, 1e8, -3.5, 1e-40]).repeat(12)
Y = torch.linspace(-1e3, 1e3, 96)
V = torch.tensor([2**31 - 1, -(2**31), 2**31 - 50, -7, 0, 46341], dtype=torch.int32).repeat(16)


def two_sum(a, b):
    """Return the rounding error of a floating-point sum."""
    s = a + b
    bb = s - a
    return (a - (s - bb)) + (b - bb)


# By what they show: a function, its arguments, and what of its CUDA code is the proof.
EXAMPLES = {
    "isfinite": (torch.isfinite, (X,), "CUDART_INF_F"),
    "a nan is not itself": (lambda x: torch.where(x.eq(x), x, 0), (X,), "=="),
    "not less is no greater or equal": (lambda x: ~(x < 1), (X,), "!("),
    "rounding by a magic number": (lambda x: (x + 12582912.0) - 12582912.0, (X,), "+ 0x1.8p+23f"),
    "two_sum": (two_sum, (torch.full((96,), 1e8), torch.full((96,), 3.3)), ") - "),
    "isclose to itself": (lambda x: torch.isclose(x, x), (X,), ""),
    "equal sines": (lambda x: x.sin() == x.sin(), (X,), "sinf"),
    "what cancels": (lambda x: (x + 1) - x, (X,), "+ 0x1p+0f"),
    "int32 overflows": (lambda v: (v + 100) // 7, (V,), "((uint)100)"),
    "int64 overflows": (lambda v: (v.long() * 2**33 + 100) // 7, (V,), "uint64_t"),
    "int8 overflows": (lambda v: (v.to(torch.int8) * 7) > 0, (V,), "((signed char)(*(int *)(&("),
    "an integer is negated": (lambda v: (-v).double(), (V,), "((uint)0) - "),
    "a sum of integers overflows": (lambda v: (v.long() * 2**40).sum(), (V,), "uint64_t"),
    "zero times nan": (lambda x: x * 0.0, (X,), "* 0x0p+0f"),
    "negative zero": (lambda x: (-x) + 0.0, (X,), "+ 0x0p+0f"),
    "zero through nan": (lambda x: 0.0 / x, (X,), " / "),
    "a constant zero": (lambda x: torch.zeros_like(x) * x, (X,), "*/ * x_1_ptr"),
    "float64 through float32": (lambda x: (x.double() * 1.1).float().double(), (X,), "(double)((float)"),
}
