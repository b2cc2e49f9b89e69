"""A graph in a lower precision: converted, compiled, and measured against an error bound if there is one.

Its error is measured against float64 on the inputs of a call: the graph is computed there operation by operation,
without a wide copy of all weights.
"""

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Argument, map_aggregate

from backend_kwargs import trial
from backend_kwargs.backends import CapturedGraph, CompileFn, Inputs
from backend_kwargs.errors import error_text, warn_once
from backend_kwargs.facts import Call, Compiled, PrecisionUse, left_to_eager
from backend_kwargs.graphs.freezing import by_source, guard_parameters, lifted_parameters, only_read_parameters
from backend_kwargs.graphs.replay import Task, unpacked
from backend_kwargs.graphs.writes import communicates, copy_of_graph, has_transforms, keep_inputs, why_not_repeatable
from backend_kwargs.options.machine import machine
from backend_kwargs.options.option import Options
from backend_kwargs.options.precisions import PRECISIONS, UnfitPrecisionError, UnmeasuredError, why_slow
from backend_kwargs.precision.casts import cast_products
from backend_kwargs.precision.quantised import Weight, quantise_linears, unhashed, unused_placeholders
from backend_kwargs.torch_internals import functorch, pytree
from backend_kwargs.torch_internals.dynamo import dropping_guards, is_tracing, tracing
from backend_kwargs.torch_internals.tensors import enter_autocast, is_view
from backend_kwargs.trial import Accuracy, Results, is_number, walk

WIDENED = frozenset({"float", "half", "bfloat16"})
LOWER = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2})
BITS = "view"  # with a dtype, it reinterprets the bits
LARGEST = 8 << 30  # bytes of values in float64 at the same time


