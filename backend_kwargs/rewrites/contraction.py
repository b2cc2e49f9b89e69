"""Products of tensors that broadcast against each other, then summed, as products of matrices, forward and backward.

Inductor fuses the multiplication with the sum, into a kernel that reads each operand once per element of the product.
"""

import math
import operator
import string
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, Node

from backend_kwargs.backends import Inputs
from backend_kwargs.graphs.writes import storages_of, written_storages
from backend_kwargs.rewrites.matching import (
    FLOATS,
    HALF,
    MUL,
    SUMS,
    Arguments,
    Context,
    Gradients,
    arguments_of,
    define,
    hint,
    known,
    known_true,
    matched,
    require,
    same_sizes,
    used_once,
    value_of,
    values_of,
)
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.rewrites.traced import changes_meanwhile, method, replacing
from backend_kwargs.torch_internals.tensors import set_grad_enabled

REWRITE = Rewrite(
    "Broadcast products that are summed, as products of matrices",
    traced=f"{__name__}:contract_products",
    applies="floats; at least 4 summands, and a product at least 4 times as large as its operands together",
    costs="float32 has the precision that `torch.backends.*.matmul.fp32_precision` allows for products of matrices",
    fitting=lambda stats: ran(stats, "mul") and ran(stats, "sum", "mean"),
    order=145,
)

SEVERAL = 4  # times the operands, so large must a product be: a smaller one is read about as fast as it is fused
FEWEST = 4  # summands of an element
BOUNDS = (2, 4, 8, 16, 32, 64)  # of a size that varies, as far as they are asked for
PRODUCTS = (*MUL, torch.multiply, "multiply", "__mul__")

# ---- the operator


def _contract(a: Tensor, b: Tensor, equation: str) -> Tensor:
    left, right, made = equation.replace("->", ",").split(",")
    shared = [each for each in left if each in right]
    batch, summed = ([each for each in shared if (each in made) is kept] for kept in (True, False))
    rows, columns = ([each for each in one if each not in shared] for one in (left, right))
    # `mul` and `sum` are not autocast as products of matrices are; here autograd has been passed.
    with torch.autocast(a.device.type, enabled=False):
        product = (torch.bmm if batch else torch.mm)(
            _matrices(a, left, batch, rows, summed), _matrices(b, right, batch, summed, columns)
        )
    sizes = dict(zip(left + right, (*a.shape, *b.shape), strict=True))
    order = [*batch, *rows, *columns]
    return product.view([sizes[each] for each in order]).permute([order.index(each) for each in made]).contiguous()


def _matrices(x: Tensor, labels: str, batch: Sequence[str], rows: Sequence[str], columns: Sequence[str]) -> Tensor:
    """Return `x` as matrices, which need no copy if it has them as they are, or transposed."""
    plain, turned = (x.permute([labels.index(each) for each in (*batch, *one, *other)]) for one, other in
                     ((rows, columns), (columns, rows)))  # fmt: skip
    sizes = dict(zip(labels, x.shape, strict=True))
    count, height, width = (math.prod(sizes[each] for each in group) for group in (batch, rows, columns))
    leading = [count] if batch else []
    if not plain.is_contiguous() and turned.is_contiguous():
        return turned.view(*leading, width, height).mT
    return plain.contiguous().view(*leading, height, width)


def _keep(ctx: Context, inputs: Inputs, output: Tensor) -> None:
    a, b, ctx.equation = inputs
    ctx.save_for_backward(a, b)


def _gradients(ctx: Context, grad: Tensor) -> Gradients:
    (a, b), (left, right, made) = ctx.saved_tensors, ctx.equation.replace("->", ",").split(",")
    return contract(grad, b, f"{made},{right}->{left}"), contract(a, grad, f"{left},{made}->{right}"), None


contract = define(
    "contract(Tensor a, Tensor b, str equation) -> Tensor", _contract, inlined=True, keep=_keep, backward=_gradients
)


# ---- dynamo's graph

Labels: TypeAlias = tuple[int | None, ...]  # of a tensor's dimensions: which of the product's they are; None: of size 1


@dataclass(frozen=True, slots=True)
class _Factor:
    """A tensor, or a number, that is multiplied; a gradient that it may have is `recorded`, or not."""

    node: Any
    labels: Labels
    recorded: bool

    @property
    def own(self) -> list[int]:
        return [each for each in self.labels if each is not None]


Groups: TypeAlias = tuple[list[_Factor], list[_Factor], list[_Factor]]  # of both operands, and outside the sum


