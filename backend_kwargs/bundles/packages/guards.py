"""What an ahead-of-time package assumes of its inputs and of its module, as data: a bundle's manifest contains it.

An expression over sizes is an integer, the name of a size, or an operation of sympy's on expressions.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

import msgspec

if TYPE_CHECKING:
    import torch

LARGEST = 2**63  # integers of the compiled code have 64 bits
# sympy's class, what it computes, and how it is written: between its arguments, or before them.
OPERATIONS: Mapping[str, tuple[Callable[..., Any], str]] = MappingProxyType(
    {
        "Add": (lambda *terms: sum(terms), " + "),
        "Mul": (lambda *terms: math.prod(terms), "*"),
        "Mod": (operator.mod, " % "),
        "PythonMod": (operator.mod, " % "),
        "FloorDiv": (operator.floordiv, "//"),
        "CleanDiv": (operator.floordiv, "//"),
        "IntTrueDiv": (operator.truediv, "/"),
        "FloatTrueDiv": (operator.truediv, "/"),
        "Pow": (operator.pow, "**"),
        "PowByNatural": (operator.pow, "**"),
        "Equality": (operator.eq, " == "),
        "Unequality": (operator.ne, " != "),
        "StrictLessThan": (operator.lt, " < "),
        "LessThan": (operator.le, " <= "),
        "StrictGreaterThan": (operator.gt, " > "),
        "GreaterThan": (operator.ge, " >= "),
        "And": (lambda *terms: all(terms), " and "),
        "Or": (lambda *terms: any(terms), " or "),
        "Not": (operator.not_, "not"),
        "Max": (max, "max"),
        "Min": (min, "min"),
        "Abs": (abs, "abs"),
        "ModularIndexing": (lambda base, divisor, modulus: base // divisor % modulus, "modular_indexing"),
        "ToFloat": (float, "float"),
        "FloorToInt": (math.floor, "floor"),
        "CeilToInt": (math.ceil, "ceil"),
        "TruncToInt": (math.trunc, "int"),
        "RoundToInt": (round, "round"),
    }
)


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """An operation on expressions."""

    name: str
    of: "Annotated[tuple[Term, ...], msgspec.Meta(min_length=1)]"

    def __post_init__(self) -> None:
        if self.name not in OPERATIONS:
            raise ValueError(f"an operation must be one of {', '.join(OPERATIONS)}")


Term: TypeAlias = Union[int, float, str, Operation]  # noqa: UP007 - msgspec evaluates the name


class Symbol(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the value of a name is found: in a dimension of a tensor's shape or strides."""

    tensor: Annotated[int, msgspec.Meta(ge=0)]
    of: Literal["shape", "stride"]
    dim: Annotated[int, msgspec.Meta(ge=0)]

    def value(self, tensors: "Sequence[torch.Tensor]") -> int | None:
        """Return it, None if no tensor has such a dimension."""
        tensor = tensors[self.tensor] if self.tensor < len(tensors) else None
        values = () if tensor is None else tensor.shape if self.of == "shape" else tensor.stride()
        return values[self.dim] if self.dim < len(values) else None


class TensorGuard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the code assumes of one input: sizes, strides, the offset in its storage if it is read (else None).

    `written` says whether the code writes to it; `same_as` is the position of an input that is the same object.
    """

    shape: tuple[Term, ...]
    stride: tuple[Term, ...]
    offset: int | None = None
    written: bool = False
    same_as: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Weight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the module that the code reads: its names there, and what the code assumes of it.

    `sha256` is the hash of its values if they are part of the code, "" if the code reads the module's own tensor.
    """

    names: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    constant: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?$")] = ""


class PackageGuards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a package assumes. `module` identifies the module's code, `graph` what was exported; "" if not known."""

    module: str
    graph: str
    tensors: tuple[TensorGuard, ...]
    symbols: dict[str, Symbol] = {}
    conditions: tuple[Operation, ...] = ()
    weights: tuple[Weight, ...] = ()

    @property
    def writes(self) -> bool:
        """Whether the code writes to an input."""
        return any(tensor.written for tensor in self.tensors)

    def problem(self, tensors: "Sequence[torch.Tensor]", names: Callable[[], Sequence[str]]) -> str:
        """Return which assumption on sizes, strides and memory the inputs do not meet, "" if they meet all."""
        if len(tensors) != len(self.tensors):
            return f"The call must have {len(self.tensors)} tensors, got {len(tensors)}."
        sizes = {name: symbol.value(tensors) for name, symbol in self.symbols.items()}
        for at, (guard, tensor) in enumerate(zip(self.tensors, tensors, strict=True)):
            for kind, wanted, got in (
                ("shape", guard.shape, tuple(tensor.shape)),
                ("strides", guard.stride, tensor.stride()),
            ):
                if [value_of(term, sizes) for term in wanted] != [*got]:
                    spelled = self._spelled(wanted, sizes, names())
                    return f"Input {names()[at]} must have {kind} {spelled}, got {got}."
            if guard.offset not in (None, begin := tensor.storage_offset()):
                return f"Input {names()[at]} must begin at element {guard.offset} of its storage, got {begin}."
        for condition in self.conditions:
            if value_of(condition, sizes) is not True:
                used = ", ".join(f"{self._name(each, names())} = {sizes.get(each)}" for each in symbols_of(condition))
                return f"Sizes of inputs must meet {text_of(condition, self._texts(names()))}, got {used}."
        return ""

    def _spelled(self, wanted: Sequence[Term], sizes: Mapping[str, int | None], names: Sequence[str]) -> str:
        """Return sizes as text, with the values of expressions."""
        texts = [
            str(term) if isinstance(term, int) else f"{text_of(term, self._texts(names))} = {value_of(term, sizes)}"
            for term in wanted
        ]
        return f"({', '.join(texts)}{',' * (len(texts) == 1)})"

    def _texts(self, names: Sequence[str]) -> Mapping[str, str]:
        return {symbol: self._name(symbol, names) for symbol in self.symbols}

    def _name(self, symbol: str, names: Sequence[str]) -> str:
        place = self.symbols[symbol]
        return f"{names[place.tensor]}.{'shape' if place.of == 'shape' else 'stride()'}[{place.dim}]"


def value_of(term: Term, sizes: Mapping[str, int | None]) -> int | float | None:
    """Return the value of an expression, None if it has none, as after a division by zero or beyond 64 bits."""
    if isinstance(term, str):
        return sizes.get(term)
    if not isinstance(term, Operation):
        return term
    try:
        value = OPERATIONS[term.name][0](*(value_of(each, sizes) for each in term.of))
        return value if isinstance(value, bool) or -LARGEST <= value < LARGEST else None
    except (ArithmeticError, TypeError, ValueError):
        return None


def symbols_of(term: Term) -> list[str]:
    """Return the names in an expression, each once."""
    if isinstance(term, str):
        return [term]
    return (
        [*dict.fromkeys(name for each in term.of for name in symbols_of(each))] if isinstance(term, Operation) else []
    )


def text_of(term: Term, names: Mapping[str, str]) -> str:
    """Return an expression as it is written in Python."""
    if isinstance(term, str):
        return names[term]
    if not isinstance(term, Operation):
        return str(term)
    sign = OPERATIONS[term.name][1]
    texts = [text_of(each, names) for each in term.of]
    if sign[0].isalpha():
        return f"{sign}({', '.join(texts)})"
    between = [f"({text})" if isinstance(each, Operation) else text for each, text in zip(term.of, texts, strict=True)]
    return sign.join(between)
