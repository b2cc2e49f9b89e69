"""A lowered graph with its fake inputs as bytes, from which another process makes the same entry of Inductor's cache.

torch's own `compile_fx_ext` drops custom passes, private options and what AOTAutograd says of donated buffers. These
are sent too (`lowering_state`), or the graph is refused with a reason.
"""

import copy
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from types import FunctionType, SimpleNamespace
from typing import Any, Self

import torch
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.freezing_utils import has_frozen_params
from torch._inductor.utils import BoxedBool, is_gpu
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx import _graph_pickler as graph_pickler
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from backend_kwargs.torch_internals.pytree import tree_leaves
from backend_kwargs.torch_internals.relowering import spare_of

LARGEST_CONSTANTS = 1 << 20  # bytes; a graph with more holds weights, which no pipe should carry
# Operators that a process has once it has imported torch; communication is not among them: it needs process groups.
NAMESPACES = frozenset({"aten", "prims", "prim", "inductor", "quantized", "quantized_decomposed", "mkldnn", "onednn"})
# The kernels that these launch are in a table of the process; a node has their number.
LAUNCHES = ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation")
STACKS = ("source_fn_stack", "fwd_source_fn_stack")  # names of kernels and comments are made from these
NOT_SENT = frozenset({"nn_module_stack", "fwd_nn_module_stack"})  # Inductor reads them for debugging alone


class UnportableError(Exception):
    """A graph, an option or a state of this process that another process cannot have. Contains the reason."""


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """A graph that Inductor lowers, with what it gets: fake inputs, keyword arguments, and the context of tracing."""

    gm: GraphModule
    example_inputs: Sequence[Any]
    kwargs: Mapping[str, Any]
    context: TracingContext

    def with_changed(self, changed: Mapping[str, Any]) -> Self:
        """Return the same with other keyword arguments, of which `cudagraphs` may be a bool."""
        return replace(self, kwargs=with_changed(self.kwargs, changed, self.gm))


def sent_graph(
    gm: GraphModule, example_inputs: Sequence[Any], kwargs: Mapping[str, Any], known: Callable[[str], bool]
) -> bytes:
    """Return the arguments of `compile_fx_inner` as bytes, or raise UnportableError; nothing is changed.

    `known("namespace::name")` says whether the other process has an operator that is not torch's own.
    """
    if not (context := TracingContext.try_get()) or context.fake_mode is None or context.fake_mode.shape_env is None:
        raise UnportableError("it is compiled outside torch.compile")
    _check_graph(gm, known)
    _check_inputs(example_inputs)
    spare = spare_of(gm)
    for node in spare.graph.nodes:
        sent = {name: value for name, value in node.meta.items() if name not in NOT_SENT}
        node.meta = sent | {name: _by_name(sent[name]) for name in STACKS if name in sent}
    donated = context.fw_metadata.bw_donated_idxs if context.fw_metadata else None
    kept = context.fake_mode.shape_env, context.aot_graph_name, donated, list(map(_launched, _launches(gm)))
    return pickled((spare, list(example_inputs), dict(kwargs), kept))


def received_graph(data: bytes) -> LoweredGraph:
    """Return the graph that `sent_graph` made bytes of, with a tracing context of its own."""
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    gm, example_inputs, kwargs, (_, name, donated, kernels) = unpickled(data, fake_mode)
    for node, launched in zip(_launches(gm), kernels, strict=True):
        _number(node, launched)
    context = TracingContext(fake_mode)
    context.aot_graph_name = name
    # Which saved values the backward graph may overwrite: read by Inductor, and no part of its key.
    context.fw_metadata = SimpleNamespace(bw_donated_idxs=donated)  # type: ignore[assignment]
    return LoweredGraph(gm, example_inputs, kwargs, context)


def pickled(value: object) -> bytes:
    """Return `value` as bytes, or raise UnportableError where another process could not read them."""
    # Nodes in a slice are a part of its argument; torch 2.11 refuses them.
    over_slices = getattr(graph_pickler, "patch_pytree_map_over_slice", nullcontext)
    with over_slices(), io.BytesIO() as stream:
        try:
            # Operators were checked before, with a plainer reason.
            _Pickler(stream, Options(ops_filter=None, node_metadata_key_filter=None)).dump(value)
        except UnportableError:
            raise
        except Exception as error:
            raise UnportableError(f"it cannot be sent: {_one_line(error)}") from error
        return stream.getvalue()


