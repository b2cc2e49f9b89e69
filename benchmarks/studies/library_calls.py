"""The calls of models that Inductor leaves to libraries or cannot fuse, by kind: their seconds above the GPU's limit.

    python -m benchmarks headroom --kinds drawn

A model runs in eager once, in training with the backward pass; each call with other sizes is then timed by itself. So
the table shows where a rewrite could gain most, whether one covers it or not: products, convolutions, attention,
gathers, scatters, pooling, sorting. An interrupt ends it, and the table has the models up to then.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from backend_kwargs import trial
from backend_kwargs.graphs.spelling import layout_of
from backend_kwargs.tables import as_text
from backend_kwargs.torch_internals.device_peaks import peaks_of
from backend_kwargs.torch_internals.replacing import undone
from backend_kwargs.torch_internals.tensors import OperatorMode
from backend_kwargs.trial.trees import tensors_of
from benchmarks.workloads.drawn import DRAWS, MODELS

Say = Callable[[str], None]
MOST = 20  # rows
FAMILIES = re.compile(
    "_*(index|gather|scatter|embedding|upsample|avg_pool|max_pool|sort|topk|cum|fft|grouped_mm|scaled_dot_product)"
)


@dataclass
class Call:
    """Calls of one operator with such inputs: how many, and the least that the device could take, 0 if not known."""

    kind: str
    inputs: str
    limit_s: float
    count: int = 0
    seconds: float = 0.0

    @property
    def above_s(self) -> float:
        """The seconds that all of them take beyond the limit."""
        return self.count * max(self.seconds - self.limit_s, 0.0)


def _subkind(name: str, given: Sequence[torch.Tensor], args: Sequence[Any]) -> str:
    """Return what makes a convolution or a product slow by its sizes: its window, groups, no alignment."""
    if "convolution" in name:
        backward = "backward" in name
        weight, groups = given[1 + backward], args[-1 - backward]
        how = "" if groups == 1 else " depthwise" if weight.shape[1] == 1 else " in groups"
        return f" {'x'.join(map(str, weight.shape[2:]))}{how}"
    unaligned = any(size % 8 for each in given for size in each.shape[-2:])
    return " unaligned" if unaligned and re.search("mm|attention", name) else ""


def _limit_s(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> float:
    tensors = tensors_of((args, kwargs, result))
    dtype = next((each.dtype for each in tensors if each.is_floating_point()), torch.float32)
    if (peaks := peaks_of(tensors[0].device, dtype)) is None:
        return 0.0
    flops = 0.0
    with suppress(Exception):  # it is not in the registry, or is called otherwise
        flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
    moved = sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in tensors)
    return max(moved / peaks.bytes_per_s, flops / peaks.flops_per_s)


def calls_of(
    model: Callable[..., object], inputs: Sequence[Any], device: torch.device, *, training: bool = False
) -> list[Call]:
    """Return the calls of a model, timed; in training those of its backward pass too."""
    found: dict[tuple[str, str], tuple[Call, Callable[[], object]]] = {}

    def called(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """Call an operator; keep the first of its calls with such inputs, and count them."""
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not func.is_view and (func.overloadpacket in flop_registry or FAMILIES.match(name)):
            given = tensors_of((args, kwargs))
            inputs = f"{', '.join(map(layout_of, given))} {[each for each in args if not tensors_of(each)] or ''}"
            if (key := (str(func), inputs)) not in found:
                kind = f"{name} {str(given[0].dtype).removeprefix('torch.')}{_subkind(name, given, args)}"
                call = Call(kind, inputs, _limit_s(func, args, kwargs, result))
                found[key] = call, partial(func, *args, **kwargs)
            found[key][0].count += 1
        return result

    with undone() as stack, torch.set_grad_enabled(training):
        stack.enter_context(OperatorMode(called))
        result = model(*inputs)
        if training:
            torch.autograd.backward(tensors_of(result))
    with torch.no_grad():
        for call, run in found.values():
            call.seconds = trial.device_seconds(run, device)
    return [call for call, _ in found.values()]


def table(by_model: Mapping[str, Sequence[Call]]) -> str:
    """Return the kinds as text, those first that are most above the limit."""
    kinds: dict[str, list[tuple[str, Call]]] = {}
    for model, calls in by_model.items():
        for each in calls:
            kinds.setdefault(each.kind, []).append((model, each))
    rows = sorted(kinds.items(), key=lambda each: -sum(call.above_s for _, call in each[1]))
    return as_text(("kind", "models", "calls", "ms", "ms above the limit", "most in"), starmap(_row, rows[:MOST]))


def _row(name: str, found: Sequence[tuple[str, Call]]) -> tuple[str, ...]:
    models, calls = zip(*found, strict=True)
    most = max(calls, key=lambda each: each.above_s)
    times = f", {most.seconds / most.limit_s:.1f}x its limit" if most.limit_s else ""
    sums = map(sum, zip(*((each.count, each.count * each.seconds, each.above_s) for each in calls), strict=True))
    where = f"{most.count}x {most.seconds * 1e6:.0f} µs{times}: {most.inputs}"
    return name, str(len({*models})), str(next(sums)), *(f"{each * 1e3:.2f}" for each in sums), where


def measure_kinds(names: Sequence[str], device: str, say: Say) -> str:
    """Return the table of models of the suite: by name, by the seed of a draw, or "drawn"."""
    where, found = torch.device(device), dict[str, list[Call]]()
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    for name in DRAWS.get(",".join(names), names):
        try:
            of = MODELS[name]
            model, inputs = of.build(where, dtype, "full" if device != "cpu" else "tiny")
            found[name] = calls_of(model, inputs, where, training=of.training)
            say(f"{name}: {len(found[name])} kinds of calls")
        except KeyboardInterrupt:
            say(f"{name}: interrupted")
            break
        except Exception as error:  # noqa: BLE001 - a model that does not run here says nothing of others
            say(f"{name}: {type(error).__name__}: {error}")
    return table(found)
