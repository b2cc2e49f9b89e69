"""CPU schedules: cheap blocks inlined, sums in lanes, the contiguous axis vectorized.

TVM has no default schedule for CPUs: without these a function is plain loops on one thread.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache, partial, reduce
from operator import mul
from typing import TypeVar

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Op, TensorLoad, TensorRegion
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV as Loop
from tvm.s_tir.schedule import SBlockRV as Block
from tvm.sym import Analyzer
from tvm.target import Target, codegen
from tvm_ffi import Object, get_global_func, register_global_func

from backend_kwargs.backends.tvm.lowering.node import maximum, minimum
from backend_kwargs.backends.tvm.lowering.reductions import highest, lowest
from backend_kwargs.backends.tvm.opaque import is_opaque, opaque

LARGEST = 1000  # nodes of an expression that is inlined into another
WORTH_THREADS = 1 << 15  # elements; with fewer, waking the threads costs more than it saves

T = TypeVar("T", bound=Object)

sblock_realize = get_global_func("s_tir.schedule.GetSBlockRealize")


@cache
def _teach_extrema() -> None:
    """Register our max and min with TVM, once: it splits only reductions that it knows, and its own drop nan."""
    for name, better, worst in (
        ("max", maximum, lowest),
        ("min", minimum, highest),
        ("prod", mul, partial(tirx.const, 1)),
    ):
        # Global, since TVM keeps what has a name; other objects are freed after Python has ended, which crashes.
        combine = partial(lambda better, x, y: [opaque(better(x[0], y[0]), x[0], y[0])], better)
        start = partial(lambda worst, x: [worst(x[0].ty.dtype)], worst)
        names = (f"backend_kwargs.{name}.combine", combine), (f"backend_kwargs.{name}.start", start)
        functions = (register_global_func(each, function, override=True) for each, function in names)
        get_global_func("s_tir.schedule.RegisterReducer")(1, *functions)


def schedule_cpu(func: tirx.PrimFunc, target: Target) -> Schedule:
    """Return `func` scheduled: a step that TVM rejects is skipped, and its loops stay as they were."""
    _teach_extrema()
    lanes = codegen.llvm_get_vector_width(target) // 32
    sch = _each(Schedule(func), _inline)
    sch = _each(sch, partial(_split_sum, lanes=lanes))
    sch = _each(_each(sch, partial(_fuse, lanes=lanes)), partial(_vectorize, lanes=lanes))
    return _each(sch, _parallelize) if int(target.attrs.get("num-cores", 1)) > 1 else sch


def _each(sch: Schedule, step: Callable[..., object]) -> Schedule:
    """Apply a step to each block; one that TVM rejects is left out."""
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        # On a copy, since a rule has several steps and TVM may reject the last.
        changed = sch.copy()
        try:
            step(changed, block=block)
        except Exception:  # noqa: BLE001 - whatever TVM rejects, the loops before the step are correct
            continue
        sch = changed
    return sch


# ---- properties of a block


def _extent(sch: Schedule, loop: Loop) -> int:
    """Return the number of iterations of a loop, 0 if it is symbolic."""
    extent = sch.get(loop).extent
    return int(extent) if isinstance(extent, tirx.IntImm) else 0


def _divisor(extent: int, most: int) -> int:
    """Return the largest divisor of an extent up to `most`."""
    return next((size for size in range(most, 1, -1) if extent % size == 0), 1)


def _work(sch: Schedule, block: Block) -> tirx.Expr:
    """Return the number of a block's iterations."""
    return reduce(mul, [sch.get(loop).extent for loop in sch.get_loops(block)], tirx.IntImm("int64", 1))


def _same(a: tirx.Expr, b: tirx.Expr) -> bool:
    """Return whether two expressions are equal for all values."""
    return bool(Analyzer().can_prove_equal(a, b))


