"""The candidates of a race: steps, merged onto the current best's options; templates; rewrites; other compilers."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from backend_kwargs.backends.inductor.compiler import records as permits_recording
from backend_kwargs.backends.others import OTHERS, in_precision, installed, is_other, other_of, sets, verify_other
from backend_kwargs.errors import BackendKwargsError, unknown
from backend_kwargs.facts.decision import DEFAULT, EAGER
from backend_kwargs.options import Options, precisions, same, split_templates
from backend_kwargs.options.templates import find_template, template_names
from backend_kwargs.rewrites.table import list_rewrites, name_of, permits_entry

if TYPE_CHECKING:
    from backend_kwargs.auto.graph_stats import GraphStats
    from backend_kwargs.auto.settings import RaceSettings

Effort = Literal["quick", "full"]
OptionsOf = Callable[[str], Options]  # of a template, by its name
SEARCH = "`backend-kwargs list` shows templates and compilers, docs/auto-reference.md the steps."
UNFROZEN = "unfrozen"
REWRITES = "rewrites"  # several of them, each in the places where it is faster


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted seconds to compile and tune: a multiple of default's compile, plus some per operator and product."""

    compiles: float = 1.0
    op_s: float = 0.0
    product_s: float = 0.0

    def seconds(self, default_s: float, stats: "GraphStats") -> float:
        """Return the prediction for a graph whose default compile took `default_s`."""
        return self.compiles * default_s + self.op_s * stats.fused + self.product_s * stats.layouts


@dataclass(frozen=True, slots=True)
class RaceCandidate:
    """Options to try.

    `over` merges them onto the current best's options, less those in `without`: so the reduction options of one step
    combine with the CUDA graphs of another. Otherwise they are used alone. `can_gain` tells from the graph whether the
    candidate can help, and `saves_op_s` are the most seconds that it saves for each operator, where that is all it can
    save. `costs` are its compile and tuning time. Among candidates of equal speed the one with the lower `complexity`
    is kept. `compiler` names another compiler than Inductor, whose `options` these are.
    """

    name: str
    options: Options = field(default_factory=dict)
    can_gain: Callable[["GraphStats"], bool] = lambda stats: True
    over: bool = True
    without: tuple[str, ...] = ()
    saves_op_s: float = math.inf
    costs: Costs = field(default_factory=Costs)
    effort: Effort = "quick"
    complexity: int = 1
    compiler: str = ""


def _on_gpu(*counts: str) -> Callable[["GraphStats"], bool]:
    """Return whether graphs are on a GPU and have some of each of these, by the names of their statistics."""
    return lambda stats: stats.gpu and all(getattr(stats, count) for count in counts)


def _on_cpu(*counts: str) -> Callable[["GraphStats"], bool]:
    return lambda stats: not stats.gpu and all(getattr(stats, count) for count in counts)


GRAPHS_COMPLEXITY = 3
SLACK = 0.01  # by which what is more complex, such as CUDA graphs, has to be faster, with its whole interval
CUDAGRAPHS = {"triton.cudagraphs": True}
UNRECORDED = {**CUDAGRAPHS, "record_cudagraphs": False}  # the code that is compiled for them, without
DESCENT = {"coordinate_descent_tuning": True}
# The effect of torch's max-autotune modes on kernels other than GEMMs.
TUNED, ALL_TUNED = {"max_autotune_pointwise": True, **DESCENT}, {"max_autotune": True, **DESCENT}
MIXED = {"triton.mix_order_reduction_autotune_split_size": True, "triton.mix_order_reduction_allow_multi_stages": True}
COMBINED = {"combo_kernels": True, "benchmark_combo_kernel": True}
ALL_DIRECTIONS = {**TUNED, "coordinate_descent_check_all_directions": True}
TMA = {"max_autotune": True, "triton.enable_persistent_tma_matmul": True}
LITTLE_BYTES = 16 << 20
# Rounding between operators in half precision, as eager does, can make faster kernels too: a rotary embedding's, say.
ROUNDED = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
# Costs were measured on 11 models and 41 kernels, raced in full on an H200 (torch 2.11). On models, also on 22 that
# nobody tuned on, no option of Inductor gained more than 1.2 %: so they are raced where there is time for all.
ONCE, TUNES = Costs(0.65), Costs(1.0, op_s=0.3)
PRODUCTS = Costs(1.0, product_s=4.0)  # with 16 cores


# Left out by steps that are raced frozen even after `unfrozen` won: on a CPU Inductor's own GEMMs need constants, and
# unfrozen BERT took twice as long in bf16.
FROZEN_ANEW = ("freezing",)

