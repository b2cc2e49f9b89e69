"""Random expressions drawn by hypothesis, compiled as one graph, and the comparison of their results with eager's."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

NAN, INF = float("nan"), float("inf")
FLOATS = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 1e-40, -3e-45, 1e8, -1e8, 3.3, 0.3, 1.7, -2.5, 1e-8, 3e38, 16777217.0]
INTS = [0, 1, -1, 2, 7, -7, 100, 46341]
SHAPES = ((18, 18), (18, 32), (5, 1))
ULPS = 64  # from the true value; eager's functions have errors of a few


@dataclass(frozen=True)
class Expression:
    """The Python text of an expression over the inputs, its parts, and its type: float, int or bool.

    An inexact one is a function of exact parts, named by `function`: its rounding may differ, so nothing is
    computed from it.
    """

    text: str
    kind: str
    parts: tuple["Expression", ...] = ()
    function: str = ""

    def __str__(self) -> str:
        return self.text


def inputs(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return tensors in which each special value meets many others; they are the same each time."""
    rows, columns = shape
    draw = random.Random(0)

    def of(values: Sequence[float], dtype: torch.dtype, *size: int) -> torch.Tensor:
        count = torch.Size(size).numel()
        return torch.tensor([draw.choice(values) for _ in range(count)], dtype=dtype).view(size)

    def ints(dtype: torch.dtype) -> list[int]:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return [each for each in INTS if each <= most] + [least, most, least + 5, most - 50]

    x = torch.tensor(list(itertools.islice(itertools.cycle(FLOATS), columns))).expand(rows, columns).contiguous()
    return {
        "x": x,
        "y": of(FLOATS, torch.float32, rows, columns),
        "z": torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 100,
        "r": of(FLOATS, torch.float32, columns),
        "d": of([*FLOATS, 1e300, 5e-324], torch.float64, rows, columns),
        "h": of([v for v in FLOATS if abs(v) < 1e5 or v in (INF, -INF)], torch.bfloat16, rows, columns),
        "i": of(ints(torch.int32), torch.int32, rows, columns),
        "j": of(ints(torch.int32), torch.int32, rows, columns),
        "k": of(ints(torch.int64), torch.int64, rows, columns),
        "s": of(ints(torch.int8), torch.int8, rows, columns),
        "a": of([False, True], torch.bool, rows, columns),
        "b": of([False, True], torch.bool, rows, columns),
    }


# ---- strategies

LEAVES = {"float": "xxyyzzrdh", "int": "ijks", "bool": "ab"}
NUMBERS = {
    "float": ["0.0", "1.0", "-1.0", "0.1", "1e6", "12582912.0", "1e8", "3"],
    "int": ["1", "100", "-7", "2**31 - 1"],
}
# The kinds of an operator's parts, and its texts.
EXACT: dict[str, list[tuple[tuple[str, ...], list[str]]]] = {
    "float": [
        (("float", "float"), ["({} + {})", "({} - {})", "({} * {})", "({} / {})"] * 3),
        (("float", "float"), ["torch.minimum({}, {})", "torch.maximum({}, {})"]),
        (("float", "number"), ["({} + {})", "({} - {})", "({} * {})", "({} / {})", "({1} - {0})", "({1} / {0})"]),
        (("bool", "float", "float"), ["torch.where({}, {}, {})"]),
        (("bool", "float"), ["torch.where({}, {}, 0.0)"]),
        (("float",), ["(-{})", "{}.abs()", "{}.relu()", "{}.floor()", "{}.round()", "{}.trunc()"]),
        (("float",), ["{}.clamp(-2.5, 1e8)", "{}.square()", "torch.full_like({}, 0.0)"]),
        (("float",), ["{}.float()", "{}.double()", "{}.bfloat16().float()", "{}.half().float()"]),
        (("float",), ["{}.amax(-1, keepdim=True)", "{}.amin(0, keepdim=True)"]),
        (("int",), ["{}.float()", "{}.double()"]),
        (("bool",), ["{}.float()"]),
    ],
    "int": [
        (("int", "int"), ["({} + {})", "({} - {})", "({} * {})", "torch.minimum({}, {})", "torch.maximum({}, {})"]),
        (("int", "int"), ["({} & {})", "({} | {})", "({} ^ {})"]),
        (("int", "whole"), ["({} + {})", "({} * {})", "({1} - {0})"]),
        (("int",), ["({} // 7)", "({} % 7)", "({} // -3)", "({} % 16)", "(-{})", "{}.abs()", "(~{})"]),
        (("int",), ["{}.int()", "{}.long()", "{}.to(torch.int8)", "{}.clamp(-100, 100)"]),
        (("int",), ["{}.sum(-1, keepdim=True)", "{}.amax(0, keepdim=True)", "{}.amin(-1, keepdim=True)"]),
        (("bool", "int", "int"), ["torch.where({}, {}, {})"]),
        (("float",), ["{}.nan_to_num(0, 1, -1).clamp(-1000, 1000).int()"]),
        (("bool",), ["{}.int()", "{}.long().sum(-1, keepdim=True)"]),
    ],
    "bool": [
        (("float", "float"), ["({} < {})", "({} <= {})", "({} > {})", "({} >= {})", "({} == {})", "({} != {})"] * 2),
        (("float", "number"), ["({} < {})", "({} >= {})", "({} == {})"]),
        (("int", "int"), ["({} < {})", "({} >= {})", "({} == {})", "({} != {})"]),
        (("bool",), ["(~{})"] * 2),
        (("bool", "bool"), ["({} & {})", "({} | {})", "({} ^ {})"]),
        (("float",), ["{}.isnan()", "{}.isinf()", "{}.isfinite()", "{}.bool()"]),
        (("float",), ["({0}.sin() == {0}.sin())", "torch.isclose({0}, {0})", "({0} == {0})"]),
        (("bool",), ["{}.any(-1, keepdim=True)", "{}.all(0, keepdim=True)"]),
    ],
}  # fmt: skip
BOUNDED = "{}.float().clamp(-1e4, 1e4)"  # so that no sum overflows, since the order of its terms is not defined
INEXACT = [
    *("torch.sin({})", "torch.cos({})", "torch.tanh({})", "torch.exp({})", "torch.expm1({})", "torch.log({})"),
    *("torch.log1p({})", "torch.sigmoid({})", "torch.erf({})", "torch.sqrt({})", "torch.rsqrt({})", "torch.atan({})"),
    *("torch.exp2({})", "torch.nn.functional.gelu({})", "torch.nn.functional.silu({})", "({} ** 3)"),
    *("{}.sum(-1)", "{}.mean(0)", "{}.softmax(-1)", "({0} * {0}).sum()"),
]


