"""The candidates of a race by expected gain: steps, merged onto the current best's options, or whole templates."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from backend_kwargs.errors import BackendKwargsError, unknown
from backend_kwargs.layers import same
from backend_kwargs.rewrites import list_rewrites
from backend_kwargs.spec import split_templates
from backend_kwargs.templates import find_template, template_names

if TYPE_CHECKING:
    from backend_kwargs.compilers.auto.graph_stats import GraphStats

Effort = Literal["quick", "full"]
EAGER = "eager"
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds to compile and tune: so many compiles of default, and more for each operator and for each product."""

    compiles: float = 1.0
    op_s: float = 0.0
    product_s: float = 0.0

    def seconds(self, default_s: float, stats: "GraphStats") -> float:
        """Return what is predicted for a graph that default took `default_s` to compile."""
        fused = max(stats.ops - sum(product.count for product in stats.products), 0)
        return self.compiles * default_s + self.op_s * fused + self.product_s * len(stats.products)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Options to try.

    `over` merges them onto those of the fastest so far but for `without`, so that the reduction options of one step and
    the CUDA graphs of another end up together; otherwise they stand alone. `can_gain` tells from the graph whether
    trying can be of use. `shares` are the parts of a call's slack that it has removed before, `costs` what it takes to
    compile and tune: both decide which candidate comes next, and whether it is worth its time.
    Among equals the lower `rank` is kept.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    can_gain: Callable[["GraphStats"], bool] = lambda stats: True
    over: bool = True
    without: tuple[str, ...] = ()
    shares: Mapping[Any, float] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)
    effort: Effort = "quick"
    rank: int = 1
    saved_s: float = 0.0  # of each call, where more is known than shares


def _gpu(stats: "GraphStats") -> bool:
    return stats.gpu


def _gpu_reductions(stats: "GraphStats") -> bool:
    return stats.gpu and stats.reductions > 0


def _gpu_fused(stats: "GraphStats") -> bool:
    return stats.gpu and stats.gemms + stats.convolutions + stats.attentions < stats.ops


def _little_on_a_cpu(stats: "GraphStats") -> bool:
    return not stats.gpu and stats.bytes_read + stats.bytes_written <= LITTLE_BYTES


def _gpu_matmul(stats: "GraphStats") -> bool:
    return stats.gpu and stats.matmul


GRAPHS_RANK = 3
CUDAGRAPHS = {"triton.cudagraphs": True}
DESCENT = {"coordinate_descent_tuning": True}
# What torch's max-autotune modes do to kernels that are no GEMM's.
TUNED = {"max_autotune_pointwise": True, **DESCENT}
MIXED = {
    "triton.mix_order_reduction_autotune_split_size": True,
    "triton.mix_order_reduction_allow_multi_stages": True,
}
LITTLE_BYTES = 16 << 20
# Rounding between operators in half precision, as eager does, can make faster kernels too: a rotary embedding's, say.
ROUNDED = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
# Shares and costs are of 11 models and 41 kernels raced in full on an H200 (torch 2.11). On the models only CUDA graphs
# won more than 1.2 %; what changes generated kernels won most of a softmax's slack, and little where kernels are many.
AGAIN, ONCE, TUNES, EVERYWHERE = Costs(0.65), Costs(0.65), Costs(1.0, op_s=0.3), 0.3

STEPS: tuple[Candidate, ...] = (
    # Of symbolic sizes each is recorded once, which pays where few come again; graphs that write gain where they write
    # to a module's buffers, and else torch makes default's code of them.
    Candidate("cudagraphs", CUDAGRAPHS, _gpu, shares={"launches": 0.9}, costs=AGAIN, rank=GRAPHS_RANK),
    Candidate(
        "persistent_reductions", {"triton.multi_kernel": 3}, _gpu_reductions, shares={"generated": 0.15}, costs=ONCE
    ),
    # One pass over rows and columns, as in a norm's backward pass: how many rows a block takes is timed.
    Candidate("mix_order_reductions", MIXED, _gpu_reductions, shares={"generated": 0.15}, costs=ONCE),
    Candidate(
        "two_pass_softmax",
        {"online_softmax": False},
        lambda stats: stats.gpu and stats.softmaxes > 0,
        shares={"generated": 0.3},
        costs=ONCE,
    ),
    # Inductor pads by default where its own timing of the product alone says so, and often it says no too soon.
    Candidate(
        "padded", {"force_shape_pad": True}, lambda stats: stats.gpu and stats.unaligned > 0, shares={"library": 0.3}
    ),
    Candidate("eager_numerics", ROUNDED, _gpu_fused, shares={"generated": 0.05}, costs=ONCE),
    Candidate("coordinate_descent", TUNED, _gpu_fused, shares={"generated": 0.3}, costs=TUNES, rank=2),
    # Tuned blocks of a looped reduction can beat a persistent one, and the climb alone would not come back to it.
    Candidate(
        "coordinate_descent_looped",
        TUNED,
        lambda stats: _gpu_reductions(stats) and _gpu_fused(stats),
        without=("triton.multi_kernel", "online_softmax"),
        shares={"generated": 0.2},
        costs=TUNES,
        rank=2,
    ),
    Candidate(
        "combo_kernels",
        {"combo_kernels": True, "benchmark_combo_kernel": True},
        lambda stats: stats.gpu and stats.ops > 8,
        shares={"launches": 0.1, "generated": 0.05},
        costs=Costs(1.5),
        rank=2,
    ),
    Candidate(
        "max_autotune",
        {"max_autotune": True, **DESCENT},
        lambda stats: stats.matmul,
        shares={"library": 0.3, "generated": 0.2},
        costs=Costs(1.0, product_s=4.0),
        rank=2,
    ),
    # To wake other cores takes longer than little work does.
    Candidate(
        "one_thread",
        {"cpp.threads": 1},
        _little_on_a_cpu,
        shares={"launches": EVERYWHERE, "library": EVERYWHERE, "generated": EVERYWHERE},
    ),
    Candidate(
        "cpp_wrapper",
        {"cpp_wrapper": True},
        lambda stats: not stats.gpu,
        shares={"launches": 0.5},
        costs=Costs(1.2),
        rank=2,
    ),
    Candidate(
        "multi_kernel",
        {"triton.multi_kernel": 1},
        _gpu_reductions,
        shares={"generated": 0.3},
        costs=TUNES,
        effort="full",
        rank=2,
    ),
    # Hundreds of compiles for a kernel, one after the other: minutes where one takes long.
    Candidate(
        "all_directions",
        {**TUNED, "coordinate_descent_check_all_directions": True},
        _gpu_fused,
        shares={"generated": 0.35},
        costs=Costs(1.0, op_s=1.0),
        effort="full",
        rank=2,
    ),
    Candidate("simd_256", {"cpp.simdlen": 256}, lambda stats: not stats.gpu, shares={"generated": 0.2}, effort="full"),
    Candidate(
        "tma",
        {"max_autotune": True, "triton.enable_persistent_tma_matmul": True},
        _gpu_matmul,
        shares={"library": 0.3},
        costs=Costs(1.0, product_s=4.0),
        effort="full",
        rank=2,
    ),
    # Shorter kernels leave more gaps. Not the other way round: what is won once stays won when kernels get shorter.
    Candidate("cudagraphs_of_tuned", CUDAGRAPHS, _gpu, shares={"launches": 0.9}, costs=AGAIN, rank=GRAPHS_RANK),
    Candidate(
        "cpp_wrapper",
        {"cpp_wrapper": True},
        _gpu,
        shares={"launches": 0.3},
        costs=Costs(5.0),
        effort="full",
        rank=3,
    ),
)