def _walked(node: Object, kind: type[T]) -> list[T]:
    """Return the nodes of a kind below `node`, children first."""
    nodes: list[T] = []
    # A lambda, since TVM uses the return value of a visitor, and inspects its signature.
    tvm_ffi.structural_walk(node, (kind, lambda each: nodes.append(each)), order="post")  # noqa: PLW0108
    return nodes


def _stays_small(sch: Schedule, block: Block, consumer: Block) -> bool:
    """Return whether the producer of an operand can be inlined: TVM repeats its expression at each load of it.

    TVM's simplifier takes twice as long for each choice that is nested in another.
    """
    inner, outer = sch.get(block), sch.get(consumer)
    loads = [each for each in _walked(outer.body, TensorLoad) if each.source.same_as(inner.writes[0].source)]
    nested = _walked(inner.body, tirx.Select) and _walked(outer.body, tirx.Select)
    return not nested and len(loads) * (len(_walked(inner.body, tirx.Expr)) - len(_walked(inner.body, Op))) <= LARGEST


class Axes:
    """The loops of a block by the block variables that they drive."""

    def __init__(self, sch: Schedule, block: Block):
        self.sch, self.block = sch, sch.get(block)
        realized = sblock_realize(sch, block).iter_values
        self.bound = list(zip(self.block.iter_vars, realized, strict=True))
        self.loops = list(sch.get_loops(block))

    def along(self, variables: Iterable[tirx.Var]) -> list[Loop]:
        """Return the loops that drive any of these block variables."""
        wanted = list(variables)
        driving = [v for each, value in self.bound if _among(each.var, wanted) for v in _walked(value, tirx.Var)]
        return [loop for loop in self.loops if _among(self.sch.get(loop).loop_var, driving)]

    @property
    def summed(self) -> list[Loop]:
        """Return the loops over the terms of a sum."""
        return self.along(each.var for each, _ in self.bound if each.iter_type == tirx.IterVar.CommReduce)

    def contiguous(self, region: TensorRegion) -> list[Loop]:
        """Return the loops along the last axis of a buffer's region."""
        return self.along(_walked(region.region[-1].min, tirx.Var)) if len(region.region) else []

    def touching(self, region: TensorRegion) -> list[Loop]:
        """Return the loops that move within a buffer's region."""
        return self.along(v for each in region.region for v in _walked(each.min, tirx.Var))


def _among(node: Object, nodes: Iterable[Object]) -> bool:
    """Return whether a node is one of these, by identity."""
    return any(node.same_as(each) for each in nodes)


# ---- the steps


def _inline(sch: Schedule, block: Block) -> None:
    """Inline a block into its consumers if that repeats no costly work."""
    consumers = list(sch.get_consumers(block))
    again = len(consumers) > 1 or any(not _same(_work(sch, block), _work(sch, each)) for each in consumers)
    # Calls are exp, tanh, or the if_then_else of padding; loads, arithmetic and casts cost less than memory access.
    costly = any(not is_opaque(call) for call in _walked(sch.get(block).body, Call))
    if not (again and costly) and all(_stays_small(sch, block, each) for each in consumers):
        sch.compute_inline(block)


def _split_sum(sch: Schedule, block: Block, lanes: int) -> None:
    """Sum adjacent elements in separate lanes, which are added up at the end."""
    axes = Axes(sch, block)
    if not axes.summed:
        return
    inner = axes.summed[-1]
    # A value that is constant along a row, such as its mean, is the same in every lane.
    along = [read for read in axes.block.reads if _among(inner, axes.touching(read))]
    # A lane that a symbolic size leaves out would be added without being initialized; and if the lanes leave a
    # remainder, TVM drops its guard when it moves the block.
    width = _divisor(_extent(sch, inner) or 1, lanes)
    if width == 1 or any(not _among(inner, axes.contiguous(read)) for read in along):
        return
    _, lane = sch.split(inner, [None, width])
    sch.rfactor(lane, len(axes.block.writes[0].region))