@dataclass(frozen=True, slots=True)
class _Product:
    """What is summed: the sizes of its dimensions by their labels, and those that a view makes one of."""

    sizes: dict[int, Any]
    joined: dict[int, list[int]] = field(default_factory=dict)

    def within(self, label: int | None) -> list[int]:
        """Return the labels of the dimensions that a view makes one of, or the label alone."""
        if label not in self.joined:
            return [] if label is None else [label]
        return [each for part in self.joined[label] for each in self.within(part)]

    def factors(self, node: Any, labels: Labels, recorded: bool, top: bool) -> list[_Factor]:
        """Return what is multiplied to give `node`, seen through views and products that nothing else uses."""
        value = value_of(node)
        if value is None:
            require(type(node) in (int, float))
            return [_Factor(node, (), recorded)]
        # A view under `no_grad` says that it has a gradient, and has none.
        if used_once(node) and (not value.requires_grad or _records_gradients(node)):
            through = recorded and value.requires_grad
            if below := matched(self._below, node, labels, top):
                return self.factors(*below, through, top)
            if node.target in PRODUCTS and (found := matched(self._multiplied, node, labels, through)):
                whole = {each for each in labels if each is not None}
                if top or all({*each.own} != whole for each in found):
                    return found
        repeats = any(
            label is None and not known_true(size == 1) for label, size in zip(labels, value.shape, strict=True)
        )
        require(value.dtype in FLOATS and not repeats)
        return [_Factor(node, labels, recorded)]

    def _multiplied(self, node: Node, labels: Labels, recorded: bool) -> list[_Factor]:
        """Return the factors of both operands of a multiplication; none of a square, since theirs might overflow."""
        args = arguments_of(node) or ({} if node.kwargs else dict(zip(("input", "other"), node.args, strict=False)))
        one, other = (args.get(name) for name in ("input", "other"))
        found: list[_Factor] = []
        for each in () if one is other else (one, other):
            value = value_of(each)
            sizes = () if value is None else value.shape
            own = tuple(
                label if label is not None and known_true(size == self.sizes[label]) else None
                for label, size in zip(labels[len(labels) - len(sizes) :], sizes, strict=True)
            )
            require(all(label is not None or known_true(size == 1) for label, size in zip(own, sizes, strict=True)))
            found += self.factors(each, own, recorded, top=False)
        return found

    def _below(self, node: Node, labels: Labels, top: bool) -> tuple[Node, Labels]:
        """Return what `node` is a view of, and that one's labels; at the `top` a view may make one dimension of some.

        Their dimensions are told by their strides. A stride of 0 repeats what is below.
        """
        given = known(next((each for each in node.all_input_nodes if _is_view(value_of(node), value_of(each))), None))
        require(not written_storages(node))
        value, base = values_of(node, given)
        strides = zip(base.shape, base.stride(), strict=True)
        rest = {
            at for at, (size, stride) in enumerate(strides) if not known_true(size == 1) and not known_true(stride == 0)
        }
        found: dict[int, int] = {}
        for label, size, stride in zip(labels, value.shape, value.stride(), strict=True):
            if label is None or known_true(stride == 0):
                continue
            taken, total = list[int](), 1
            while not known_true(total == size):
                fitting = [at for at in rest if known_true(base.stride(at) == stride * total)]
                require(len(fitting) == 1 and (top or not taken))
                taken = fitting + taken
                rest -= {*fitting}
                total = total * base.shape[fitting[0]]
            if len(taken) > 1:
                self.joined[label] = [len(self.sizes) + at for at in range(len(taken))]
                self.sizes.update(zip(self.joined[label], (base.shape[at] for at in taken), strict=True))
            found.update(zip(taken, self.within(label), strict=True))
        require(not rest)
        return given, tuple(found.get(at) for at in range(base.dim()))

    def grouped(self, factors: Sequence[_Factor], over: Collection[int], kept: Collection[int]) -> Groups:
        """Return the factors of both operands, the largest first, and those outside the sum; raise if it gains nothing.

        A factor is multiplied with an operand that has all its dimensions.
        """
        every = {*over, *kept}
        shares = [self._least(every.difference(each.own)) for each in factors if isinstance(each.node, Node)]
        require(not known_true(math.prod(self.sizes[each] for each in over) < FEWEST))
        require(0 not in shares and sum(SEVERAL / each for each in shares) <= 1)
        groups: list[list[_Factor]] = []
        for each in sorted(factors, key=lambda each: -len(each.own)):
            hosts = [group for group in groups if {*each.own}.issubset(group[0].own)]
            if hosts:
                min(hosts, key=lambda group: math.prod(hint(self.sizes[at]) for at in group[0].own)).append(each)
            else:
                groups.append([each])
        operands = [group for group in groups if {*group[0].own}.issuperset(over)]
        outside = [each for group in groups if group not in operands for each in group]
        require(len(operands) == 2 and all({*over}.isdisjoint(each.own) for each in outside))
        one, other = operands
        require(every.issubset(one[0].own + other[0].own))
        return one, other, outside

    def _least(self, labels: Iterable[int]) -> int:
        """Return a number of elements that dimensions have at least, whatever their sizes are."""
        sizes = [self.sizes[each] for each in labels]
        return math.prod(
            size if isinstance(size, int) else max((n for n in BOUNDS if known_true(size >= n)), default=0)
            for size in sizes
        )


def _records_gradients(node: Node) -> bool:
    """Return whether the graph lets a call record gradients."""
    while node.op != "root":
        if node.target is set_grad_enabled:
            return bool(node.args[0])
        node = node.prev
    return True


