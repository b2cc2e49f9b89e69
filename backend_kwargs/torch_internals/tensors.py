"""Tensors, operators on them, and the modes in which they run.

What torch keeps of a tensor: version, memory, views, bits; of a module: what it has registered; and fake tensors.
Operators have classes, schemas, kernels, effects; a thread has modes: dispatch, gradients, autocast, transforms.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch._C import _DisableTorchDispatch as WithoutDispatch
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._autograd import _profiler_enabled as is_profiled
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload, OpOverloadPacket
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes, suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.fx import _lazy_graph_module
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from backend_kwargs.torch_internals import pytree

# Functions of C, since they are called for each parameter at each call of a frozen graph.
version_of = attrgetter("_version")  # counts changes in place; inference tensors have none, and raise
copy_each = torch._foreach_copy_  # one call for all, so a Ctrl-C comes before it or after it
negative_view = torch._neg_view  # a view with the negative bit flipped
base_of = attrgetter("_base")  # the tensor of which autograd knows this one to be a view, or None
is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view  # whether `base_of` is not None


def counted_writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else version_of(tensor)


def memory_id(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common that share memory; once they are freed, it may be used again."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def with_bits_of(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a view of `value` whose conjugate and negative bits are flipped where those of `like` are set."""
    value = value.conj() if like.is_conj() else value
    return negative_view(value) if like.is_neg() else value


def in_storage(storage: torch.UntypedStorage, like: torch.Tensor, offset: int | None = None) -> torch.Tensor:
    """Return the tensor in other memory that is laid out like this one; no view, which dynamo traces in another way.

    It begins where this one does, or at `offset`.
    """
    begin = like.storage_offset() if offset is None else offset
    there = torch.empty(0, dtype=like.dtype, device=storage.device).set_(storage, begin, like.size(), like.stride())
    return with_bits_of(like, there)


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors whose addresses intersect may have an element in common, as AOTAutograd asks it."""
    if memory_id(one) != memory_id(other) or one is other:
        return True
    return bool(torch._C._dynamo.guards.compute_overlapping_tensors([one, other], symbolic=False))


def has_static_address(value: object) -> bool:
    """Return whether dynamo marks a tensor to stay where it is, so that CUDA graphs need not copy it."""
    return bool(getattr(value, "_dynamo_static_input_type", None))


def has_plain_dispatch(value: torch.Tensor) -> bool:
    """Return whether a tensor's class leaves dispatch as it is, so that AOTAutograd does not unwrap it."""
    return type(value).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


# Whether one of `torch.func`'s transforms has wrapped a tensor.
is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `torch.func`'s transforms have wrapped, which has the memory."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def same_layouts(tensors: Sequence[torch.Tensor]) -> torch._C._dynamo.guards.TensorGuards:
    """Return dynamo's guards, called by `check(*tensors)`: class, dtype, device, sizes, strides and bits of tensors.

    They also fail if one tensor is given twice and in another mode, such as inference_mode, and cost a fifth of the
    same in Python. Without gradient mode they ignore `requires_grad`.
    """
    sizes: Any = [[*tensor.size()] for tensor in tensors]
    strides: Any = [[*tensor.stride()] for tensor in tensors]
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


# Queues a kernel on the current CUDA stream that does nothing for so many cycles.
keep_device_busy: Callable[[int], None] = torch.cuda._sleep


def allowed_attention() -> str:
    """Return the kernels that scaled_dot_product_attention may choose, which torch's own keys of caches ignore."""
    backends: Any = torch.backends.cuda
    kinds = (backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.math_sdp_enabled)
    order = torch._C._get_sdp_priority_order()
    return f"{[allowed() for allowed in (*kinds, backends.cudnn_sdp_enabled)]} {order}"


# The functions of C behind torch.nn.functional's, which dynamo puts into graphs.
cross_entropy_loss, linear = torch._C._nn.cross_entropy_loss, torch._C._nn.linear

# The same, and `torch.func`'s transforms: functions that write only into what their names, signatures and schemas say.
WRITES_AS_DECLARED = frozenset({"torch._functorch.predispatch", "torch._functorch.eager_transforms"}) | {
    f"torch._C._{name}" for name in ("nn", "autograd", "fft", "functorch", "linalg", "special")
}