def candidates_for(
    stats: "GraphStats", effort: Effort, named: Iterable[str] | None, options_of: Callable[[str], Mapping[str, Any]]
) -> list[Candidate]:
    """Return what to try after eager and default: the steps that can gain here, or the steps and templates `named`."""
    if named is None:
        fitting = [step for step in STEPS if step.can_gain(stats) or (stats.opaque and stats.gpu)]
        return [step for step in fitting if effort in ("full", step.effort)]
    # Of one name for two devices that which can gain.
    steps = {step.name: step for step in sorted(STEPS, key=lambda step: step.can_gain(stats))}
    wanted = [name for name in named if name not in (EAGER, DEFAULT)]
    return [steps.get(name) or _named(name, options_of) for name in wanted]


def _named(name: str, options_of: Callable[[str], Mapping[str, Any]]) -> Candidate:
    if name in list_rewrites() and name not in template_names():
        return rewriting(name)
    return Candidate(name, options_of(name), over=False, rank=2)


def rewriting(name: str, saved_s: float = 0.0, *, on_gpu: bool = True) -> Candidate:
    """Return the rewrite `name` as a candidate: it joins those of the current best, and saves `saved_s` of each call.

    Where no traffic tells, as on a CPU, it is expected to save a share of the call's slack.
    """
    shares = {} if on_gpu and saved_s else {"library": 0.2, "generated": 0.2}
    return Candidate(name, {"rewrites": [name]}, shares=shares, costs=ONCE, saved_s=saved_s)


def merged(under: Mapping[str, Any], candidate: Candidate) -> dict[str, Any]:
    """Return the candidate's options merged onto `under`: its rewrites join those that are there."""
    options = {**{k: v for k, v in under.items() if k not in candidate.without}, **candidate.options}
    if candidate.over and "rewrites" in candidate.options and "rewrites" in under:
        options["rewrites"] = list(dict.fromkeys((*under["rewrites"], *candidate.options["rewrites"])))
    return options


def step_names() -> list[str]:
    """Return what names of candidates stand for a step here; all others are templates."""
    return [EAGER, DEFAULT, *(step.name for step in STEPS)]


def check_candidates(named: Iterable[str]) -> None:
    """Raise where one of `named` is neither a step nor a rewrite nor a template, or a race itself."""
    steps = [*step_names(), *list_rewrites()]
    for part in (part for name in named if name not in steps for part in split_templates(name)):
        if part not in template_names():
            raise unknown("candidate", part, [*steps, *template_names()])
        if find_template(part).options.get("auto"):
            raise BackendKwargsError(f"Candidate {part!r} enables `auto`; races cannot be nested; leave it out.")


def trusted(
    winner: str,
    options: Mapping[str, Any],
    options_of: Callable[[str], Mapping[str, Any]],
    listed: Iterable[str] = (),
    rewrites: Iterable[str] = (),
) -> bool:
    """Tell whether the winner is a step, one of the `rewrites` or of the candidates `listed`, and these set each option so.

    A stored decision that says anything else is not followed: a template that was not asked for may freeze weights or
    write files, and an option may name a program that Inductor runs.
    """
    rewrites, listed = set(rewrites), set(listed)
    rewrites |= listed.intersection(list_rewrites())
    steps, templates = [*step_names(), *rewrites], listed - rewrites
    if winner not in steps and winner not in templates:
        return False
    options = dict(options)
    applied = options.pop("rewrites", [])
    if not isinstance(applied, list | tuple) or not rewrites.issuperset(applied):
        return False
    known = [step.options for step in STEPS]
    for name in templates.difference(steps) if options else ():
        try:
            known.append(options_of(name))
        except BackendKwargsError:  # a template that this process does not have
            if name == winner:
                return False
    return all(any(name in each and same(each[name], value) for each in known) for name, value in options.items())