def _is_view(value: Tensor | None, base: Tensor | None) -> bool:
    """Return whether a tensor has the memory of another, from the same element on, as the same dtype."""
    if value is None or base is None or base.dtype != value.dtype or base.layout != torch.strided:
        return False
    same = storages_of(value) == storages_of(base) != set()
    return same and known_true(value.storage_offset() == base.storage_offset())


def _contraction(node: Node, args: Arguments) -> Node:
    """Insert the product of matrices that is this sum of a product, with its dtype and eager's layout."""
    whole, result = values = values_of(args["input"], node)
    require(all(value.dtype in FLOATS and value.layout == torch.strided for value in values))
    dims = [*(args.get("dim") or range(whole.dim()))]
    require(all(isinstance(each, int) for each in dims) and whole.dim() > 0 and not known_true(whole.numel() == 0))
    labels = tuple(None if known_true(size == 1) else at for at, size in enumerate(whole.shape))
    product = _Product(dict(enumerate(whole.shape)))
    factors = product.factors(args["input"], labels, recorded=True, top=True)
    summed = {each % whole.dim() for each in dims}
    over = [label for at in summed for label in product.within(labels[at])]
    # The labels that each dimension of the result consists of, none where its size is 1.
    kept = [[] if at in summed else product.within(label) for at, label in enumerate(labels)
            if at not in summed or args.get("keepdim")]  # fmt: skip
    groups = product.grouped(factors, over, [label for each in kept for label in each])
    order = sorted((at for at, each in enumerate(kept) if each), key=lambda at: -hint(result.stride()[at]))
    nodes = [each.node for each in factors if isinstance(each.node, Node)]
    require(_is_dense(result, order) and not changes_meanwhile(node, nodes))
    require(all(each.device == result.device for each in values_of(*nodes)))
    mean, dtype = SUMS[node.target], torch.promote_types(whole.dtype, result.dtype)
    # Half precision where only the result is rounded, by libraries that sum it in float32.
    if dtype in HALF and (mean or len(factors) > 2 or result.is_cpu):
        dtype = torch.float32
    made = _inserted(node.graph, dtype, groups, [kept[at] for at in order])
    for label in over if mean else ():
        size = product.sizes[label]
        if not isinstance(size, int):
            size = next(method(each.node, "size", each.labels.index(label)) for each in factors if label in each.labels)
        made = node.graph.call_function(torch.div, (made, size))
    if dtype != result.dtype:
        made = method(made, "to", result.dtype)
    return _placed(made, order, [at if each else None for at, each in enumerate(kept)])


def _is_dense(result: Tensor, order: Sequence[int]) -> bool:
    """Return whether the dimensions of a tensor, in this order, follow one another in its memory."""
    sizes = [result.shape[at] for at in order]
    return same_sizes([math.prod(sizes[at + 1 :]) for at in range(len(sizes))], [result.stride(at) for at in order])


# ---- what replaces it


def _inserted(graph: Graph, dtype: torch.dtype, groups: Groups, kept: Sequence[Sequence[int]]) -> Node:
    """Insert the product of both operands, times what is outside the sum, with the dimensions `kept` in this order."""

    def converted(factor: _Factor, order: Sequence[int]) -> Any:
        """Insert a factor that broadcasts to dimensions in this order, in the dtype."""
        node, value = factor.node, value_of(factor.node)
        if value is None:
            return node
        node = method(node, "detach") if value.requires_grad and not factor.recorded else node
        node = method(node, "to", dtype) if value.dtype != dtype else node
        if None in factor.labels:
            node = method(node, "squeeze", tuple(at for at, label in enumerate(factor.labels) if label is None))
        return _placed(node, factor.own, [each if each in factor.own else None for each in order])

    def multiplied(made: Any, factors: Sequence[_Factor], order: Sequence[int]) -> Any:
        for each in factors:
            made = graph.call_function(torch.mul, (made, converted(each, order)))
        return made

    *operands, outside = groups
    order = [label for labels in kept for label in labels]
    letters = dict(zip(sorted(operands[0][0].own + operands[1][0].own), string.ascii_letters, strict=False))
    one, other, made = ("".join(letters[at] for at in own) for own in (*(each[0].own for each in operands), order))
    nodes = [multiplied(converted(group[0], group[0].own), group[1:], group[0].own) for group in operands]
    result: Node = multiplied(graph.call_function(contract, (*nodes, f"{one},{other}->{made}")), outside, order)
    for at, labels in enumerate(kept):  # those before are one dimension already
        result = method(result, "flatten", at, at + len(labels) - 1) if len(labels) > 1 else result
    return result


def _placed(node: Node, own: Sequence[int], order: Sequence[int | None]) -> Node:
    """Insert the view of a tensor that has its dimensions in another order, and for each None one of size 1."""
    wanted = [own.index(each) for each in order if each is not None]
    node = method(node, "permute", wanted) if wanted != sorted(wanted) else node
    if None not in order:
        return node
    return node.graph.call_function(
        operator.getitem, (node, tuple(None if each is None else slice(None) for each in order))
    )


contract_products = replacing(SUMS, _contraction)
