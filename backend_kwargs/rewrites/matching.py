"""Match patterns, edit graphs, and define the operators that replace what matches.

An operator has
a fake kernel, a composite one for any device, and a library's, which may have no kernel for some sizes or layouts: it
then raises before it launches anything. The composite kernel runs instead, and from then on without another attempt.
Operators that are `inlined` have no such choice on a GPU, where Inductor compiles their kernels with its own.
"""

import inspect
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import wraps
from types import FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument, map_arg
from torch.fx.operator_schemas import get_signature_for_torch_op, normalize_function

from backend_kwargs.backends import Inputs
from backend_kwargs.torch_internals.dynamo import is_erased, tracing
from backend_kwargs.torch_internals.pattern_matcher import (
    Match,
    PatternExpr,
    PatternMatcherPass,
    fwd_only,
    fx_to_pattern,
    register_graph_pattern,
)
from backend_kwargs.torch_internals.pytree import tree_leaves
from backend_kwargs.torch_internals.tensors import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    FunctionalTensorMode,
    OpOverload,
    store_in_inductor,
    unset_fake_temporarily,
)

Arguments: TypeAlias = dict[str, Any]  # of a call, by their names in its schema

aten, prims = torch.ops.aten, torch.ops.prims
# Conversions between these only round, as Inductor's own do; one to 8 bits is a quantisation that the user wants.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the kernels and of the libraries' calls
HALF = (torch.bfloat16, torch.float16)
# The forms of an operation in dynamo's graph; strings are names of methods.
ADD = (operator.add, torch.add, "add")
MUL = (operator.mul, torch.mul, "mul")
SUMS = {"sum": False, "mean": True, torch.sum: False, torch.mean: True}  # and whether it is the mean


T = TypeVar("T")
P = ParamSpec("P")


class NoMatchError(Exception):
    """Part of a graph is not what a rewrite replaces, or not known to be, and so stays."""


def require(condition: bool) -> None:
    """Raise `NoMatchError` unless a condition of a rewrite holds."""
    if not condition:
        raise NoMatchError


def known(value: T | None) -> T:
    """Return a value that a rewrite needs; raise `NoMatchError` if it is None."""
    if value is None:
        raise NoMatchError
    return value