def _fuse(sch: Schedule, block: Block, lanes: int) -> None:
    """Make one loop of the last axes, which all operands walk as the result does: an image's 7 by 7 fill no vector."""
    axes = Axes(sch, block)
    variables = [each.var for each, _ in axes.bound]
    pairs = zip(axes.bound, axes.loops, strict=True)  # with other loops than axes this raises, and nothing is fused
    loops_are_axes = all(value.same_as(sch.get(loop).loop_var) for (_, value), loop in pairs)
    (written,) = axes.block.writes
    shape = list(written.source.shape)
    if axes.summed or not loops_are_axes or not _walks(written, variables, shape):
        return
    if len(sch.get_child_blocks(axes.loops[0])) > 1 or not all(_extent(sch, loop) for loop in axes.loops):
        return
    steps = [all(_walks(read, variables[at:], shape[at:]) for read in axes.block.reads) for at in range(len(variables))]
    first = max([*steps, True].index(True), _first_filled([_extent(sch, loop) for loop in axes.loops], lanes))
    if first < len(variables) - 1:
        sch.fuse(*axes.loops[first:])
        if first > 1:
            sch.fuse(*axes.loops[:first])  # for threads, since an image's first axis may have one element


def _first_filled(sizes: list[int], lanes: int) -> int:
    """Return the axis from which the last axes fill whole vectors, 0 if the last one alone does or if none do.

    With further axes in the loop, TVM splits an index by vectors, cannot join it again, and loads element by element.
    """
    if sizes[-1] % lanes == 0:
        return 0
    return next((at for at in range(len(sizes) - 1, 0, -1) if math.prod(sizes[at:]) % lanes == 0), 0)


def _walks(region: TensorRegion, variables: list[tirx.Var], shape: list[tirx.Expr]) -> bool:
    """Return whether a region's last axes are these variables over axes of these sizes, or none moves it."""
    if not any(_among(each, variables) for part in region.region for each in _walked(part.min, tirx.Var)):
        return True
    last, sizes = list(region.region)[-len(variables) :], list(region.source.shape)[-len(variables) :]
    if len(last) != len(variables) or not all(map(_same, sizes[1:], shape[1:])):
        return False
    return all(each.min.same_as(variable) for each, variable in zip(last, variables, strict=True))


def _vectorize(sch: Schedule, block: Block, lanes: int) -> None:
    """Vectorize along the last axis of the result, with the terms of a sum outside."""
    axes = Axes(sch, block)
    if any(sch.get(loop).kind == tirx.ForKind.VECTORIZED for loop in axes.loops):
        return
    along, terms = axes.contiguous(axes.block.writes[0]), axes.summed
    # TVM vectorizes a loop even if it contains other blocks, and then computes only their first element.
    if len(sch.get_child_blocks(along[-1])) > 1:
        return
    # A bias of the rows is not a transposition: it is constant along a row.
    crossed = [read for read in axes.block.reads if _among(along[-1], axes.touching(read))]
    across = [loop for read in crossed for loop in axes.contiguous(read) if not _among(loop, along)]
    width, height = (_divisor(_extent(sch, loop), lanes) for loop in (along[-1], (across or along)[0]))
    if not (terms or across) and width & (width - 1):
        return  # LLVM is slow with 11 lanes, but fast with a plain loop, whose remainder it splits off
    columns, vector = sch.split(along[-1], [None, width])
    if terms:
        sch.reorder(columns, *terms, vector)
    elif across:
        # A transposition: by squares that stay in cache, since contiguous access on one side is strided on the other.
        rows, row = sch.split(across[0], [None, height])
        sch.reorder(rows, columns, row, vector)
    sch.vectorize(vector)
    if terms:
        sch.decompose_reduction(block, terms[0])


def _parallelize(sch: Schedule, block: Block) -> None:
    """Parallelize the outermost loop, if the work is worth waking the threads."""
    axes, work = Axes(sch, block), _work(sch, block)
    first = axes.loops[0]
    small = isinstance(work, tirx.IntImm) and int(work) < WORTH_THREADS
    if small or _among(first, axes.summed) or sch.get(first).kind != tirx.ForKind.SERIAL:
        return
    sch.parallel(first)