class InFloat64(Interpreter):
    """Runs a graph with each floating value widened where it is read, so only one layer's weights are wide at a time.

    The dtypes in the graph are widened too, so a model that rounds to bfloat16 between its layers does not round here.
    Inputs that the graph writes to, and inputs that need gradients, must be in float64 already. Raise MemoryError if
    its values exceed LARGEST bytes: those that are read later, or all if it `keeps` them for a backward pass.
    """

    def __init__(self, gm: GraphModule, *, keeps: bool = False) -> None:
        self.keeps, self.bytes, self.live = keeps, dict[Node, int](), 0
        super().__init__(widened(gm, attributes=False))
        self.extra_traceback = False  # an error is the reason why there is no reference, in one line

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
        """Return a node's arguments with tensors widened."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if n.op == "output":
            return args, kwargs
        return map_aggregate(args, _wide_tensor), map_aggregate(kwargs, _wide_tensor)

    def run_node(self, n: Node) -> object:
        """Run a node; a tensor that it creates in the default dtype is widened, since the graph may write into it."""
        result = super().run_node(n)
        if not n.op.startswith("call"):
            return result
        result = map_aggregate(result, _wide_tensor)
        own = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and not is_view(leaf)]
        self.bytes[n] = sum(leaf.nbytes for leaf in own)
        self.live += self.bytes[n]
        check_room(self.live)
        if not self.keeps:
            self.live -= sum(self.bytes.get(each, 0) for each in self.user_to_last_uses.get(n, ()))
        return result


def check_room(size: int) -> None:
    """Raise MemoryError if values of `size` bytes are too many to keep in float64."""
    if size > LARGEST:
        raise MemoryError(f"its values in float64 exceed {LARGEST >> 30} GiB")


def widened(gm: GraphModule, *, attributes: bool = True) -> GraphModule:
    """Return a copy of a graph, and of those in it, with all dtypes widened; their inputs must be wide already.

    With `attributes`, tensors that the graphs hold are widened too. Raise TypeError if a node reads the bits of
    numbers, which differ in float64.
    """
    graph = copy.deepcopy(gm.graph)
    for node in graph.nodes:
        if node.target == BITS and any(isinstance(arg, torch.dtype) for arg in (*node.args, *node.kwargs.values())):
            raise TypeError("it reads the bits of numbers, which differ in float64")
        if node.op == "call_method" and node.target in WIDENED:
            node.target = "double"
        node.args, node.kwargs = map_aggregate(node.args, _wide_dtype), map_aggregate(node.kwargs, _wide_dtype)
        if node.target is enter_autocast:
            device, dtype, _, *rest = node.args
            node.args = (device, torch.bfloat16 if dtype == torch.float64 else dtype, False, *rest)
    twin = GraphModule(gm, graph)
    for node in graph.find_nodes(op="get_attr"):
        attribute = getattr(twin, str(node.target), None)
        if isinstance(attribute, GraphModule):
            setattr(twin, str(node.target), widened(attribute))
        elif attributes and isinstance(attribute, torch.Tensor):
            setattr(twin, str(node.target), _wide_tensor(attribute))
    return twin


def _wide_tensor(leaf: Argument) -> Argument:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.dtype in LOWER else leaf


def _wide_dtype(leaf: Argument) -> Argument:
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf in LOWER else leaf


@dataclass(frozen=True, slots=True)
class Asked:
    """A precision for one graph; `max_error` is None if the caller, a race, measures the error itself.

    With `by_compiler` the compiler lowers the precision, and the graph stays as it is.
    """

    precision: str
    max_error: float | None
    freezing: bool = False
    strict: bool = False
    by_compiler: bool = False


@dataclass
class Lowered:
    """A graph in a lower precision; `kept` are the positions of the original inputs that it still takes.

    `weights` are those that it has instead of parameters, by the position of the input that each follows.
    """

    gm: GraphModule
    kept: list[int]
    products: int
    weights: dict[int, Weight] = field(default_factory=dict)


def compile_lowered(
    graph: CapturedGraph,
    asked: Asked,
    following: CompileFn,
    options: Options,
    captured_options: Options,
) -> Compiled:
    """Compile a graph in the requested precision, or as captured if that is impossible or its error exceeds the bound.

    Without a bound, or if `asked.strict`, raise instead. `following` compiles a copy of the graph in the precision with
    `options`, and the graph as it was captured with `captured_options`.
    """
    used = PrecisionUse(asked.precision, None, None if graph.error_is_measured else asked.max_error)
    drop_guards = dropping_guards()
    try:
        compiled = _compiled(graph, asked, used, lambda lowered: following(lowered, options))
    except UnfitPrecisionError as unfit:
        if used.max_error is None or asked.strict:
            raise UnfitPrecisionError(f"Precision {asked.precision!r} is refused: {unfit}.") from None
        warn_once(f"A graph is compiled without precision {asked.precision!r}: {unfit}.")
        used.reason = str(unfit)
        drop_guards()
        compiled = following(graph, captured_options)
    return compiled.with_facts(precision=used)


def _compiled(
    graph: CapturedGraph, asked: Asked, used: PrecisionUse, following: Callable[[CapturedGraph], Compiled]
) -> Compiled:
    """Return the graph compiled in the precision; note what was used."""
    gm, example_inputs = graph.gm, graph.example_inputs
    lowered = lower(gm, example_inputs, asked)
    used.nbytes, used.products = sum(each.nbytes for each in lowered.weights.values()), lowered.products

    def compile_copy(written: Collection[int]) -> Compiled:
        placeholders = lowered.gm.graph.find_nodes(op="placeholder")
        keep_inputs(node for at, node in zip(lowered.kept, placeholders, strict=True) if at in written)
        # The identity of the converted parameters, and their versions if freezing makes them constants.
        if held := by_source(gm, {at: example_inputs[at] for at in lowered.weights}):
            guard_parameters(held, constants=held if asked.freezing else ())
        with unhashed() if PRECISIONS[asked.precision].kind == "quantised" else nullcontext():
            kept = [example_inputs[at] for at in lowered.kept]
            compiled = following(replace(graph, gm=lowered.gm, example_inputs=kept))
        # A compiler may compute in another precision than it was asked for, without an error.
        if asked.by_compiler and compiled.facts.parts and (notes := compiled.facts.parts.notes):
            raise UnfitPrecisionError("; ".join(notes))
        if not lowered.weights:
            return compiled
        return compiled.called_by(_following(compiled.call, lowered, watched=not asked.freezing))

    served = serving(gm, example_inputs, used, compile_copy)
    used.reason = left_to_eager(served.facts.parts)  # a part may have failed at the calls that measure
    return served


def lower(gm: GraphModule, example_inputs: Inputs, asked: Asked) -> Lowered:
    """Return a copy of `gm` in the precision; raise UnfitPrecisionError if no operation can be computed in it."""
    precision = PRECISIONS[asked.precision]
    lowered = Lowered(copy_of_graph(gm), list(range(len(example_inputs))), 0)
    if asked.by_compiler:
        return lowered
    if why := _why_unfit(example_inputs, asked.precision):
        raise UnfitPrecisionError(why)
    if precision.kind == "quantised":
        # Outside dynamo no guard checks the identity of a parameter.
        lifted = lifted_parameters(gm, example_inputs) if is_tracing() else {}
        if any(value.is_inference() for value in lifted.values()):
            raise UnfitPrecisionError("a weight is an inference tensor, which has no version counter")
        only_read = only_read_parameters(gm, lifted)
        lowered.products, lowered.weights = quantise_linears(lowered.gm, only_read, asked.precision)
    elif has_transforms(gm):
        raise UnfitPrecisionError("it has a transform of torch.func, such as vmap")
    else:
        lowered.products = cast_products(lowered.gm, getattr(torch, precision.dtype))
    if not lowered.products:
        raise UnfitPrecisionError("no product or convolution computes in float32")
    lowered.kept = unused_placeholders(lowered.gm, list(lowered.weights))
    lowered.gm.recompile()
    return lowered


def _why_unfit(example_inputs: Inputs, name: str) -> str:
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    device = next((tensor.device.type for tensor in tensors if tensor.is_cuda), "cpu")
    if torch.is_grad_enabled() and not PRECISIONS[name].trains and any(tensor.requires_grad for tensor in tensors):
        return "it is for inference: call the model under torch.no_grad()"
    return why_slow(name, device, machine()) if PRECISIONS[name].kind == "quantised" else ""


def _following(compiled: Call, lowered: Lowered, *, watched: bool) -> Call:
    kept, weights = lowered.kept, lowered.weights

    # A wrapper in the hot path: only a look at each parameter shows whether it changed. It keeps the weights alive.
    @functools.wraps(compiled)
    def call(*inputs: Any) -> object:
        if watched:
            for at, weight in weights.items():
                weight.follow(inputs[at])
        return compiled(*[inputs[at] for at in kept])

    call.__dict__.pop("serialize", None)  # aot_compile() would save it without these weights
    return call


# ---- what serves, once its error is known

Compile = Callable[[Collection[int]], Compiled]
_lock = Lock()  # a measurement seeds the random generators, and restores them


def serving(gm: GraphModule, example_inputs: Inputs, used: PrecisionUse, compile_copy: Compile) -> Compiled:
    """Return what `compile_copy` makes of a copy of `gm`, measured on these inputs; note its error in `used`.

    It is called with the positions of the inputs that must stay inputs, also where others become constants: a
    measurement calls the graph with copies of what it writes, and frozen code would write to the user's own memory.

    If sizes of `gm` are dynamic, the result measures again at the first call in each bucket of sizes, and runs `gm` in
    eager where the error exceeds the bound. If it cannot be measured, the call runs in eager, and the next one
    measures again. Raise UnfitPrecisionError if the error exceeds the bound here.
    """
    if used.max_error is None:
        return compile_copy(())
    with tracing(None):  # as in the user's calls: dynamo's context is that of a compile
        truth = Truth.of(gm, example_inputs)
    # Compiled by the first backward pass, a backward graph would wait in autograd's thread for this thread's lock.
    with functorch.patched(force_non_lazy_backward_lowering=True) if truth.task.training else nullcontext():
        compiled = compile_copy(truth.task.inputs.written)
    with tracing(None):
        used.error = truth.error_of(compiled.call, used.max_error)
    sizes = [at for at, value in enumerate(example_inputs) if isinstance(value, torch.SymInt)]
    if not sizes:  # a new size compiles again
        return compiled
    kept = copy_of_graph(gm)
    given = [example_inputs[at].node.hint for at in sizes]
    return compiled.called_by(_in_buckets(kept, compiled.call, sizes, {_bucket(given): compiled.call}, used))


def _in_buckets(
    gm: GraphModule,
    compiled: Call,
    sizes: Sequence[int],
    known: dict[tuple[int, ...], Call],
    used: PrecisionUse,
) -> Call:
    def decided(given: list[int], inputs: Inputs) -> Call:
        with _lock:
            if (found := known.get(_bucket(given))) is None:
                what = f"sizes {_ranges(given)}"
                try:
                    error = Truth.of(gm, inputs).error_of(compiled, used.max_error or 0.0)
                    found, used.error = compiled, max(used.error or 0.0, error)
                    used.refused.pop(what, None)
                except UnfitPrecisionError as unfit:
                    found = gm.forward
                    used.refused[what] = str(unfit)
                    warn_once(f"A graph runs in eager for {what}, without precision {used.precision!r}: {unfit}.")
                    if isinstance(unfit, UnmeasuredError):
                        return found
                known[_bucket(given)] = found
            return found

    # A wrapper in the hot path: dynamo does not compile again for a new size of a dynamic dimension. A guard on buckets
    # would, and dynamo stops after eight.
    @functools.wraps(compiled)
    def call(*inputs: Any) -> object:
        found = known.get(tuple([inputs[at].bit_length() for at in sizes]))
        return (found or decided([inputs[at] for at in sizes], inputs))(*inputs)

    call.__dict__.pop("serialize", None)  # aot_compile() would save it without the measurements
    return call


def _bucket(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the bucket of some sizes: each is 0, 1, or between a power of two and the next."""
    return tuple(map(int.bit_length, sizes))