def matched(parse: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Return what `parse` returns, or None where it finds no match."""
    try:
        return parse(*args, **kwargs)
    except NoMatchError:
        return None


def traced_value(node: Node) -> Any:
    """Return the fake value with which a graph was traced: dynamo's, or one that Inductor lowers."""
    return node.meta.get("val", node.meta.get("example_value"))


def value_of(node: object) -> torch.Tensor | None:
    """Return the fake tensor of a node, or None if it has none."""
    value = traced_value(node) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def values_of(*nodes: object) -> list[torch.Tensor]:
    """Return the fake tensors of the nodes; raise `NoMatchError` if one of them has none."""
    return [known(value_of(node)) for node in nodes]


def value_if_any(node: object) -> torch.Tensor | None:
    """Return the fake tensor of an argument that may be None, which then is what it returns."""
    return None if node is None else known(value_of(node))


def calls(node: object, *targets: object) -> TypeGuard[Node]:
    """Return whether `node` calls one of `targets`: functions, or names of methods."""
    return isinstance(node, Node) and node.op in ("call_function", "call_method") and node.target in targets


# Python's operators, and methods named after them, as functions that have a schema.
FUNCTIONS = {
    key: function
    for name, function in {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "truediv": torch.div,
        "matmul": torch.matmul,
        "neg": torch.neg,
        "pow": torch.pow,
    }.items()
    for key in (getattr(operator, name), f"__{name}__")
}
NUMPYS = {"axis": "dim", "keepdims": "keepdim"}  # names that torch also takes
Types: TypeAlias = type | tuple[type, ...]
# What torch takes for each type of a schema.
_NUMBERS = (int, torch.SymInt), (int, float, torch.SymInt, torch.SymFloat)
TAKEN: dict[str, Types] = {
    "TensorType": torch.Tensor,
    "IntType": _NUMBERS[0],
    "SymIntType": _NUMBERS[0],
    "FloatType": _NUMBERS[1],
    "NumberType": (*_NUMBERS[1], complex),
    "BoolType": bool,
    "StringType": str,
    "ScalarTypeType": torch.dtype,
    "LayoutType": torch.layout,
    "MemoryFormatType": torch.memory_format,
    "DeviceObjType": (torch.device, str),
}


def arguments_of(node: object) -> Arguments | None:
    """Return the arguments of a call by their names in its schema, with defaults, or None where they are not known.

    The names are those of the function, or of the ATen operator with a method's name; a method's own tensor, and what
    ATen calls `self`, is "input". A number in place of a list, as in `stride=2`, becomes that list. None stands for a
    target without schema (such as `operator.getitem`), for an overload that the arguments do not tell, and for calls
    with `out`.
    """
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    target: Any = FUNCTIONS.get(node.target, node.target)
    if isinstance(target, str):
        method = getattr(torch.Tensor, target, None)
        target = method if isinstance(method, FunctionType) else getattr(torch.ops.aten, target, None)
    kwargs = {name: value for name, value in node.kwargs.items() if name != "out" or value is not None}
    if isinstance(target, FunctionType | OpOverload):
        return _by_the_only_schema(target, node.args, kwargs)
    if target is None or not callable(target):
        return None
    signatures, schemas = get_signature_for_torch_op(target, return_schemas=True)
    for signature, schema in zip(signatures or (), schemas or (), strict=True):
        args = _listed(node.args, schema) if node.op == "call_method" else node.args
        if (bound := _bound(signature, schema, args, kwargs)) is not None:
            return bound if "out" not in bound else None
    return None


def read(node: object) -> Arguments:
    """Return the arguments of a call by their names; raise `NoMatchError` where they are not known."""
    return known(arguments_of(node))


def of_each(option: Any, size: tuple[int, ...]) -> tuple[Any, ...]:
    """Return an option for each dimension."""
    numbers = tuple(option) if isinstance(option, tuple | list) else (option,)
    return numbers * len(size) if len(numbers) == 1 else numbers


def input_of(node: Node) -> Any:
    """Return the first argument of a call: what it converts, reshapes or copies, say; raise if it has a keyword."""
    require(bool(node.args))
    return node.args[0]


def _by_the_only_schema(target: Callable[..., Any], args: tuple[Argument, ...], kwargs: Arguments) -> Arguments | None:
    """Return the arguments by their names in the schema of a function that has one."""
    try:
        pair = normalize_function(target, args, kwargs, normalize_to_only_use_kwargs=True)
    except (TypeError, ValueError):  # arguments that the function itself unpacks
        return None
    return {"input" if name == "self" else name: value for name, value in pair.kwargs.items()} if pair else None


def _listed(args: tuple[Argument, ...], schema: "torch.FunctionSchema") -> tuple[Argument, ...]:
    """Return a method's arguments, with sizes that it was given one by one, as in `x.view(2, 3)`, as a list."""
    own = [each for each in schema.arguments if not each.kwarg_only]
    sizes = args[1:]
    one_by_one = len(own) == 2 and own[1].type.kind() == "ListType" and all(_is_a(TAKEN["IntType"], e) for e in sizes)
    return (args[0], [*sizes]) if one_by_one and sizes else args


def _bound(
    signature: inspect.Signature, schema: Any, args: tuple[Argument, ...], kwargs: Arguments
) -> Arguments | None:
    """Return the arguments by the names of one overload, or None if it does not take them."""
    if not any("Tensor" in str(each.type) for each in schema.arguments):  # TorchScript's, of numbers
        return None
    known = {name if name in signature.parameters else NUMPYS.get(name, name): each for name, each in kwargs.items()}
    try:
        bound = signature.bind(*args, **known)
    except TypeError:
        return None
    values = bound.arguments
    for name, argument in zip(signature.parameters, schema.arguments, strict=True):
        if name not in values:
            continue
        if argument.N and _is_a(TAKEN["IntType"], values[name]):
            values[name] = [values[name]] * argument.N
        if not _may_be(argument.real_type, values[name]):
            return None
    bound.apply_defaults()
    return bound.arguments


def _may_be(kind: "torch.JitType", value: object) -> bool:
    """Return whether an argument may be of a schema's type."""
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _may_be(kind.getElementType(), value)
    if name == "ListType":
        return isinstance(value, list | tuple) and all(_may_be(kind.getElementType(), each) for each in value)
    return name in TAKEN and _is_a(TAKEN[name], value)


def _is_a(types: Types, value: object) -> bool:
    """Return whether an argument, or the value of a node that is one, has one of `types`."""
    return isinstance(traced_value(value) if isinstance(value, Node) else value, types)


def orders_of_terms(node: object) -> Iterable[tuple[Node, Node]]:
    """Return both orders of the two tensors that a sum adds without a factor; nothing if it is another call."""
    args = (arguments_of(node) if calls(node, aten.add.Tensor, *ADD) else None) or {}
    one, other = args.get("input"), args.get("other")
    if not isinstance(one, Node) or not isinstance(other, Node) or args.get("alpha", 1) != 1:
        return ()
    return (one, other), (other, one)


def converts_floats(node: object) -> TypeGuard[Node]:
    """Return whether `node` converts floating-point numbers to others; those to integers or to 8 bits are wanted."""
    values = values_of(node, input_of(node)) if calls(node, prims.convert_element_type.default) else ()
    return bool(values) and all(each.dtype in FLOATS for each in values)


def used_once(node: Node) -> bool:
    """Return whether `node` has exactly one user, so that replacing that user makes `node` dead."""
    return len(node.users) == 1


UNKNOWN = 8192  # in place of a size that only the run will tell, as Inductor assumes it


def known_true(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition on sizes is true for all values of its symbols."""
    return bool(statically_known_true(condition))


def same_sizes(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes are known to be equal."""
    return len(one) == len(other) and all(known_true(a == b) for a, b in zip(one, other, strict=True))


def hint(size: int | torch.SymInt) -> int:
    """Return a size in this call: where it varies, `int` would make it constant for all others."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else UNKNOWN


def have_one_dtype(values: Iterable[torch.Tensor], dtypes: Collection[torch.dtype] = DTYPES) -> bool:
    """Return whether all values have the same dtype, one of `dtypes`."""
    present = {value.dtype for value in values}
    return len(present) == 1 and present.issubset(dtypes)


def bytes_of(value: torch.Tensor) -> float:
    """Return the bytes of a fake tensor in this call."""
    return float(hint(value.numel()) * value.element_size())


def insert(graph: Graph, target: Callable[..., Any], *args: Argument, **kwargs: Argument) -> Node:
    """Insert a call of `target` at the graph's insertion point, with its fake result as `meta["val"]`."""
    node = graph.call_function(target, args, kwargs)
    values = map_arg((args, kwargs), lambda each: each.meta["val"])
    inputs = [each.meta.get("val") for each in graph.find_nodes(op="placeholder")]  # of a call without tensors
    modes = (leaf.fake_mode for leaf in tree_leaves((values, inputs)) if hasattr(leaf, "fake_mode"))
    with next(modes, None) or FakeTensorMode():
        node.meta["val"] = target(*values[0], **values[1])
    return node


def replace(old: Node, new: Node) -> None:
    """Replace `old` by `new`; erase `old` and the nodes that only it used."""
    new.meta = {**old.meta, **new.meta}
    old.replace_all_uses_with(new)
    erase_dead(old)


def dying_with(node: Node) -> list[Node]:
    """Return `node` and what `erase_dead` would erase with it, once nothing uses it; the graph stays unchanged."""
    dying, waiting = {node: None}, [*node.all_input_nodes]
    while waiting:
        each = waiting.pop()
        if each not in dying and each.op != "placeholder" and all(user in dying for user in each.users):
            dying[each] = None
            waiting += each.all_input_nodes
    return [*dying]


def erase_dead(node: Node) -> None:
    """Erase `node` if nothing uses it, then its inputs likewise."""
    if node.users or node.op in ("placeholder", "output"):
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for each in inputs:
        if not is_erased(each):
            erase_dead(each)


def patterns_of(
    function: Callable[[torch.Tensor], torch.Tensor],
    dtypes: Sequence[torch.dtype],
    sizes: Sequence[int] = (4, 4),
) -> list[PatternExpr]:
    """Return the graphs of `function(x)` with Inductor's decompositions as patterns; they may differ by the dtype.

    The keyword "x" matches any node. Constants match only themselves.
    """
    with tracing(None), unset_fake_temporarily(), FakeTensorMode(), torch.no_grad():
        # A lambda, since the arguments of some functions cannot be inspected.
        gms = [fwd_only(lambda x: function(x), [torch.empty(sizes, dtype=dtype)]) for dtype in dtypes]  # noqa: PLW0108
    patterns = [fx_to_pattern(gm, argnames=["x"]) for gm in gms]
    return [*{repr(each): each for each in patterns}.values()]


def register(
    passes: PatternMatcherPass,
    pattern: PatternExpr,
    parse: Callable[[Match], object],
    fuse: Callable[[Node, Any], Node | None],
) -> None:
    """Register a pattern: what ends in a node that matches is fused, unless `parse(match)` returns None.

    `parse` may raise `NoMatchError` as well. `fuse(node, parsed)` inserts nodes before the last one of the match, and
    returns the one that replaces it, or None if it has replaced another.
    """

    def replace_last(match: Match, *args: object, **kwargs: object) -> None:
        node = match.output_node()
        with node.graph.inserting_before(node):
            new = fuse(node, parse(match))
        if new is not None:
            replace(node, new)

    fits = lambda match: matched(parse, match) is not None  # noqa: E731
    register_graph_pattern(pattern, extra_check=fits, pass_dict=passes)(replace_last)


Kernel: TypeAlias = Callable[..., Any]  # takes what the operator's schema says, and returns its results
Context: TypeAlias = Any  # autograd's `ctx`, which holds what the functions of an operator set on it
Gradients: TypeAlias = tuple[Tensor | None, ...]

LIBRARY: Any = torch.library.Library("backend_kwargs", "DEF")  # type: ignore[no-untyped-call]  # alive for as long as its operators
# Inductor must pass the strides of dynamo's graph, where another layout would cost a copy or another kernel. To
# operators that patterns insert it passes any.
TAGS = tuple(filter(None, (getattr(torch.Tag, name, None) for name in ("needs_exact_strides", "pt2_compliant_tag"))))
PLAIN = frozenset((Tensor, FakeTensor, FunctionalTensor))  # without a subclass of the user's

_without_kernel: set[Hashable] = set()  # layouts for which the library raised


def define(
    signature: str,
    composite: Kernel,
    *,
    fake: Kernel | None = None,
    cpu: Kernel | None = None,
    cuda: Kernel | None = None,
    inlined: bool = False,
    keep: Callable[..., None] | None = None,
    backward: Kernel | None = None,
    tags: tuple[torch.Tag, ...] = TAGS,
) -> "OpOverload[..., Any]":
    """Define an operator.

    `keep(ctx, inputs, output)` and `backward(ctx, *gradients)` are those of `torch.library.register_autograd`.
    `inlined`: AOTAutograd traces into `composite`, or on a GPU into `cuda`, which takes `wrap` for its kernels; so
    Inductor launches them, and fuses what is around them. A launch from Python took about 85 µs. Patterns insert
    operators too late for that.
    """
    name = LIBRARY.define(signature, tags=tags)
    for key, kernel in (("CPU", cpu), ("CUDA", cuda)):
        LIBRARY.impl(name, with_fallback(kernel, composite) if kernel else composite, key)
    torch.library.register_fake(f"backend_kwargs::{name}", fake or composite, lib=LIBRARY)
    if inlined:
        rule = _inlining(composite, cuda)
        torch.library.register_torch_dispatch(f"backend_kwargs::{name}", FunctionalTensorMode, rule, lib=LIBRARY)
    if backward:
        torch.library.register_autograd(f"backend_kwargs::{name}", backward, setup_context=keep, lib=LIBRARY)
    return getattr(torch.ops.backend_kwargs, name).default  # type: ignore[no-any-return]


def _inlining(composite: Kernel, cuda: Kernel | None) -> Kernel:
    """Return AOTAutograd's rule for an operator: trace into `composite`, or into `cuda` on a GPU alone."""

    def rule(
        mode: FunctionalTensorMode,
        op: "OpOverload[..., Any]",
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: Arguments,
    ) -> object:
        # A subclass, such as DTensor, first passes the operator on to the tensors inside.
        if (cuda and not args[0].is_cuda) or not PLAIN.issuperset(types):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return cuda(*args, wrap=torch.library.wrap_triton) if cuda else composite(*args)

    return rule


def with_fallback(kernel: Kernel, composite: Kernel) -> Kernel:
    """Return a function that calls `kernel`, or `composite` for layouts for which `kernel` raises."""

    @wraps(kernel)
    def call(*args: object) -> object:
        if _without_kernel and _layout(kernel, args) in _without_kernel:
            return composite(*args)
        try:
            return kernel(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - Triton is missing or fails to compile, or the library has no kernel
            result = composite(*args)  # raises if the arguments are wrong
            _without_kernel.add(_layout(kernel, args))
            return result

    return call


def _layout(kernel: Kernel, args: Inputs) -> Hashable:
    """Return what decides whether a library has a kernel for a call: sizes, strides, dtypes, and other arguments."""
    return (kernel, *((t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else str(t) for t in args))


def dense(bias: Tensor | None) -> Tensor | None:
    """Return a bias as the libraries need it: oneDNN ignores its stride."""
    return None if bias is None else bias.contiguous()


# In any layout: a tag would make it that of dynamo's graph, and a copy.
stored: "OpOverload[..., Tensor]" = define(
    "stored(Tensor x) -> Tensor",
    torch.clone,
    backward=lambda _, grad: stored(grad),
    tags=(torch.Tag.pt2_compliant_tag,),
)
store_in_inductor(stored)