# Each symbolic size records its own graph, so recording pays off only where few sizes recur. torch records a graph that
# mutates its inputs only where these are a module's buffers; otherwise this candidate's code is default's.
WITH_GRAPHS = RaceCandidate(
    "cudagraphs", CUDAGRAPHS, _on_gpu(), without=("record_cudagraphs",), costs=ONCE, complexity=GRAPHS_COMPLEXITY
)

# Loops of one reduction may read what other threads have not written yet (pytorch/pytorch#190517): this has no loops.
_full = partial(RaceCandidate, effort="full")
PERSISTENT_REDUCTIONS = _full("persistent_reductions", {"triton.multi_kernel": 3}, _on_gpu("reductions"), costs=ONCE)

# Raced in this order, each over the options of the best so far: under effort="quick" those whose compile is short.
STEPS: tuple[RaceCandidate, ...] = (
    # Raced where the caller set `freezing`: frozen code is not always the faster one.
    RaceCandidate(UNFROZEN, {"freezing": False}, lambda stats: stats.frozen > 0, costs=ONCE),
    WITH_GRAPHS,
    # To wake other cores takes longer than little work does.
    RaceCandidate(
        "one_thread",
        {"cpp.threads": 1},
        lambda stats: not stats.gpu and stats.bytes_read + stats.bytes_written <= LITTLE_BYTES,
    ),
    # Dynamo's guards have checked the inputs, and torch's own operators have the strides that it expects of them. On an
    # EPYC 20 small layers took 96 instead of 115 µs.
    RaceCandidate(
        "no_size_asserts",
        {"size_asserts": False},
        lambda stats: not (stats.gpu or stats.opaque or stats.custom),
        saves_op_s=4e-7,
        costs=ONCE,
    ),
    RaceCandidate("cpp_wrapper", {"cpp_wrapper": True}, _on_cpu(), saves_op_s=1e-6, costs=Costs(1.2), complexity=2),
    PERSISTENT_REDUCTIONS,
    # One pass over rows and columns, as in a norm's backward pass: how many rows a block takes is timed.
    _full("mix_order_reductions", MIXED, _on_gpu("reductions"), costs=ONCE),
    _full("two_pass_softmax", {"online_softmax": False}, _on_gpu("softmaxes"), costs=ONCE),
    # Inductor pads by default if its own timing of the product alone favours it, and often it decides against it.
    _full("padded", {"force_shape_pad": True}, _on_gpu("gemms")),
    _full("eager_numerics", ROUNDED, _on_gpu("fused"), costs=ONCE),
    _full("combo_kernels", COMBINED, lambda stats: stats.gpu and stats.ops > 8, costs=Costs(1.5), complexity=2),
    _full("coordinate_descent", TUNED, _on_gpu("fused"), costs=TUNES, complexity=2),
    # Tuned blocks of a looped reduction can beat a persistent one, and merging alone would not undo the latter.
    _full(
        "coordinate_descent_looped",
        TUNED,
        _on_gpu("reductions", "fused"),
        without=("triton.multi_kernel", "online_softmax"),
        costs=TUNES,
        complexity=2,
    ),
    _full("max_autotune", ALL_TUNED, _on_gpu("matmul"), costs=PRODUCTS, complexity=2),
    _full("max_autotune", ALL_TUNED, _on_cpu("matmul"), without=FROZEN_ANEW, costs=PRODUCTS, complexity=2),
    _full("multi_kernel", {"triton.multi_kernel": 1}, _on_gpu("reductions"), costs=TUNES, complexity=2),
    # Hundreds of compiles per kernel, one after the other: minutes if one takes long.
    _full("all_directions", ALL_DIRECTIONS, _on_gpu("fused"), costs=Costs(1.0, op_s=1.0), complexity=2),
    _full("simd_256", {"cpp.simdlen": 256}, _on_cpu()),
    _full("tma", TMA, _on_gpu("matmul"), costs=PRODUCTS, complexity=2),
    # Shorter kernels leave more gaps. The reverse does not hold: a gain in launches stays when kernels get shorter.
    replace(WITH_GRAPHS, name="cudagraphs_of_tuned", effort="full"),
    _full("cpp_wrapper", {"cpp_wrapper": True}, _on_gpu(), costs=Costs(5.0), complexity=3),
)
# Default where CUDA graphs may be raced: one compile serves for both.
DEFAULT_AND_GRAPHS = RaceCandidate(DEFAULT, UNRECORDED, over=False, complexity=0)
WITH, WITHOUT = "+cudagraphs", "-cudagraphs"  # what ends the name of a candidate's code that is raced both ways


