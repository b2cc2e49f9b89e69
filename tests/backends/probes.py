"""Calls of ATen operators on numbers that random samples lack, and the comparison of their results with eager's.

Tails, subnormals, zeros of both signs, infinities, nan, halves, and integers near the ends of their type.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
INF, NAN = math.inf, math.nan
MAGNITUDES = (
    0.0,
    0.25,
    0.5,
    0.75,
    1 - 2**-12,
    1,
    1 + 2**-12,
    1.5,
    2,
    2.5,
    3,
    3.5,
    5,
    7.5,
    8,
    10,
    12,
    14,
    16.6,
    17,
    20,
    21,
)
SMALL = (
    0.1,
    1e-2,
    1e-3,
    1e-4,
    1e-5,
    1e-6,
    1e-7,
    1e-8,
    1e-10,
    1e-12,
    1e-16,
    1e-20,
    1e-25,
    1e-30,
    1.2e-38,
    1e-40,
    1.4e-45,
)
LARGE = (
    30,
    40,
    50,
    87,
    88.5,
    90,
    100,
    103,
    104,
    127,
    150,
    255,
    1e3,
    65504,
    2**23 - 0.5,
    2**24,
    2**31,
    1e10,
    1e20,
    3e38,
)
DOUBLE = (1e-300, 5e-324, 700, 709.5, 745, 2**53, 1e160, 1e300)
PAIRED = (0.0, 0.5, 1, 1.5, 2, 3, 7, 1e-3, 1e-8, 1e-30, 1e-40, 20, 1e4, 1e20, 3e38, INF)
INTEGERS = (0, 1, 2, 3, 5, 7, 8, 10, 31, 100, 126, 127, 255, 2**15 - 1, 2**24 + 1, 2**31 - 1, 2**53 + 1, 2**63 - 1)
SCALARS = (0, 1, 2, -2, 3, 0.5, -0.5, -2.5, 1e-12, 1e20)


@dataclass(frozen=True)
class Values:
    """Tensors of one dtype: `x` and the pairs `a`, `b` have every probe, `plain()` and `special()` have a shape."""

    dtype: torch.dtype

    @property
    def floats(self) -> bool:
        return self.dtype.is_floating_point

    def _kept(self, values: list[float]) -> list[Any]:
        if self.dtype == torch.bool:
            return [False, True]
        if self.floats:
            return values
        ends = torch.iinfo(self.dtype)
        return [value for value in values if ends.min <= value <= ends.max]

    def _signed(self, magnitudes: tuple[float, ...], *others: float) -> list[Any]:
        both = [value for each in magnitudes for value in ((each, -each) if self.floats or each else (each,))]
        return self._kept([*both, *others])

    def _tensor(self, values: list[Any]) -> torch.Tensor:
        # In float64 first: a direct conversion would flush nothing, but would refuse what overflows.
        return torch.tensor(values, dtype=torch.float64 if self.floats else self.dtype).to(self.dtype)

    @cached_property
    def single(self) -> list[Any]:
        if not self.floats:
            return self._signed(INTEGERS, *([torch.iinfo(self.dtype).min] if self.dtype != torch.bool else []))
        doubles = DOUBLE if self.dtype == torch.float64 else ()
        return self._signed((*MAGNITUDES, *SMALL, *LARGE, *doubles, INF), NAN)

    @property
    def x(self) -> torch.Tensor:
        """Every probe, at two places: vectorized loops have other code for their last elements."""
        once = self._tensor(self.single)
        return torch.cat([once, once.flip(0), once[:3]])

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        each = self._tensor(self._signed(PAIRED, NAN) if self.floats else self.single)
        return each.repeat_interleave(len(each)), each.repeat(len(each))

    def quotients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs of which a vectorized remainder is right in eager: it fails where a quotient is large."""
        a, b = self.pair()
        if not self.floats:
            return a, b
        large = ((a.double() / b.double()).abs() > 1e5) & a.isfinite() & (b != 0)
        return a[~large], b[~large]

    def plain(self, *shape: int) -> torch.Tensor:
        """Halves and small integers, of which sums and products are exact."""
        numbers = torch.arange(math.prod(shape)) * 7 % 13 - 6
        if self.dtype == torch.bool:
            return (numbers > 0).reshape(shape)
        if self.dtype == torch.uint8:
            numbers = numbers.abs()
        return (numbers / 2 if self.floats else numbers).to(self.dtype).reshape(shape)

    def special(self, *shape: int) -> torch.Tensor:
        """Like `plain`, with some special numbers, each in a row of its own if there are enough rows."""
        made, width = self.plain(*shape), shape[-1]
        flat = made.flatten()
        if self.floats:
            numbers = (NAN, INF, -INF, -0.0, 1e-40, -2e4)
        elif self.dtype == torch.bool:
            return made
        else:
            numbers = (torch.iinfo(self.dtype).max, torch.iinfo(self.dtype).min)
        for i, number in enumerate(numbers):
            at = (i + 1) * width + i % width
            if at < len(flat):
                flat[at] = number
        if self.floats and len(flat) > 9 * width:
            flat[7 * width : 8 * width] = -INF
            flat[8 * width : 9 * width] = NAN
        return flat.reshape(shape)

    def positive(self, *shape: int) -> torch.Tensor:
        return self.plain(*shape).abs() + 1


