"""Statistics of a graph, counted during a run in eager of its own; they decide which candidates can gain."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from backend_kwargs.options.option import Options
from backend_kwargs.torch_internals.replacing import undone
from backend_kwargs.torch_internals.tensors import OperatorMode
from backend_kwargs.trial.trees import tensors_of

GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"})
CONVOLUTIONS = ("convolution", "cudnn_conv")
TANH_GELU, GROUPED = "gelu of tanh", "convolution in groups"  # among the names of operators
OF_TORCH = ("aten", "prims")  # namespaces of operators
NORMS = ("softmax", "layer_norm", "group_norm", "batch_norm", "rms_norm")  # and other reductions of several operators
ATTENTIONS = ("scaled_dot_product", "flex_attention")


@dataclass(frozen=True, slots=True)
class GraphStats:
    """One graph on one device: `ops` counts the operators run in eager, bytes are of unique inputs and of outputs.

    `layouts` counts the different layouts of GEMMs, convolutions and attentions. `names` are those of the operators,
    and of some kinds of them. `opaque` graphs contain operators that cannot be counted. `frozen` counts the parameters
    that become constants, since the caller set `freezing`. `custom` graphs contain operators that are not torch's.
    `flops` are those of products, convolutions and attention.
    """

    device: str
    ops: int
    gemms: int
    convolutions: int
    reductions: int
    softmaxes: int
    attentions: int
    bytes_read: float
    bytes_written: float
    random: bool
    training: bool
    writes: bool
    dynamic: bool
    opaque: bool = False
    frozen: int = 0
    layouts: int = 0
    names: frozenset[str] = frozenset()
    custom: bool = False
    flops: float = 0.0

    @property
    def gpu(self) -> bool:
        """Whether it runs on a CUDA device."""
        return self.device == "cuda"

    @property
    def fused(self) -> int:
        """How many operators Inductor has kernels of its own for."""
        return max(self.ops - self.gemms - self.convolutions - self.attentions, 0)

    @property
    def matmul(self) -> bool:
        """Whether it contains operators for which max_autotune has kernels."""
        return bool(self.gemms or self.convolutions or self.attentions)

    def __str__(self) -> str:
        counts = [(self.gemms, "GEMM"), (self.convolutions, "convolution"), (self.reductions, "reduction")]
        parts = [f"{n} {what}{'' if n == 1 else 's'}" for n, what in [(self.ops, "op"), *counts] if n or what == "op"]
        marks = [word for word in ("training", "random", "writes", "dynamic") if getattr(self, word)]
        return ", ".join([*parts, *marks])


class _Counting(OperatorMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run under it, and describes the products among them."""

    def __init__(self) -> None:
        super().__init__(self.called)
        self.names: Counter[str] = Counter()
        self.tags: Counter[torch.Tag] = Counter()
        self.opaque = False
        self.custom = False
        self.layouts: set[str] = set()
        self.kinds: set[str] = set()
        self.flops = 0.0

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Options) -> object:
        """Count the operator, and none of those inside it."""
        self.names[func.__name__] += 1
        self.opaque |= any(map(callable, args))
        return func(*args, **kwargs)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: Options) -> object:
        """Count an operator."""
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        self.custom |= func.namespace not in OF_TORCH
        if not getattr(func, "is_view", False):
            self.names[packet.__name__] += 1
            # Attention is tagged as random because of its dropout; the generators show whether it drew.
            attends = any(part in packet.__name__ for part in ATTENTIONS)
            self.tags.update(tag for tag in func.tags if not (attends and tag == torch.Tag.nondeterministic_seeded))
        if packet.__name__ == "gelu" and kwargs.get("approximate") == "tanh":
            self.kinds.add(TANH_GELU)
        if packet.__name__ == "convolution" and args[-1] != 1:
            self.kinds.add(GROUPED)
        if flops_of := flop_registry.get(packet):
            with suppress(Exception):  # such as of tensors that are not strided
                self.flops += flops_of(*args, **kwargs, out_val=result)
        if _is_product(name := packet.__name__):
            operands = tensors_of((args, kwargs))
            self.layouts.add(f"{name}{[(tuple(t.shape), t.stride(), t.dtype) for t in operands]}")
        return result


def observed_stats(run: Callable[[], object], **known: Any) -> GraphStats:
    """Run `run` and return the stats; `known` gives those that operators do not show."""
    counting = _Counting()
    with undone() as stack:
        stack.enter_context(counting)
        result = run()
    names = counting.names

    def count(test: Callable[[str], bool]) -> int:
        return sum(number for name, number in names.items() if test(name))

    return GraphStats(
        ops=sum(names.values()),
        gemms=count(lambda name: name in GEMMS),
        convolutions=count(lambda name: name.startswith(CONVOLUTIONS)),
        reductions=counting.tags[torch.Tag.reduction] + count(lambda name: any(part in name for part in NORMS)),
        softmaxes=count(lambda name: "softmax" in name),
        attentions=count(lambda name: any(part in name for part in ATTENTIONS)),
        bytes_written=float(sum(tensor.numel() * tensor.itemsize for tensor in tensors_of(result))),
        opaque=counting.opaque,
        custom=counting.custom,
        layouts=len(counting.layouts),
        names=frozenset({*names, *counting.kinds}),
        flops=counting.flops,
        random=bool(counting.tags[torch.Tag.nondeterministic_seeded]),
        **known,
    )


def calls_a_library(func: Any) -> bool:
    """Return whether an operator is one that Inductor calls: a product, convolution, attention, or none of torch's."""
    return func.namespace not in (*OF_TORCH, "profiler") or _is_product(func.overloadpacket.__name__)


def _is_product(name: str) -> bool:
    return name in GEMMS or name.startswith(CONVOLUTIONS) or any(part in name for part in ATTENTIONS)