def candidates_for(
    stats: "GraphStats", effort: Effort, named: Iterable[str] | None, options_of: OptionsOf, *, frozen: bool = False
) -> list[RaceCandidate]:
    """Return what to try after eager and default: what can gain here, or the steps, templates and compilers `named`.

    `frozen` says whether the caller has parameters frozen: only then compilers may take them as constants.
    """
    if named is None:
        known = stats
        if stats.opaque and stats.gpu:  # some of each operator, since not all were counted
            known = replace(stats, ops=stats.ops + 9, gemms=1, reductions=1, softmaxes=1)
        fitting = [step for step in STEPS if step.can_gain(known)]
        steps = [step for step in fitting if effort in ("full", step.effort)]
        others = installed() if effort == "full" and not stats.gpu else ()
        candidates = [_of_compiler(name, frozen=frozen) for name in others]
        return [*steps, *(each for each in candidates if not why_not_raced(each, stats, frozen=frozen))]
    # Two steps may share a name, one for each device: the one that can gain wins.
    steps_by_name = {step.name: step for step in sorted(STEPS, key=lambda step: step.can_gain(stats))}
    wanted = [name for name in named if name not in (EAGER, DEFAULT)]
    if stats.frozen and UNFROZEN not in wanted:  # the caller permitted freezing, which can make a graph slower
        wanted.insert(0, UNFROZEN)
    return [steps_by_name.get(name) or _named(name, options_of, frozen=frozen) for name in wanted]


def _named(name: str, options_of: OptionsOf, *, frozen: bool) -> RaceCandidate:
    """Return the candidate called `name` that is not a step: a compiler, a rewrite or a template."""
    if is_other(name):
        return _of_compiler(name, frozen=frozen)
    if name in list_rewrites() and name not in template_names():
        return rewriting(name)
    return RaceCandidate(name, options_of(name), over=False, complexity=2)


def _of_compiler(text: str, *, frozen: bool) -> RaceCandidate:
    """Return another compiler as a candidate."""
    other = other_of(text)
    options, name = other.under(frozen=frozen), other.compiler.name
    return RaceCandidate(text, options, over=False, costs=Costs(1.5), complexity=3, compiler=name)


def why_not_raced(candidate: RaceCandidate, stats: "GraphStats", *, frozen: bool) -> str:
    """Return why another compiler is not raced for this graph, "" if it is."""
    compiler = OTHERS[candidate.compiler](candidate.compiler)
    if compiler.freezes and not frozen:
        return "it makes parameters constants: set freezing=True to race it, and call the model under torch.no_grad()"
    for precision in precisions.named(candidate.options.get("precision")):
        if why := compiler.why_not_in(precision):
            return why
    if stats.training and not compiler.trains:
        return "it compiles for inference only"
    return "it draws other random numbers than Inductor" if stats.random else ""


def rewriting(name: str, places: Iterable[str] = ()) -> RaceCandidate:
    """Return the rewrite `name`, in its `places` in the graph if these are known, as a candidate.

    It joins the rewrites of the current best.
    """
    return RaceCandidate(name, {"rewrites": [*places] or [name]}, costs=ONCE)


def placed(places: Sequence[str], under: Options) -> RaceCandidate:
    """Return the candidate that rewrites these places of a graph, compiled as default is, `under` its options."""
    names = {*map(name_of, places)}
    name = next(iter(names)) if len(names) == 1 else REWRITES
    return RaceCandidate(name, {**under, "rewrites": [*places]}, over=False, complexity=0)


def merged(under: Options, candidate: RaceCandidate) -> Options:
    """Return the candidate's options merged onto `under`: its rewrites join those that are there."""
    options = {**{k: v for k, v in under.items() if k not in candidate.without}, **candidate.options}
    if candidate.over and "rewrites" in candidate.options and "rewrites" in under:
        options["rewrites"] = list(dict.fromkeys((*under["rewrites"], *candidate.options["rewrites"])))
    return options


def records(options: Options) -> bool:
    """Return whether CUDA graphs are recorded under these options of a candidate."""
    return bool(options.get("triton.cudagraphs")) and permits_recording(options)


def with_recording(options: Options, *, recorded: bool = True) -> Options:
    """Return `options` with CUDA graphs recorded, or not, of what is compiled for them; the same if nothing is."""
    rest = {name: value for name, value in options.items() if name != "record_cudagraphs"}
    return rest if recorded or not rest.get("triton.cudagraphs") else {**rest, "record_cudagraphs": False}


def toggled(options: Options) -> Options:
    """Return `options` for the same code with CUDA graphs, where they ask for it without, or the reverse."""
    return with_recording(options, recorded=not records(options))