Args = tuple[Any, ...]
Probes = Callable[[Values], list[Args]]


def both(*shape: int, rest: tuple[Args, ...] = ((),)) -> Probes:
    """Return probes of a first tensor of a shape, plain and special, with each of the other arguments."""
    return lambda v: [(make(*shape), *more) for more in rest for make in (v.plain, v.special)]


def kwargs(**given: Any) -> dict[str, Any]:
    return given


def scalars(v: Values) -> list[Any]:
    if v.dtype == torch.bool:
        return [True, False]
    whole = [s for s in SCALARS if float(s).is_integer() and abs(s) < 100]
    return [*SCALARS, NAN, INF, -INF] if v.floats else whole


def of_schema(op: Any, v: Values) -> list[Args] | None:
    """Return probes for an operator whose required arguments are one or two tensors, or a tensor and a number."""
    required = [str(a.type) for a in op._schema.arguments if not a.has_default_value() and not a.kwarg_only]
    return {
        ("Tensor",): lambda: [(v.x,), (v.plain(5),)],
        ("Tensor", "Tensor"): lambda: [v.pair(), (v.plain(3, 1), v.plain(4))],
        ("Tensor", "number"): lambda: [(v.x, s) for s in scalars(v)],
        ("number", "Tensor"): lambda: [(s, v.x) for s in scalars(v)],
    }.get(tuple(required), lambda: None)()


IMAGE, MATRIX, CUBE = (2, 3, 6, 6), (12, 5), (2, 3, 4, 6, 6)
REDUCED = tuple((dims, keep) for dims in ([0], [1], [-1], [0, 1]) for keep in (False, True))
ONE_DIM = tuple((dim, keep) for dim in (0, 1) for keep in (False, True))
LOSSY = torch.tensor([1e8, 1.0, -1e8, 1e-8, 3.0, -3.0])


def large_mean(v: Values) -> torch.Tensor:
    return (torch.arange(40, dtype=torch.float64).reshape(2, 20) % 7 + 1e4).to(v.dtype)


def pooled(*shape: int) -> Probes:
    lead = len(shape) - 2
    options = (([2] * lead,), ([3] * lead, [2] * lead, [1] * lead), ([2] * lead, [2] * lead, [0] * lead, True))
    return both(*shape, rest=options)


def max_pooled(*shape: int) -> Probes:
    lead = len(shape) - 2
    one, two = [1] * lead, [2] * lead
    options = ((two,), ([3] * lead, two, one), (two, two, one, two), (two, two, [0] * lead, one, True))
    probed = both(*shape, rest=options)
    return lambda v: [*probed(v), *((torch.full_like(v.plain(*shape), -INF), *more) for more in options if v.floats)]


def interpolated(*sizes: int, also: tuple[Any, ...] = (True, False)) -> Probes:
    shape = (1, 2, *(4,) * len(sizes))
    return lambda v: [(make(*shape), list(sizes), align) for align in also for make in (v.plain, v.special)]


def padded(rank: int) -> Probes:
    return both(2, *(4,) * rank, rest=(([1, 2] * rank,), ([0, 1] * rank,)))


def products(v: Values, x: tuple[int, ...], y: tuple[int, ...], *before: tuple[int, ...]) -> list[Args]:
    first = [v.plain(*shape) for shape in before]
    return [
        (*first, v.plain(*x), v.plain(*y)),
        (*first, v.special(*x), v.plain(*y)),
        (*first, v.plain(*x), v.special(*y)),
    ]


