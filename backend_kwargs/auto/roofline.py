"""The time that a graph's kernels could save: the device's minimum, and where a compiled graph exceeds it.

All is predicted from one timing of default, or of CUDA graphs where an eager call waits for launches, and without a
profiler: the user may be running one.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch

from backend_kwargs import measure
from backend_kwargs.auto.candidates import Part
from backend_kwargs.auto.graph_stats import GraphStats, Product
from backend_kwargs.measure.generators import SEED
from backend_kwargs.measure.trees import tensors_of
from backend_kwargs.torch_internals import pytree

LAUNCHED = 0.25  # of an eager call that waits for launches, the least that default's took on eight models: 0.34 to 0.52
LAUNCH_S = 2e-6  # per kernel on a CPU, from Python; on a GPU the gaps between kernels are measured


@dataclass(frozen=True, slots=True)
class Slack:
    """The seconds that a call could save at most, by the part that a candidate improves.

    `launches` is the time in which the device waits for the host; `library` the time of products, convolutions and
    attention beyond what their flops and bytes need, `unaligned` what unaligned products contribute to it; `generated`
    that of all other kernels beyond what the graph's bytes need. `saves` sums the parts in `shares`, each times its
    share.
    """

    launches: float
    library: float
    generated: float
    unaligned: float = 0.0

    def __str__(self) -> str:
        parts = ("launches", "library", "generated")
        return ", ".join(f"{getattr(self, part) * 1e6:.1f} µs ({part})" for part in parts)

    def scaled(self, factor: float) -> "Slack":
        """Return the slack of the same graph with kernels that take `factor` of their time."""
        return Slack(self.launches, self.library * factor, self.generated * factor, self.unaligned * factor)

    def saves(self, shares: Mapping[Part, float]) -> float:
        """Return the seconds saved by a candidate that removes these shares."""
        return float(sum(share * getattr(self, part) for part, share in shares.items()))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes per second of a copy and of a fill, flops per second of a product in bf16 and in fp32."""

    copy: float
    fill: float
    half: float
    single: float

    def product_s(self, product: Product) -> float:
        """Return the minimum seconds of a library kernel."""
        peak = self.half if product.itemsize <= 2 else self.single
        return max(product.flops / peak, self.traffic_s(product.bytes - product.written, product.written))

    def traffic_s(self, read: float, written: float) -> float:
        """Return the minimum seconds for so many bytes that are `read` and `written`.

        Memory has the speed of a copy for as many bytes as are both read and written, and the speed of a fill for the
        rest: a kernel that only reads reaches 0.99 of it (H200).
        """
        copied = 2 * min(read, written)
        return copied / self.copy + (read + written - copied) / self.fill


def seconds_of_traffic(moved: float, device: torch.device) -> float:
    """Return the seconds that a copy takes to move so many bytes, read and written; 0 where unknown."""
    return moved / _ceilings(device).copy if device.type == "cuda" else 0.0


def limit_of(stats: GraphStats, device: torch.device) -> float:
    """Return the minimum seconds: bytes at the memory's speed, or flops at a matmul's; 0 if unknown."""
    if not stats.gpu:
        return 0.0
    ceilings = _ceilings(device)
    return max(ceilings.traffic_s(stats.bytes_read, stats.bytes_written), stats.flops / ceilings.half)


def slack_of(
    call: Callable[[], object],
    seconds: float,
    stats: GraphStats,
    library: Mapping[Product, float],
    device: torch.device,
) -> Slack:
    """Return the slack of `call`, which takes `seconds`.

    On a GPU the kernels' time is measured with their launches queued ahead; library kernels are eager's, timed alone.
    On a CPU kernels cannot be told from the code that calls them: there each operator counts as a launch, and the limit
    is unknown.
    """
    if stats.opaque:  # its operators are not known
        return Slack(seconds, seconds, seconds, seconds)
    spent = sum(product.count * seconds for product, seconds in library.items())
    if device.type != "cuda":
        launches = min(stats.ops * LAUNCH_S, seconds)
        return Slack(launches, min(spent, seconds), max(seconds - spent, 0.0))
    busy = min(measure.device_seconds(call, device), seconds)
    ceilings, excess = _ceilings(device), excess_of(library, device)
    unaligned = sum(seconds for product, seconds in excess.items() if product.unaligned)
    # Except for inputs of the graph, all that products read and write passes through other kernels and memory.
    moved = sum(product.activations * product.count for product in stats.products) / ceilings.copy
    generated = min(busy - spent - moved, busy - limit_of(stats, device))
    return Slack(seconds - busy, min(sum(excess.values()), busy), max(generated, 0.0), min(unaligned, busy))


def excess_of(library: Mapping[Product, float], device: torch.device) -> dict[Product, float]:
    """Return the seconds of a call that each library kernel takes beyond what its flops and bytes need, on a GPU."""
    ceilings = _ceilings(device)
    return {p: max(each - ceilings.product_s(p), 0.0) * p.count for p, each in library.items()}


def time_library(products: Iterable[Product], device: torch.device) -> dict[Product, float]:
    """Return the seconds of each library kernel alone, on random inputs of the same layout.

    Omits operators that take indices or a state besides their operands, or cannot run alone.
    """
    seconds = {}
    for product in products:
        operator, *arguments = product.call
        if all(tensor.is_floating_point() or not tensor.is_meta for tensor in tensors_of(arguments)):
            with contextlib.suppress(Exception):
                args, kwargs = pytree.tree_map_only(torch.Tensor, partial(_random_like, device=device), arguments)
                seconds[product] = measure.device_seconds(partial(operator, *args, **kwargs), device)
    return seconds


def _random_like(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return random numbers in the layout of a tensor on the meta device, zeros of other types; offsets as they are."""
    if not meta.is_meta:
        return meta
    values = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
    return _normal(values) if values.is_floating_point() and values.itemsize > 1 else values.zero_()


def _normal(values: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with random numbers from a generator of its own."""
    return values.normal_(generator=torch.Generator(values.device).manual_seed(SEED))


@cache
def _ceilings(device: torch.device) -> Ceilings:
    """Measure what the device can do, once per process; takes milliseconds."""
    try:
        return _measured(device)
    except Exception:  # noqa: BLE001 - such as too little memory: then no kernel counts as at its limit
        return Ceilings(math.inf, math.inf, math.inf, math.inf)


def _measured(device: torch.device) -> Ceilings:
    row = _normal(torch.empty(1 << 26, device=device))
    square = _normal(torch.empty(8192, 8192, device=device, dtype=torch.bfloat16))
    single = _normal(torch.empty(4096, 4096, device=device))
    calls: dict[str, Callable[[], object]] = {
        "copy": partial(torch.clone, row),
        "fill": row.zero_,
        "half": partial(torch.mm, square, square),
        "single": partial(torch.mm, single, single),
    }
    seconds = {name: min(samples) for name, samples in measure.interleave(calls, rounds=5, device=device).items()}
    return Ceilings(
        2 * row.nbytes / seconds["copy"],
        row.nbytes / seconds["fill"],
        2 * 8192**3 / seconds["half"],
        2 * 4096**3 / seconds["single"],
    )