def name_of_other(name: str, options: Options) -> str:
    """Return the name of a candidate's code under toggled `options`: of default's with CUDA graphs it is the step's."""
    if name == DEFAULT and records(options):
        return WITH_GRAPHS.name
    return f"{name}{WITH if records(options) else WITHOUT}"


def step_of(name: str) -> str:
    """Return the name of the candidate that `name_of_other` was given."""
    return name.removesuffix(WITH).removesuffix(WITHOUT)


def precision_candidates(settings: "RaceSettings", compilers: Iterable[str] = ()) -> list[RaceCandidate]:
    """Return a step for each precision that the user consents to, within the bound that was given with it.

    Those of `compilers`, candidates of other compilers, that have the precision are candidates in it too.
    """
    names, max_error = settings.precision, settings.max_error
    texts = [in_precision(text, name, max_error) for name in names for text in compilers]
    steps = [
        RaceCandidate(name, {"precision": name, "max_error": max_error}, without=FROZEN_ANEW, costs=ONCE, complexity=2)
        for name in names
    ]
    # Compilers that have precisions make parameters constants in any case.
    return [*steps, *(_of_compiler(text, frozen=True) for text in filter(None, texts))]


def step_names() -> list[str]:
    """Return the candidate names that are steps; all other names are templates."""
    return [EAGER, DEFAULT, *(step.name for step in STEPS)]


def check_candidates(named: Iterable[str]) -> None:
    """Raise if one of `named` is not a step, rewrite, template or compiler that works here, or enables `auto`."""
    if not (named := list(named)):  # each backend is checked, and the names of rewrites cost a tenth of a second
        return
    steps = [*step_names(), *list_rewrites()]
    for name in filter(is_other, named):
        verify_other(name)
    templates = [name for name in named if name not in steps and not is_other(name)]
    for name in templates:
        if ":" in name or "[" in name:
            raise BackendKwargsError(
                f"Candidate {name!r} must be a step, a template without its backend, such as 'freezing', or one of the "
                f"compilers {', '.join(OTHERS)}, which alone take options in brackets."
            )
    for part in (part for name in templates for part in split_templates(name)):
        if part not in template_names():
            raise unknown("candidate", part, [*steps, *template_names(), *OTHERS], otherwise=SEARCH)
        if find_template(part).options.get("auto"):
            raise BackendKwargsError(f"Candidate {part!r} enables `auto`; races cannot be nested; leave it out.")


def allowed_candidates(
    settings: "RaceSettings", options_of: OptionsOf, rewrites: Iterable[str] = ()
) -> list[RaceCandidate]:
    """Return every candidate that a request may choose: the steps, those it names, and what else it allows."""
    named = others_for(settings) if settings.candidates is None else settings.candidates
    in_precisions = precision_candidates(settings, [*filter(is_other, named)])
    of_places = RaceCandidate(REWRITES, {"rewrites": [*rewrites]})
    allowed = [*STEPS, DEFAULT_AND_GRAPHS, *map(rewriting, rewrites), of_places, *in_precisions]
    for name in set(named).difference(step_names()):
        with contextlib.suppress(BackendKwargsError):  # a template or a compiler that this process lacks
            allowed.append(_named(name, options_of, frozen=False))
    return allowed


def others_for(settings: "RaceSettings") -> list[str]:
    """Return the other compilers that a request with these settings may race."""
    if settings.candidates is not None:
        return [*filter(is_other, settings.candidates)]
    return [*installed()] if settings.effort == "full" else []


def trusted(winner: str, options: Options, compiler: str, allowed: Iterable[RaceCandidate]) -> bool:
    """Return whether the winner is one of the `allowed` candidates, and these set each option to this value.

    Neither a decision's date nor its measurements count. This is the one rule for stores, imports, artifacts and
    untrusted bundles.
    A winner of another `compiler` than Inductor must set exactly these options. Any other stored decision is ignored:
    a template that the user did not ask for may freeze weights or write files, and an option may name a program that
    Inductor runs. A precision without its bound is ignored too, since its error would not be measured.
    """
    allowed = list(allowed)
    rewrites = {name_of(entry) for each in allowed for entry in each.options.get("rewrites", ())}

    def is_set(name: str, value: object) -> bool:
        if name == "rewrites":  # those of several candidates may have joined
            return isinstance(value, list | tuple) and all(permits_entry(each, rewrites) for each in value)
        return any(name in each.options and same(each.options[name], value) for each in allowed)

    winner, names = step_of(winner), {EAGER, DEFAULT, *(each.name for each in allowed)}
    if compiler or is_other(winner):
        return winner in names and sets(winner, compiler, options)
    bounded = ("precision" in options) == ("max_error" in options)
    return winner in names and bounded and all(is_set(name, value) for name, value in options.items())