def replace_tensors(module: torch.nn.Module, made_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer, as the module does it: `Module.to` would make complex ones real."""
    module._apply(made_of)  # type: ignore[no-untyped-call]


# Makes graphs of the class that dynamo makes, whose code is generated when they are called.
dynamos_graph_class: Callable[[], AbstractContextManager[None]] = partial(
    _lazy_graph_module._use_lazy_graph_module, True
)


# Functions of dynamo's graphs whose results depend on their arguments alone.
AUTOCAST_FUNCTIONS = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which `called` runs each operator that is not decomposed, also those in graphs of higher-order ones."""

    supports_higher_order_operators = True

    def __init__(self, called: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._called = called

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """Return the result of an operator that runs graphs."""
        args, kwargs = pytree.tree_map(self._within, (args, kwargs))
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self.higher_order(func, args, kwargs)
        if func.namespace == "prim":  # an attribute of a fake tensor, as its device
            return func(*args, **kwargs)
        with self:  # in inference mode composite operators are not decomposed before they arrive here
            result = func.decompose(*args, **kwargs)
        return self._called(func, args, kwargs) if result is NotImplemented else result

    def _within(self, leaf: Any) -> Any:
        """Return a graph of a higher-order operator as a function that runs in this mode; other leaves as they are."""
        if not callable(leaf) or isinstance(leaf, torch.Tensor):
            return leaf

        def run(*args: object, **kwargs: object) -> object:
            with self:
                return leaf(*args, **kwargs)

        return run


def saves_by_hooks() -> bool:
    """Return whether hooks change what autograd saves for the backward pass."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def modes_restored() -> Iterator[None]:
    """Restore the modes that a graph sets and, where a call raises in between, does not reset.

    They are those of `torch.func`'s transforms, which a graph enters and leaves by separate calls, and the grad mode.
    """
    functorch = torch._C._functorch
    depth, in_place = functorch.get_dynamic_layer_stack_depth(), functorch.get_inplace_requires_grad_allowed()
    grad, forward_grad = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        functorch.set_inplace_requires_grad_allowed(in_place)
        if torch.autograd.forward_ad._current_level < 0:  # the user has entered none, and levels do not nest
            with suppress(RuntimeError):
                torch._C._exit_dual_level(level=0)
        set_grad_enabled(grad)
        torch._C._set_fwd_grad_enabled(forward_grad)
        if no_hooks is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(no_hooks)


def modes_of_thread() -> Callable[[], AbstractContextManager[None]]:
    """Return what enters the gradient mode, inference mode and autocast of this thread now, in any thread later."""
    grad, inference, cache = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
    )
    autocasts = {kind: _autocast(kind) for kind in ("cpu", "cuda")}

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, (enabled, dtype) in autocasts.items():
                if _autocast(kind) != (enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield

    return entered


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


# Namespaces of torch's own operators, whose tags say what they do.
OPERATORS = {"aten", "inductor", "mkldnn", "prims", "profiler", "quantized", "quantized_decomposed", "rngprims"}


def overloads_of(target: object) -> list[Any]:
    """Return the overloads of an operator's packet, and anything else as it is."""
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    return [target]


def schema_of(target: object) -> Any:
    """Return the schema of an overload, None for anything that has no schema."""
    return getattr(target, "_schema", None)


# The arguments that an overload's schema declares.
arguments_of: Callable[[OpOverload], list[torch.Argument]] = attrgetter("_schema.arguments")


def name_of(target: OpOverload | OpOverloadPacket) -> str:
    """Return the name of an operator with its namespace and without its overload: "aten::add"."""
    return target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name


def has_kernel(op: OpOverload, key: str = "") -> bool:
    """Return whether an overload has a kernel, for the dispatch key `key` if that is given; TorchScript's have none."""
    if key:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op._name, key)
    return torch._C._dispatch_has_kernel(op._name)


def is_composite(op: OpOverload) -> bool:
    """Return whether torch decomposes an operator for every backend: it has no kernel of its own on a CPU or a GPU."""
    keys = torch._C.DispatchKey
    whole = any(map(op.has_kernel_for_dispatch_key, (keys.CPU, keys.CUDA)))
    return not whole and bool(op.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd))


def has_effects(target: object) -> bool:
    """Return whether an operator has a registered effect, such as printing."""
    from torch._higher_order_ops import effects

    return any(map(effects.has_effects, overloads_of(target)))


def is_custom(op: OpOverload) -> bool:
    """Return whether `torch.library.custom_op` made an operator, whose kernel for autograd calls it again."""
    from torch._library.custom_ops import OPDEFS

    return op._schema.name in OPDEFS


def has_dispatch_rules(op: OpOverload) -> bool:
    """Return whether rules for dispatch modes are registered for an operator."""
    from torch._library.simple_registry import singleton

    return bool(singleton.find(op._schema.name).torch_dispatch_rules._data)


def is_lowered_by_inductor(op: OpOverload) -> bool:
    """Return whether Inductor has a decomposition of an operator, or lowers it."""
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    return op in decompositions or op in lowerings


def aten_names() -> set[str]:
    """Return the names of ATen's operators."""
    known = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return {name.partition(".")[0] for namespace, _, name in known if namespace == "aten"}


def decompose_in_inductor(op: OpOverload, rule: Callable[..., object]) -> None:
    """Let Inductor decompose an operator of this package, for good."""
    from torch._inductor import decomposition

    # Both tables: the second is a copy of the first, which Inductor made once and keeps.
    for table in (decomposition.decompositions, decomposition.select_decomp_table()):
        table[op] = rule


def store_in_inductor(op: OpOverload) -> None:
    """Let Inductor write to memory what an operator of this package is given, in place of a call, for good.

    Of itself it computes what is pointwise again wherever that is read, unless it reads five tensors or more.
    """
    from torch._inductor.lowering import register_lowering

    def lower(x: Any) -> Any:
        x.realize()
        return x

    register_lowering(op, type_promotion_kind=None)(lower)