def convolutions(v: Values) -> list[Args]:
    x, w, bias = v.special(2, 4, 6, 6), v.plain(4, 4, 3, 3), v.plain(4)
    grouped = v.plain(4, 2, 3, 3)
    return [
        (v.plain(2, 4, 6, 6), w, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        (x, w, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
        (x, grouped, bias, [1, 1], [1, 1], [2, 2], False, [0, 0], 2),
        (x, w, bias, [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
        (v.plain(2, 4, 6), v.plain(4, 4, 3), bias, [1], [1], [1], False, [0], 1),
    ]


def normed(v: Values) -> list[Args]:
    x = v.plain(2, 4, 6)
    wide = (x.double() + 1e4).to(v.dtype) if v.floats else x
    return [(each, [6], v.plain(6), v.plain(6), 1e-5) for each in (x, wide, v.special(2, 4, 6), torch.zeros_like(x))]


def batch_normed(v: Values) -> list[Args]:
    stats = (v.plain(4), v.plain(4), v.plain(4), v.positive(4))
    return [(make(2, 4, 6), *stats, 0.1, 1e-5) for make in (v.plain, v.special)]


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def converted(v: Values) -> list[Args]:
    kinds = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16)
    more = (torch.uint8, torch.int8, torch.int16)

    # A number out of an integer's range becomes what the processor makes of it, in eager too.
    def fits(kind: torch.dtype) -> torch.Tensor:
        if not v.floats or kind.is_floating_point or kind == torch.bool:
            return v.x
        ends = torch.iinfo(kind)
        wide = v.x.double()
        return v.x[(wide > float(ends.min) - 1) & (wide < ends.max * (1 - 2**-20))]

    return [(fits(kind), kwargs(dtype=kind)) for kind in (*kinds, *more)]


def divided(v: Values) -> list[Args]:
    return [(v.x[(v.x.double() / s).abs() < 1e5] if v.floats else v.x, s) for s in scalars(v) if s]


def windows(v: Values) -> list[Args]:
    return [(make(2, 4, 6, 6), [3, 3]) for make in (v.plain, v.special)]


def scattered(*more: Any, source: bool = True) -> Probes:
    index = indices(0, 2, 1, 0, 2, 2, 1, 1, 0, 2).reshape(2, 5)

    def made(v: Values) -> list[Args]:
        value = v.plain(2, 5) if source else (True if v.dtype == torch.bool else 3)
        return [(make(3, 5), 0, index, value, *more) for make in (v.plain, v.special)]

    return made


def clamps(v: Values) -> list[Args]:
    bounds = [(-1.5, 2.5), (None, 0.0), (0.0, None), (3, -3), (NAN, 1), (-INF, INF)]
    whole = [(-1, 2), (None, 0), (1, None), (3, -3)]
    return [(v.x, *each) for each in (bounds if v.floats else whole)]


def clamp_tensors(v: Values) -> list[Args]:
    a, b = v.pair()
    return [(a, b, b.flip(0)), (a, None, b), (a, b, None)]


def three(v: Values) -> list[Args]:
    a, b = v.pair()
    return [(a, b, b.flip(0)), (v.plain(12), v.plain(12), v.positive(12))]


def lerped(v: Values) -> list[Args]:
    a, b = v.pair()
    return [(a, b, w) for w in (0.0, 0.25, 0.5, 0.75, 1.0, -1.0)]


def shifts(v: Values) -> list[Args]:
    x = v.x
    return [(x, s) for s in (0, 1, 3)] if not v.floats else []


def masks(v: Values, value: Callable[[Values], Any]) -> list[Args]:
    return [(v.x, torch.arange(len(v.x)) % 3 == 0, value(v))]


def one(v: Values) -> Any:
    return True if v.dtype == torch.bool else 1


def grids(v: Values) -> list[Args]:
    grid = (v.plain(1, 3, 3, 2) / 4).to(v.dtype) if v.floats else v.plain(1, 3, 3, 2)
    return [
        (v.plain(1, 2, 4, 4), grid, mode, pad, align) for mode in (0, 1) for pad in (0, 1) for align in (False, True)
    ]


def softmaxed(v: Values) -> list[Args]:
    rows = torch.tensor([[0.0, -20, -90, -104], [100, 90, 1e4, -1e4], [INF, 1, 2, 3], [-INF, 0, 1, -INF]])
    others = torch.tensor([[-INF] * 4, [NAN, 0, 1, 2], [3e38, -3e38, 3e38, 0], [1e-40, -1e-40, 0, 0]])
    x = torch.cat([rows, others]).to(v.dtype)
    return [(x, dim, False) for dim in (1, 0)]


def reduced_numbers(v: Values, *more: Any) -> list[Args]:
    """Return rows with special numbers, sums that cancel, and magnitudes of which squares overflow or vanish."""
    return [(v.plain(*MATRIX), *more), (v.special(*MATRIX), *more)]


def pick(*names: str, probes: Probes) -> dict[str, Probes]:
    return dict.fromkeys(names, probes)


PROBES: dict[str, Probes] = {
    **pick("_to_copy", probes=converted),
    **pick("all.dim", "any.dim", "prod.dim_int", probes=both(*MATRIX, rest=ONE_DIM)),
    **pick(
        "argmax",
        "argmin",
        probes=lambda v: [(make(*MATRIX), *rest) for rest in ((), (0,), (1, True)) for make in (v.plain, v.special)],
    ),
    **pick("max.dim", "min.dim", probes=both(*MATRIX, rest=ONE_DIM)),
    **pick(
        "all.dims",
        "any.dims",
        "amax",
        "amin",
        "sum.dim_IntList",
        "mean.dim",
        "logsumexp",
        probes=both(*MATRIX, rest=REDUCED),
    ),
    **pick(
        "all.default",
        "any.default",
        "sum.default",
        "prod.default",
        "mean.default",
        "max.default",
        "min.default",
        probes=lambda v: [(v.plain(12),), (v.special(12),), (v.special(12)[1:3],), (v.x,)],
    ),
    **pick(
        "var.correction",
        "var_mean.correction",
        "std.correction",
        probes=lambda v: [
            (x, [1], kwargs(correction=c))
            for x in (v.plain(*MATRIX), v.special(*MATRIX), large_mean(v))
            for c in (0, 1, 2)
        ],
    ),
    **pick(
        "linalg_vector_norm",
        probes=lambda v: [
            (make(*MATRIX), order, [1]) for order in (2, 1, 0, INF, -INF, 3, 0.5) for make in (v.plain, v.special)
        ],
    ),
    **pick("_softmax", "_log_softmax", probes=softmaxed),
    **pick("cumsum", "logcumsumexp", probes=both(*MATRIX, rest=((0,), (1,)))),
    **pick(
        "sort.default", probes=lambda v: [(v.special(*MATRIX), dim, down) for dim in (0, 1) for down in (False, True)]
    ),
    **pick("avg_pool2d", probes=pooled(*IMAGE)),
    **pick("avg_pool3d", probes=pooled(*CUBE)),
    **pick("max_pool2d_with_indices", probes=max_pooled(*IMAGE)),
    **pick("max_pool3d_with_indices", probes=max_pooled(*CUBE)),
    **pick("_adaptive_avg_pool2d", "adaptive_max_pool2d", probes=both(*IMAGE, rest=(([2, 3],), ([4, 5],)))),
    **pick("_adaptive_avg_pool3d", "adaptive_max_pool3d", probes=both(*CUBE, rest=(([2, 3, 3],), ([3, 4, 5],)))),
    **pick(
        "avg_pool2d_backward",
        probes=lambda v: [(v.special(2, 3, 3, 3), v.plain(*IMAGE), [2, 2], [2, 2], [0, 0], False, True, None)],
    ),
    **pick(
        "avg_pool3d_backward",
        probes=lambda v: [(v.special(2, 3, 2, 3, 3), v.plain(*CUBE), [2] * 3, [2] * 3, [0] * 3, False, True, None)],
    ),
    **pick(
        "max_pool2d_with_indices_backward",
        probes=lambda v: [
            (
                v.special(2, 3, 3, 3),
                v.plain(*IMAGE),
                [2, 2],
                [2, 2],
                [0, 0],
                [1, 1],
                False,
                aten.max_pool2d_with_indices(torch.arange(216.0).reshape(IMAGE), [2, 2])[1],
            )
        ],
    ),
    **pick(
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
        probes=interpolated(7, 9),
    ),
    **pick("upsample_linear1d", probes=interpolated(7)),
    **pick("upsample_trilinear3d", probes=interpolated(5, 7, 3)),
    **pick("reflection_pad1d", "replication_pad1d", probes=padded(1)),
    **pick("reflection_pad2d", "replication_pad2d", probes=padded(2)),
    **pick("reflection_pad3d", "replication_pad3d", probes=padded(3)),
    **pick(
        "constant_pad_nd",
        probes=lambda v: [
            (v.special(3, 4), [1, 2], one(v)),
            (v.special(3, 4), [-1, 2, 1, -1], one(v)),
            (v.special(3, 4), [1, 1]),
        ],
    ),
    **pick("convolution", probes=convolutions),
    **pick("_convolution", probes=lambda v: [(*each, False, False, True, True) for each in convolutions(v)]),
    **pick("mm", probes=lambda v: products(v, (5, 6), (6, 4))),
    **pick("bmm", probes=lambda v: products(v, (2, 5, 6), (2, 6, 4))),
    **pick(
        "addmm",
        probes=lambda v: [
            *products(v, (5, 6), (6, 4), (4,)),
            *(
                (*each, kwargs(beta=b, alpha=a))
                for b, a in ((0, 1), (2, 3))
                for each in products(v, (5, 6), (6, 4), (5, 4))
            ),
            (v.special(5, 4), v.plain(5, 6), v.plain(6, 4), kwargs(beta=0)),
        ],
    ),
    **pick(
        "baddbmm",
        "addbmm",
        probes=lambda v: [
            *products(v, (2, 5, 6), (2, 6, 4), (5, 4)),
            (v.special(5, 4), v.plain(2, 5, 6), v.plain(2, 6, 4), kwargs(beta=0)),
        ],
    ),
    **pick(
        "addmv",
        probes=lambda v: [*products(v, (5, 6), (6,), (5,)), (v.special(5), v.plain(5, 6), v.plain(6), kwargs(beta=0))],
    ),
    **pick("addr", probes=lambda v: products(v, (5,), (6,), (5, 6))),
    **pick("mv", probes=lambda v: products(v, (5, 6), (6,))),
    **pick("dot", probes=lambda v: products(v, (12,), (12,))),
    **pick("linear", probes=lambda v: [(v.special(5, 6), v.plain(4, 6), v.plain(4)), (v.plain(5, 6), v.special(4, 6))]),
    **pick("_linalg_det", probes=lambda v: [(v.plain(3, 3) + torch.eye(3, dtype=v.dtype),)] if v.floats else []),
    **pick("linalg_cross", probes=lambda v: [(v.special(4, 3), v.plain(4, 3)), (v.plain(4, 3), v.special(4, 3))]),
    **pick("native_layer_norm", probes=normed),
    **pick(
        "native_group_norm",
        probes=lambda v: [
            (x, v.plain(4), v.plain(4), 2, 4, 6, 2, 1e-5)
            for x in (v.plain(2, 4, 6), v.special(2, 4, 6), v.plain(2, 4, 6) + 8)
        ],
    ),
    **pick("_native_batch_norm_legit_no_training", probes=batch_normed),
    **pick(
        "_native_batch_norm_legit.no_stats",
        probes=lambda v: [(make(2, 4, 6), v.plain(4), v.plain(4), True, 0.1, 1e-5) for make in (v.plain, v.special)],
    ),
    **pick(
        "_native_batch_norm_legit_functional",
        probes=lambda v: [
            (make(2, 4, 6), v.plain(4), v.plain(4), v.plain(4), v.positive(4), False, 0.1, 1e-5)
            for make in (v.plain, v.special)
        ],
    ),
    **pick(
        "_prelu_kernel", probes=lambda v: [(v.x, (v.plain(1) + 3).to(v.dtype)), (v.x, (v.plain(1) + 3.25).to(v.dtype))]
    ),
    **pick("clamp.default", probes=clamps),
    **pick("hardtanh", probes=lambda v: [(v.x,), (v.x, -2, 3)]),
    **pick("clamp.Tensor", probes=clamp_tensors),
    **pick("addcmul", "addcdiv", probes=three),
    **pick("hardtanh_backward", probes=lambda v: [(*v.pair(), -1, 1)]),
    **pick("lerp.Scalar", probes=lerped),
    **pick("lerp.Tensor", probes=three),
    **pick(
        "div.Tensor_mode",
        probes=lambda v: [
            (*pair, kwargs(rounding_mode=m))
            for pair in (v.quotients(), (v.plain(30), v.positive(30)))
            for m in (None, "floor", "trunc")
        ],
    ),
    **pick(
        "div.Scalar_mode",
        probes=lambda v: [(x, s, kwargs(rounding_mode=m)) for x, s in divided(v) for m in (None, "floor", "trunc")],
    ),
    **pick(
        "floor_divide",
        "remainder.Tensor",
        "fmod.Tensor",
        probes=lambda v: [v.quotients(), (v.plain(30), v.positive(30)), (v.plain(30), -v.positive(30))],
    ),
    **pick("remainder.Scalar", "fmod.Scalar", "div.Scalar", "floor_divide.Scalar", probes=divided),
    **pick(
        "remainder.Scalar_Tensor",
        probes=lambda v: [(s, v.x[(v.x == 0) | (v.x.abs() > 1e-4)] if v.floats else v.x) for s in scalars(v)],
    ),
    **pick(
        "add.Tensor",
        "sub.Tensor",
        probes=lambda v: [
            v.pair(),
            (v.special(20, 3), v.plain(20, 3), kwargs(alpha=one(v) if v.dtype == torch.bool else 3)),
            (v.x, v.plain(1)),
        ],
    ),
    **pick("pow.Tensor_Tensor", probes=lambda v: [v.pair(), (v.plain(30), v.plain(30).abs())]),
    **pick("pow.Tensor_Scalar", probes=lambda v: [(v.x, s) for s in (scalars(v) if v.floats else (0, 1, 2, 3, 7))]),
    **pick("round.decimals", probes=lambda v: [(v.x, kwargs(decimals=d)) for d in (0, 1, 3, -1)]),
    **pick("gelu", probes=lambda v: [(v.x, kwargs(approximate=how)) for how in ("none", "tanh")]),
    **pick("elu", probes=lambda v: [(v.x,), (v.x, 1.5, 2.0), (v.x, 0.5, 1.0, 2.0)]),
    **pick("celu", probes=lambda v: [(v.x,), (v.x, 0.5)]),
    **pick("leaky_relu", probes=lambda v: [(v.x,), (v.x, 0.0), (v.x, -0.5)]),
    **pick("hardswish", probes=lambda v: [(v.x[~(v.x.abs() > 1e38)],)] if v.floats else []),  # eager multiplies first
    **pick("softplus", probes=lambda v: [(v.x,), (v.x, 2, 5)]),
    **pick("logit", probes=lambda v: [(v.x,), (v.x, 1e-6)]),
    **pick("glu", probes=lambda v: [(torch.stack([a, b]), 0) for a, b in [v.pair()]]),
    **pick("masked_fill.Scalar", probes=lambda v: masks(v, one)),
    **pick("masked_fill.Tensor", probes=lambda v: masks(v, lambda v: v.plain(1)[0])),
    **pick(
        "where.self",
        probes=lambda v: [
            (torch.arange(len(v.x)) % 3 == 0, v.x, v.x.flip(0)),
            (torch.arange(6).reshape(2, 3) > 2, v.special(3), v.special(2, 1)),
        ],
    ),
    **pick("masked_scatter", probes=lambda v: [(v.special(4, 5), v.plain(4, 5) > 0, v.plain(20))]),
    **pick("fill.Scalar", probes=lambda v: [(v.x, one(v))]),
    **pick("fill.Tensor", probes=lambda v: [(v.x, v.plain(1)[0])]),
    **pick("copy", probes=lambda v: [(v.x, v.x.flip(0))]),
    **pick("full_like", probes=lambda v: [(v.x, one(v)), *([(v.x, NAN), (v.x, -0.0)] if v.floats else [])]),
    **pick("new_full", probes=lambda v: [(v.x, [3], one(v))]),
    **pick("new_ones", "new_zeros", probes=lambda v: [(v.x, [3])]),
    **pick(
        "full",
        probes=lambda v: [
            ([3], number, kwargs(dtype=v.dtype)) for number in (one(v), *((NAN, -0.0, INF) if v.floats else ()))
        ],
    ),
    **pick(
        "scalar_tensor",
        probes=lambda v: [
            (number, kwargs(dtype=v.dtype)) for number in (one(v), *((NAN, -0.0, INF) if v.floats else ()))
        ],
    ),
    **pick("ones", "zeros", probes=lambda v: [([3], kwargs(dtype=v.dtype))]),
    **pick("arange.default", probes=lambda v: [(7, kwargs(dtype=v.dtype)), (6.5, kwargs(dtype=v.dtype))]),
    **pick("arange.start", probes=lambda v: [(-3, 7, kwargs(dtype=v.dtype)), (0.5, 7, kwargs(dtype=v.dtype))]),
    **pick(
        "arange.start_step", probes=lambda v: [(7, -3, -2, kwargs(dtype=v.dtype)), (0.5, 7, 0.1, kwargs(dtype=v.dtype))]
    ),
    **pick(
        "linspace",
        probes=lambda v: [
            (-3, 7, 11, kwargs(dtype=v.dtype)),
            (0, 1, 7, kwargs(dtype=v.dtype)),
            (0.5, 9, 1, kwargs(dtype=v.dtype)),
        ],
    ),
    **pick(
        "blackman_window",
        "hamming_window",
        "hann_window",
        probes=lambda v: [(n, kwargs(dtype=v.dtype)) for n in (1, 7)],
    ),
    **pick("cat", probes=lambda v: [([v.special(3, 4), v.plain(3, 4)], dim) for dim in (0, 1)]),
    **pick("stack", probes=lambda v: [([v.special(3, 4), v.plain(3, 4)], dim) for dim in (0, 1, 2)]),
    **pick("split.Tensor", "unsafe_split", probes=both(7, 4, rest=((3,), (2, 1)))),
    **pick("split_with_sizes", probes=both(7, 4, rest=(([3, 4],), ([1, 3], 1)))),
    **pick("unbind", probes=both(3, 4, rest=((), (1,)))),
    **pick("permute", "permute_copy", probes=both(2, 3, 4, rest=(([2, 0, 1],), ([0, 2, 1],)))),
    **pick("t", probes=both(3, 4)),
    **pick("transpose", probes=both(2, 3, 4, rest=((0, 2), (-1, 1)))),
    **pick(
        "view.default",
        "_unsafe_view",
        "view_copy.default",
        "_reshape_copy",
        probes=both(3, 4, rest=(([4, 3],), ([12],))),
    ),
    **pick("expand", probes=both(3, 1, rest=(([2, 3, 4],), ([3, 2],)))),
    **pick("repeat", probes=both(2, 3, rest=(([2, 1],), ([2, 1, 3],)))),
    **pick("roll", probes=both(4, 5, rest=(([1], [0]), ([-2, 3], [0, 1])))),
    **pick("flip", probes=both(4, 5, rest=(([0],), ([0, 1],)))),
    **pick("squeeze.default", probes=both(1, 3, 1)),
    **pick("squeeze.dim", probes=both(1, 3, 1, rest=((0,), (1,)))),
    **pick("squeeze.dims", probes=both(1, 3, 1, rest=(([0],), ([0, 2],)))),
    **pick("unsqueeze", probes=both(3, 4, rest=((0,), (-1,)))),
    **pick("select.int", probes=both(3, 4, rest=((0, 1), (1, -1)))),
    **pick("slice.Tensor", probes=both(5, 4, rest=((0, 1, 4), (0, -3, 9223372036854775807), (1, 0, 4, 2)))),
    **pick(
        "slice_scatter",
        probes=lambda v: [(v.special(5, 4), v.plain(2, 4), 0, 1, 3), (v.plain(5, 4), v.special(3, 4), 0, 0, 5, 2)],
    ),
    **pick("select_scatter", probes=lambda v: [(v.special(5, 4), v.plain(4), 0, -2)]),
    **pick("diagonal", "diagonal_copy", probes=both(4, 5, rest=((), (1,), (-2, 1, 0)))),
    **pick("tril", "triu", probes=both(4, 5, rest=((), (1,), (-2,)))),
    **pick("unfold", probes=both(7, 3, rest=((0, 3, 2),))),
    **pick("im2col", probes=both(2, 3, 6, 6, rest=(([2, 2], [1, 1], [1, 1], [2, 2]),))),
    **pick("col2im", probes=both(2, 12, 9, rest=(([6, 6], [2, 2], [1, 1], [0, 0], [2, 2]),))),
    **pick("pixel_shuffle", probes=both(1, 4, 2, 3, rest=((2,),))),
    **pick("pixel_unshuffle", probes=both(1, 1, 4, 6, rest=((2,),))),
    **pick(
        "_unsafe_index",
        probes=lambda v: [
            (v.special(4, 5), [indices(0, -1, 2), None]),
            (v.special(4, 5), [indices(0, 1), indices(3, -1)]),
        ],
    ),
    **pick("index_select", probes=lambda v: [(v.special(4, 5), dim, indices(0, 2, 2, 1)) for dim in (0, 1)]),
    **pick("gather", probes=lambda v: [(v.special(4, 5), 0, indices(0, 3, 1, 2, 0).reshape(1, 5))]),
    **pick("embedding", probes=lambda v: [(v.special(6, 4), indices(0, 5, 2)), (v.special(6, 4), indices(0, 5, 2), 2)]),
    **pick("embedding_renorm", probes=lambda v: [(v.plain(6, 4), indices(0, 5, 2), 1.0, 2.0)]),
    **pick(
        "index_put",
        "_unsafe_index_put",
        probes=lambda v: [
            (v.special(4, 5), [indices(0, 2)], v.plain(2, 5)),
            (v.special(4, 5), [indices(1, 1)], v.plain(2, 5), True),
        ],
    ),
    **pick("index_copy", probes=lambda v: [(v.special(4, 5), 0, indices(0, 2), v.plain(2, 5))]),
    **pick("scatter.value", probes=scattered(source=False)),
    **pick("scatter.src", probes=lambda v: [(v.special(3, 5), 0, indices(0, 2, 1, 0, 2).reshape(1, 5), v.plain(1, 5))]),
    **pick("scatter_add", probes=scattered()),
    **pick(
        "scatter_reduce.two",
        probes=lambda v: [each for how in ("sum", "prod", "amax", "amin", "mean") for each in scattered(how)(v)],
    ),
    **pick("grid_sampler_2d", probes=grids),
    **pick(
        "nll_loss_forward",
        probes=lambda v: (
            [(v.plain(4, 5), indices(0, 4, 2, 1), None, how, -100) for how in (0, 1, 2)]
            + [(v.special(4, 5), indices(0, 4, 2, 2), v.positive(5), 1, 2)]
        ),
    ),
    **pick(
        "mse_loss",
        probes=lambda v: [(*v.pair(), 0), (v.plain(12), v.positive(12), 1), (v.plain(12), v.positive(12), 2)],
    ),
    **pick("histc", probes=lambda v: [(v.plain(40), 6, -3, 3)]),
    **pick(
        "_grouped_mm", probes=lambda v: [(v.plain(8, 16), v.plain(2, 16, 8), torch.tensor([3, 8], dtype=torch.int32))]
    ),
    **pick(
        "bitwise_left_shift.Tensor_Scalar",
        "bitwise_right_shift.Tensor_Scalar",
        "__lshift__.Scalar",
        "__rshift__.Scalar",
        probes=shifts,
    ),
    **pick(
        "bitwise_left_shift.Tensor",
        "bitwise_right_shift.Tensor",
        probes=lambda v: [(v.x, torch.full_like(v.x, s)) for s in (0, 1, 3)] if not v.floats else [],
    ),
    **pick(
        "bitwise_left_shift.Scalar_Tensor",
        "bitwise_right_shift.Scalar_Tensor",
        probes=lambda v: [(s, torch.arange(5).to(v.dtype)) for s in (1, 100)] if not v.floats else [],
    ),
    **pick("convert_element_type", probes=lambda v: [(x, k["dtype"]) for x, k in converted(v)]),
}


# They compute with complex numbers, or on a GPU.
NEVER_ON_A_CPU = frozenset(
    {"_fft_c2c", "_fft_c2r", "_fft_r2c", "_grouped_mm"}
    | {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"}
)


def names_of(op: Any) -> tuple[str, str]:
    """Return an operator's name with its overload, and without."""
    name = op._schema.name.split("::")[1]
    return f"{name}.{op._overloadname}", name


def probes_of(op: Any, dtype: torch.dtype) -> list[Args] | None:
    """Return the arguments of an operator's calls in a dtype; None if nothing is known of it."""
    v = Values(dtype)
    known = next((PROBES[name] for name in names_of(op) if name in PROBES), None)
    try:
        return known(v) if known else of_schema(op, v)
    except (RuntimeError, NotImplementedError):  # such as a negative bool
        return []


@dataclass
class Call:
    """An operator with arguments, and its results in eager."""

    op: Any
    args: Args
    kwargs: dict[str, Any]
    wanted: list[torch.Tensor] = field(default_factory=list)

    def __str__(self) -> str:
        shown = [
            f"{a.dtype}{list(a.shape)}".removeprefix("torch.") if isinstance(a, torch.Tensor) else str(a)[:60]
            for a in self.args
        ]
        return f"{'.'.join(names_of(self.op)[:1])}({', '.join(shown)}{', ' + str(self.kwargs) if self.kwargs else ''})"


def calls(op: Any, dtype: torch.dtype) -> Iterator[Call]:
    """Yield the calls of an operator that eager accepts."""
    for given in probes_of(op, dtype) or ():
        args, kw = (given[:-1], given[-1]) if given and isinstance(given[-1], dict) else (given, {})
        args = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
        call = Call(op, args, kw)
        try:
            call.wanted = [x for x in tree_leaves(op(*args, **kw)) if isinstance(x, torch.Tensor)]
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError, ZeroDivisionError):
            continue
        yield call


EPS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 40, torch.float64: 200}
# Below it, results may lose digits or be zero.
SMALLEST = {torch.float16: 2**-23, torch.bfloat16: 2**-126, torch.float32: 2**-126, torch.float64: 2**-1022}


def difference(given: torch.Tensor, wanted: torch.Tensor, call: Any, precise: torch.Tensor | None = None) -> str:
    """Return how a result differs from eager's beyond rounding, element by element, "" if it does not."""
    if (given.dtype, given.shape) != (wanted.dtype, wanted.shape):
        return f"{given.dtype} {tuple(given.shape)} for {wanted.dtype} {tuple(wanted.shape)}"
    if wanted.is_complex():
        return difference(torch.view_as_real(given), torch.view_as_real(wanted), call)
    if not wanted.is_floating_point():
        bad = given != wanted
    else:
        info = torch.finfo(wanted.dtype)
        one, other = given.double(), wanted.double()
        within = EPS[wanted.dtype] * info.eps * other.abs() + SMALLEST[wanted.dtype]
        if precise is not None:
            within = torch.maximum(within, 4 * (other - precise.double()).abs())
        signed = one.signbit() == other.signbit()
        if precise is not None:
            signed |= one.signbit() == precise.double().signbit()
        near = ((one - other).abs() <= within) & signed & one.isfinite() & other.isfinite()
        if precise is not None:  # where eager's own float32 overflows, as oneDNN's gelu does on some processors
            exact = precise.double()
            same = (one == exact) | ((one - exact).abs() <= EPS[wanted.dtype] * info.eps * exact.abs())
            near |= ~other.isfinite() & ~exact.isnan() & same
        bad = ~(near | ((one == other) & (other != 0)) | (one.isnan() & other.isnan()))
    if not bad.any():
        return ""
    at = tuple(int(i) for i in bad.nonzero()[0])
    of = [str(x[at].item()) for x in call.args if isinstance(x, torch.Tensor) and x.shape == wanted.shape]
    return f"{given[at].item()} for {wanted[at].item()} at {', '.join(of) or at} ({int(bad.sum())} of {bad.numel()})"