def unpickled(data: bytes, fake_mode: FakeTensorMode | None = None) -> Any:
    """Return what `pickled` made bytes of."""
    return GraphPickler.loads(data, fake_mode or FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))


def again() -> AbstractContextManager[TracingContext | None]:
    """Enter a tracing context in which a graph of the present one can be lowered once more, with the same key."""
    present = TracingContext.get()
    context = TracingContext(present.fake_mode)
    context.aot_graph_name, context.fw_metadata = present.aot_graph_name, present.fw_metadata
    return tracing(context)


def with_changed(kwargs: Mapping[str, Any], changed: Mapping[str, Any], gm: GraphModule) -> dict[str, Any]:
    """Return keyword arguments of `compile_fx_inner` for `gm`, changed; `cudagraphs` may be a bool.

    The boxes in which the compile of a forward graph tells that of its backward graph something are new: with CUDA
    graphs, the backward graph is told the device of the forward graph, which is part of its key.
    """
    kwargs = {**kwargs, **changed}
    cudagraphs = bool(kwargs.get("cudagraphs"))
    boxes: dict[str, Any] = {"cudagraphs": BoxedBool(cudagraphs)}
    if "boxed_forward_device_index" in kwargs and "boxed_forward_device_index" not in changed:
        gpus = {value.device.index for value in values_of(gm) if is_gpu(value.device.type)}
        told = cudagraphs and bool(kwargs.get("is_backward")) and len(gpus) == 1
        boxes["boxed_forward_device_index"] = BoxedDeviceIndex(gpus.pop() if told else None)
    return {**kwargs, **boxes}


def values_of(gm: GraphModule) -> list[torch.Tensor]:
    """Return the fake tensors that nodes of a graph compute."""
    values = [node.meta.get("val") for node in gm.graph.nodes]
    return [value for value in values if isinstance(value, torch.Tensor)]


class _Pickler(GraphPickler):
    """Refuses what is defined in the running program: another process does not run it."""

    def reducer_override(self, obj: object) -> Any:
        # The base of a view would be sent with its fake mode. Inductor, and the key of its cache, look at neither.
        sent = _no_view(obj) if isinstance(obj, FakeTensor) and obj._is_view() else obj
        reduced: Any = super().reducer_override(sent)
        if reduced is NotImplemented and isinstance(obj, type | FunctionType) and not _is_importable(obj):
            raise UnportableError(f"it holds {obj.__qualname__}, which only the running program has")
        return reduced


def _no_view(view: FakeTensor) -> torch.Tensor:
    """Return a fake tensor of the same storage, sizes, strides and offset, which has no base."""
    if view.is_conj() or view.is_neg():
        raise UnportableError("it holds a view that is conjugated or negated")
    with view.fake_mode:
        alias = torch.empty(0, dtype=view.dtype, device=view.device)
        alias.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
    return alias.requires_grad_(view.requires_grad)


def _check_graph(gm: GraphModule, known: Callable[[str], bool]) -> None:
    try:
        FxGraphCache._check_can_cache(gm)
    except BypassFxGraphCache as error:
        raise UnportableError(f"Inductor's cache does not take it: {_one_line(error)}") from error
    if has_frozen_params(gm):
        raise UnportableError("it holds frozen weights")
    nodes = [node for each in gm.modules() if isinstance(each, GraphModule) for node in each.graph.nodes]
    for target in {node.target for node in nodes if node.op == "call_function"}:
        if isinstance(target, OpOverload) and target.namespace not in NAMESPACES and not known(target._schema.name):
            raise UnportableError(f"it calls {target._schema.name}, which a worker does not have")
    # torch 2.11's function does not look into dictionaries, which Triton's kernels return.
    if any(free_unbacked_symbols(tree_leaves(node.meta.get("val"))) for node in nodes):
        raise UnportableError("some of its sizes depend on data")
    constants = [value for value in _constants(gm) if isinstance(value, torch.Tensor)]
    if any(not value.is_cpu or value.is_mkldnn for value in constants):
        raise UnportableError("it holds constants that are not in the memory of the CPU")
    if (size := sum(value.nbytes for value in constants)) > LARGEST_CONSTANTS:
        raise UnportableError(f"it holds {size} bytes of constants")


