"""Functions in forms that LLVM vectorizes: a call to libm for each element would dominate the time."""

import functools
from collections.abc import Sequence

from tvm import tirx
from tvm.tirx import Expr

from backend_kwargs.backends.tvm.opaque import isnan, number

LOG2E, LN2_HIGH, LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4  # Cephes' expf
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# Eigen's rational forms of tanh and erf for float32.
TANH = (
    (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08, 1.48572235717979e-05,
     6.37261928875436e-04, 4.89352455891786e-03),
    (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03),
)  # fmt: skip
ERF = (
    (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
     -2.95459980854025e-03, -1.60960333262415e-02),
    (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02),
)  # fmt: skip


def const(value: float, like: Expr) -> Expr:
    """Return a constant of an expression's dtype."""
    return number(value, str(like.ty.dtype))


def horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Return the polynomial with these coefficients, from the highest power down."""
    first, *others = (const(c, x) for c in coefficients)
    return functools.reduce(lambda total, c: total * x + c, others, first)


def clamped(x: Expr, low: float, high: float) -> Expr:
    """Return x within bounds, any value there for nan. Each argument is used once, since TVM's trees share nothing."""
    return tirx.min(tirx.max(x, const(low, x)), const(high, x))


def unless_nan(x: Expr, value: Expr) -> Expr:
    """Return a value computed from x, nan if x is nan."""
    return tirx.Select(isnan(x), x, value)


def exp(x: Expr) -> Expr:
    """Return e to the x, within 2 ulp for float32."""
    if x.ty.dtype != "float32":
        return tirx.exp(x)
    within = clamped(x, -105.0, 89.0)
    n = tirx.floor(within * const(LOG2E, x) + const(0.5, x))
    r = within - n * const(LN2_HIGH, x) - n * const(LN2_LOW, x)
    small = horner(r, EXP) * r * r + r + const(1.0, r)
    # In two steps, since 2 to the n may be out of float32's range when the product is not.
    half = tirx.floor(n * const(0.5, n))
    return unless_nan(x, small * power_of_two(half) * power_of_two(n - half))


def power_of_two(n: Expr) -> Expr:
    """Return 2 to the n, for whole n in the range of float32's exponents."""
    return tirx.reinterpret("float32", (n.astype("int32") + 127) << 23)


def rational(x: Expr, bound: float, forms: tuple[Sequence[float], Sequence[float]]) -> Expr:
    """Return x times one polynomial of its square over another, with x within bounds, and the result within 1."""
    within = clamped(x, -bound, bound)
    square = within * within
    return unless_nan(x, clamped(within * horner(square, forms[0]) / horner(square, forms[1]), -1.0, 1.0))


def tanh(x: Expr) -> Expr:
    """Return the hyperbolic tangent."""
    return rational(x, 9.0, TANH) if x.ty.dtype == "float32" else tirx.tanh(x)


def erf(x: Expr) -> Expr:
    """Return the error function."""
    return rational(x, 4.0, ERF) if x.ty.dtype == "float32" else tirx.erf(x)