def _made(kind: str, parts: Sequence[Expression], text: str) -> Expression:
    return Expression(text.format(*parts), kind, tuple(part for part in parts if part.kind in EXACT))


def _operators(kind: str, below: dict[str, st.SearchStrategy[Expression]]) -> st.SearchStrategy[Expression]:
    return st.one_of(
        st.builds(_made, st.just(kind), st.tuples(*(below[part] for part in parts)), st.sampled_from(texts))
        for parts, texts in EXACT[kind]
    )


def _expressions(depth: int) -> dict[str, st.SearchStrategy[Expression]]:
    """Return strategies for each type, with operators nested up to `depth`."""
    found = {kind: st.sampled_from([Expression(name, kind) for name in names]) for kind, names in LEAVES.items()}
    numbers = {
        "number": st.sampled_from([Expression(n, "number") for n in NUMBERS["float"]]),
        "whole": st.sampled_from([Expression(n, "number") for n in NUMBERS["int"]]),
    }
    for _ in range(depth):
        found = {kind: found[kind] | _operators(kind, found | numbers) for kind in EXACT}
    return found


EXPRESSION = _expressions(4)
ROUNDED = st.builds(
    lambda part, text: Expression(text.format(BOUNDED.format(part)), "float", (part,), text),
    EXPRESSION["float"],
    st.sampled_from(INEXACT),
)
GRAPH = st.lists(st.one_of(*EXPRESSION.values(), EXPRESSION["float"], ROUNDED), min_size=20, max_size=20)


# ---- how results are judged


def graph_of(expressions: Sequence[Expression]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the function of the inputs that returns the values of the expressions."""
    names = ", ".join(inputs((1, 1)))
    scope = {"torch": torch}
    exec(f"def graph({names}):\n    return ({' '.join(f'{each},' for each in expressions)})", scope)
    return scope["graph"]


def wrong(
    expressions: Sequence[Expression], given: dict[str, torch.Tensor], compiled: Sequence[torch.Tensor]
) -> list[int]:
    """Return which results differ from eager's, bit for bit or by their distance to float64's."""
    eager = graph_of(expressions)(**given)
    return [
        at
        for at, (each, result, wanted) in enumerate(zip(expressions, compiled, eager, strict=True))
        if not (_near(each, given, result, wanted) if each.function else same(result, wanted))
    ]


def same(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, except for the payloads of nan."""
    if (result.dtype, result.shape) != (wanted.dtype, wanted.shape):
        return False
    if not result.is_floating_point():
        return torch.equal(result, wanted)
    number = ~wanted.isnan()
    return _masks_equal(result, wanted) and torch.equal(result[number], wanted[number])


def _masks_equal(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    zero = (result == 0) & (wanted == 0)
    return (
        torch.equal(result.isnan(), wanted.isnan())
        and torch.equal(result.isposinf(), wanted.isposinf())
        and torch.equal(result.isneginf(), wanted.isneginf())
        and torch.equal(result[zero].signbit(), wanted[zero].signbit())
    )


def _near(each: Expression, given: dict[str, torch.Tensor], result: torch.Tensor, wanted: torch.Tensor) -> bool:
    if (result.dtype, result.shape) != (wanted.dtype, wanted.shape) or not _masks_equal(result, wanted):
        return False
    (part,) = each.parts
    (x,) = graph_of([Expression(BOUNDED.format(part), "float")])(**given)
    (exact,) = graph_of([Expression(each.function.format("x"), "float")])(**{**given, "x": x.double()})
    # Relative to the terms of a sum, which may cancel.
    sums = "sum(" in each.function or "mean(" in each.function
    (scale,) = graph_of([Expression(each.function.format("x"), "float")])(**{**given, "x": x.double().abs()})
    info = torch.finfo(result.dtype)
    least = 4 * info.smallest_normal * info.eps
    bound = 2 * (wanted - exact).abs() + ULPS * info.eps * (scale if sums else exact).abs() + least
    finite = wanted.isfinite()
    return bool(((result - exact).abs() <= bound)[finite].all())
