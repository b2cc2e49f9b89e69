"""Counts of a graph that decide which candidates can pay, taken while it runs once in eager."""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

PADDED = frozenset({"mm", "addmm", "bmm", "baddbmm"})  # what force_shape_pad may pad
GEMMS = PADDED | {"_int_mm", "_scaled_mm", "_grouped_mm"}
NARROW = frozenset({"_int_mm", "_scaled_mm", "_scaled_grouped_mm"})  # whose speed no product in bf16 tells
CONVOLUTIONS = ("convolution", "cudnn_conv")
ATTENTIONS = ("scaled_dot_product", "flex_attention")


@dataclass(frozen=True, slots=True)
class Product:
    """A product, convolution or attention of one layout: how often it runs, its flops and bytes.

    `activations` are the bytes that other kernels write for it and read of it: all but those of the graph's inputs.
    `call` is the operator with its arguments, whose tensors are on the meta device.
    """

    layout: str
    count: int
    flops: float
    bytes: float
    activations: float
    itemsize: int
    call: tuple[Any, tuple[Any, ...], dict[str, Any]] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class GraphStats:
    """One graph on one device: `ops` counts what ran in eager, bytes are those of unique inputs and of outputs.

    `flops` leave out products of 8 bits, which run at another speed. `unaligned` counts the GEMMs with rows that do not
    begin at multiples of 16 bytes; `opaque` graphs hold others, whose operators are not counted.
    """

    device: str
    ops: int
    gemms: int
    unaligned: int
    convolutions: int
    reductions: int
    softmaxes: int
    attentions: int
    flops: float
    bytes_read: float
    bytes_written: float
    random: bool
    training: bool
    writes: bool
    dynamic: bool
    opaque: bool = False
    products: tuple[Product, ...] = ()

    @property
    def gpu(self) -> bool:
        """Whether it runs on a CUDA device."""
        return self.device == "cuda"

    @property
    def matmul(self) -> bool:
        """Whether it holds what max_autotune has kernels for."""
        return bool(self.gemms or self.convolutions or self.attentions)

    def __str__(self) -> str:
        counts = [(self.gemms, "GEMM"), (self.convolutions, "convolution"), (self.reductions, "reduction")]
        parts = [f"{n} {what}{'s' if n > 1 else ''}" for n, what in counts if n]
        marks = [word for word in ("training", "random", "writes", "dynamic") if getattr(self, word)]
        return ", ".join([f"{self.ops} ops", *parts, *marks])


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, inputs: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = inputs
        self.names: Counter[str] = Counter()
        self.tags: Counter[torch.Tag] = Counter()
        self.flops = 0.0
        self.unaligned = 0
        self.opaque = False
        self.products: dict[str, Product] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):  # what it holds is not counted
            self.names[func.__name__] += 1
            self.opaque |= any(map(callable, args))
            return func(*args, **kwargs)
        with self:  # in inference mode composite operators come whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if not getattr(func, "is_view", False):
            self.names[packet.__name__] += 1
            # Attention is tagged as random for the sake of its dropout; where it draws, the generators tell.
            attends = any(part in packet.__name__ for part in ATTENTIONS)
            self.tags.update(tag for tag in func.tags if not (attends and tag == torch.Tag.nondeterministic_seeded))
        if packet.__name__ in PADDED:
            self.unaligned += any(map(_is_unaligned, (*args, result)))
        if (
            packet.__name__ in GEMMS | NARROW
            or packet.__name__.startswith(CONVOLUTIONS)
            or any(part in packet.__name__ for part in ATTENTIONS)
        ):
            self._count_product(func, args, kwargs, result)
        return result

    def _count_product(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, flops = func._overloadpacket.__name__, 0.0
        if name not in NARROW:
            with contextlib.suppress(Exception):  # torch's own count refuses some shapes, grouped queries say
                flops = float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        self.flops += flops
        on_meta = pytree.tree_map_only(torch.Tensor, _on_meta, (args, kwargs))
        operands = _tensors(on_meta)
        layout = f"{name}{[(tuple(t.shape), t.stride(), t.dtype) for t in operands]}"
        given, made = (_tensors(tree) for tree in ((args, kwargs), result))
        once = Product(
            layout,
            0,
            flops,
            float(sum(t.nbytes for t in (*given, *made))),
            float(sum(t.nbytes for t in (*given, *made) if t.untyped_storage()._cdata not in self.inputs)),
            min(t.itemsize for t in operands),
            (func, *on_meta),
        )
        seen = self.products.get(layout, once)
        self.products[layout] = replace(seen, count=seen.count + 1)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def observed_stats(
    run: Callable[[], Any], bytes_of: Callable[[Any], float], inputs: Collection[int] = (), **known: Any
) -> tuple[Any, GraphStats]:
    """Return what `run` gives and the stats of what it does; `known` are those that no operator tells.

    `inputs` are the storages of the graph's inputs.
    """
    seen = _Seen(inputs)
    with contextlib.ExitStack() as stack, stack:  # the outer one leaves it where a Ctrl-C keeps the inner one from it
        stack.enter_context(seen)
        result = run()
    named = seen.names

    def count(test: Callable[[str], bool]) -> int:
        return sum(number for name, number in named.items() if test(name))

    stats = GraphStats(
        ops=sum(named.values()),
        gemms=count(lambda name: name in GEMMS),
        unaligned=seen.unaligned,
        convolutions=count(lambda name: name.startswith(CONVOLUTIONS)),
        reductions=seen.tags[torch.Tag.reduction] + count(_is_composite_reduction),
        softmaxes=count(lambda name: "softmax" in name),
        attentions=count(lambda name: any(part in name for part in ATTENTIONS)),
        flops=seen.flops,
        bytes_written=bytes_of(result),
        opaque=seen.opaque,
        products=tuple(seen.products.values()),
        random=bool(seen.tags[torch.Tag.nondeterministic_seeded]),
        **known,
    )
    return result, stats


def _is_composite_reduction(name: str) -> bool:
    return any(part in name for part in ("softmax", "layer_norm", "group_norm", "batch_norm", "rms_norm"))


def _is_unaligned(operand: Any) -> bool:
    """Tell whether rows (or columns, where those are in line) begin elsewhere than at multiples of 16 bytes."""
    if not isinstance(operand, torch.Tensor) or operand.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    sizes = zip(operand.shape[-2:], operand.stride()[-2:], strict=True)
    return any(size > 1 and stride > 1 and stride * operand.itemsize % 16 for size, stride in sizes)