# ---- Triton's kernels that a graph launches


def _launches(gm: GraphModule) -> list[Node]:
    nodes = [node for each in gm.modules() if isinstance(each, GraphModule) for node in each.graph.nodes]
    return [node for node in nodes if getattr(node.target, "__name__", "") in LAUNCHES]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A kernel that a node launches, by the name that a module has for it, and what is no part of the node.

    Where the node asks for a number of warps or stages, torch wraps the kernel in an autotuner with these `configs`.
    """

    module: str
    name: str
    configs: Sequence[Any] | None
    constant_args: dict[str, Any]


def _launched(node: Node) -> _Launched:
    numbers: Mapping[str, Any] = node.kwargs
    kernel: Any = kernel_side_table.get_kernel(numbers["kernel_idx"])
    function = kernel
    while not isinstance(function, FunctionType):  # what decorators have made of it
        function = function.fn
    module, name = function.__module__, function.__qualname__
    constant_args = kernel_side_table.get_constant_args(numbers["constant_args_idx"])
    if module != "__main__":
        if _found(module, name) is kernel:
            return _Launched(module, name, None, constant_args)
        for path in (name, f"{name}.fn"):  # the module's may have configurations of its own
            if _only_adds_configs(kernel) and _found(module, path) is kernel.fn:
                return _Launched(module, path, kernel.configs, constant_args)
    raise UnportableError(f"it launches {name}, which only the running program has")


def _only_adds_configs(kernel: Any) -> bool:
    """Return whether a kernel is an autotuner that does nothing but choose among its configurations."""
    from triton.runtime.autotuner import Autotuner  # type: ignore[import-untyped,unused-ignore]

    if not isinstance(kernel, Autotuner):
        return False
    hooks = kernel.user_defined_pre_hook, kernel.user_defined_post_hook, kernel.reset_to_zero, kernel.restore_value
    return not (kernel.keys or any(hooks) or kernel.perf_model or kernel.early_config_prune)


def _number(node: Node, launched: _Launched) -> None:
    """Give a node the numbers that the kernel and the arguments have here."""
    from triton import autotune  # type: ignore[import-untyped,unused-ignore]

    import_module(launched.module)
    kernel: Any = _found(launched.module, launched.name)
    if launched.configs is not None:
        kernel = autotune(configs=launched.configs, key=[])(kernel)
    numbers = kernel_side_table.add_kernel(kernel), kernel_side_table.add_constant_args(launched.constant_args)
    node.kwargs = {**node.kwargs, "kernel_idx": numbers[0], "constant_args_idx": numbers[1]}


def _constants(gm: GraphModule) -> list[object]:
    """Return what nodes of the graph and of graphs inside read as attributes."""
    modules = [
        (vars(each).values(), each.parameters(recurse=False), each.buffers(recurse=False)) for each in gm.modules()
    ]
    return [value for values in modules for kind in values for value in kind]


def _check_inputs(example_inputs: Sequence[Any]) -> None:
    for value in example_inputs:
        if not isinstance(value, FakeTensor | int | torch.SymInt):
            raise UnportableError(f"one of its inputs is a {type(value).__name__}")


def _is_importable(obj: Any) -> bool:
    """Return whether a class or function is where its name says, in a module that is not the program itself."""
    return obj.__module__ != "__main__" and _found(obj.__module__, obj.__qualname__) is obj


def _found(module: str, name: str) -> object:
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _by_name(stack: Any) -> Any:
    """Return a stack of (name, function) with names of functions, which is what Inductor reads; None stays.

    It is None on a backward node whose forward node a rewrite has inserted.
    """
    return stack and [(name, getattr(function, "__name__", str(function))) for name, function in stack]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