def _ranges(sizes: Sequence[int]) -> str:
    bits = [abs(size).bit_length() for size in sizes]
    return ", ".join(f"{1 << (each - 1)} to {(1 << each) - 1}" if each > 1 else f"{each}" for each in bits)


# What sums in another order may change from call to call: this part of the error, or float32's rounding.
VARYING, ROUNDING = 0.5, 1e-5
UNMEASURED = "its error cannot be measured"


@dataclass(frozen=True)
class Truth:
    """What a graph computes on some inputs, in eager and in float64; the inputs stay unchanged.

    `task` calls graphs on copies of the inputs that are written to.
    """

    task: Task
    eager: dict[str, object]
    precise: dict[str, object]

    @classmethod
    def of(cls, gm: GraphModule, inputs: Inputs) -> "Truth":
        """Run `gm` in eager and in float64; raise UnfitPrecisionError if the error cannot be measured."""
        if why := "it communicates with other ranks" if communicates(gm) else why_not_repeatable(gm, inputs):
            raise UnfitPrecisionError(f"{UNMEASURED}: {why}")
        with _unfit():
            task = Task.of(copy_of_graph(gm), inputs)
            with task.generators_kept():
                eager = task.observe(task.copy())
                if task.has_drawn():
                    raise UnfitPrecisionError(f"{UNMEASURED}: it draws random numbers")
                return cls(task, eager, in_float64(task))

    def error_of(self, compiled: Call, max_error: float) -> float:
        """Return the error of two calls of `compiled`; raise UnfitPrecisionError if it exceeds `max_error`.

        Results that vary from call to call are refused too: they contain memory that nobody wrote.
        """
        with _unfit(), self.task.generators_kept():
            device = next(value.device for value in self.task.inputs.values if isinstance(value, torch.Tensor))
            trial.fill_free_memory(device)
            seen = self.task.observe(compiled)
            trial.fill_free_memory(device)
            again = self.task.observe(compiled)
            error = max(_passed(against(each, self.eager, self.precise, max_error)) for each in (seen, again))
            if not against(again, seen, seen, max(ROUNDING, VARYING * error)).passed:
                raise UnfitPrecisionError("its results differ from call to call")
            return error


@contextmanager
def _unfit() -> Iterator[None]:
    """Raise UnfitPrecisionError for any failure."""
    with unpacked():
        try:
            yield
        except UnfitPrecisionError:
            raise
        except Exception as error:
            # A graph exceeds the cap on memory at other calls too.
            unfit = UnfitPrecisionError if isinstance(error, MemoryError) else UnmeasuredError
            raise unfit(f"{UNMEASURED}: {error_text(error)}") from error


def _passed(accuracy: Accuracy) -> float:
    if not accuracy.passed:
        unmeasured = accuracy.reason.startswith(UNMEASURED)
        raise (UnmeasuredError if unmeasured else UnfitPrecisionError)(accuracy.reason)
    return accuracy.error or 0.0


def in_float64(task: Task) -> dict[str, object]:
    """Return the results of the task in float64; raise if they cannot be computed."""
    if task.inputs.aliased:
        raise ValueError("inputs that it writes to share memory")
    trains = {at for at, each in enumerate(task.inputs.values) if isinstance(each, torch.Tensor) and each.requires_grad}
    whole = task.inputs.written | (trains if task.training else set())
    check_room(2 * sum(task.inputs.values[at].nbytes for at in whole))
    values = list(task.inputs.values)
    for at in whole:
        if (value := values[at]).is_floating_point():
            values[at] = value.detach().double().requires_grad_(value.requires_grad)
    wide = replace(task, inputs=replace(task.inputs, values=values))
    return wide.observe(lambda *given: InFloat64(task.copy(), keeps=task.training).run(*given))


def against(seen: Results, eager: Results, precise: Results, max_error: float) -> Accuracy:
    """Check outputs, written inputs and gradients, each by itself."""
    numbers = [leaf for what in precise for _, leaf in walk(what, precise[what]) if is_number(leaf) and leaf.numel()]
    if numbers and not any(bool(leaf.any()) for leaf in numbers):  # as of a last layer that starts with zeros
        return Accuracy("fail_accuracy", f"{UNMEASURED}: all results are 0")
    return trial.check_errors(seen, eager, precise, max_error)
