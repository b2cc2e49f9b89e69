"""The whole table of steps, and what a name, a graph and a file make of it."""

import math
from dataclasses import replace

import pytest

from backend_kwargs.auto import candidates
from backend_kwargs.auto.candidates import (
    CUDAGRAPHS,
    STEPS,
    UNRECORDED,
    Costs,
    RaceCandidate,
    allowed_candidates,
    candidates_for,
    check_candidates,
    merged,
    placed,
    precision_candidates,
    rewriting,
    step_names,
    trusted,
    why_not_raced,
)
from backend_kwargs.auto.graph_stats import GraphStats
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.backends.openvino import compiler as openvino_native
from backend_kwargs.backends.others import OTHERS
from backend_kwargs.errors import BackendKwargsError

CPU = GraphStats("cpu", 9, 1, 0, 0, 0, 0, 1e9, 0.0, False, False, False, False)
GPU = replace(CPU, device="cuda")
LITTLE = float(16 << 20)


def costs(step):
    seconds = (step.costs.compiles, step.costs.op_s, step.costs.product_s)
    return " ".join(f"{cost:g}" for cost in seconds)


def row(step):
    saves = "" if math.isinf(step.saves_op_s) else f" {step.saves_op_s * 1e9:g} ns an operator;"
    without = "".join(f" -{name}" for name in step.without)
    options = " ".join(f"{name}={value}" for name, value in step.options.items())
    return f"{step.name}:{saves} {costs(step)}; {step.effort}, {step.complexity}; {options}{without}"


TABLE = """\
unfrozen: 0.65 0 0; quick, 1; freezing=False
cudagraphs: 0.65 0 0; quick, 3; triton.cudagraphs=True -record_cudagraphs
one_thread: 1 0 0; quick, 1; cpp.threads=1
no_size_asserts: 400 ns an operator; 0.65 0 0; quick, 1; size_asserts=False
cpp_wrapper: 1000 ns an operator; 1.2 0 0; quick, 2; cpp_wrapper=True
persistent_reductions: 0.65 0 0; full, 1; triton.multi_kernel=3
mix_order_reductions: 0.65 0 0; full, 1; \
triton.mix_order_reduction_autotune_split_size=True triton.mix_order_reduction_allow_multi_stages=True
two_pass_softmax: 0.65 0 0; full, 1; online_softmax=False
padded: 1 0 0; full, 1; force_shape_pad=True
eager_numerics: 0.65 0 0; full, 1; \
emulate_precision_casts=True eager_numerics.division_rounding=True eager_numerics.disable_ftz=True
combo_kernels: 1.5 0 0; full, 2; combo_kernels=True benchmark_combo_kernel=True
coordinate_descent: 1 0.3 0; full, 2; \
max_autotune_pointwise=True coordinate_descent_tuning=True
coordinate_descent_looped: 1 0.3 0; full, 2; \
max_autotune_pointwise=True coordinate_descent_tuning=True -triton.multi_kernel -online_softmax
max_autotune: 1 0 4; full, 2; \
max_autotune=True coordinate_descent_tuning=True
max_autotune: 1 0 4; full, 2; max_autotune=True coordinate_descent_tuning=True -freezing
multi_kernel: 1 0.3 0; full, 2; triton.multi_kernel=1
all_directions: 1 1 0; full, 2; \
max_autotune_pointwise=True coordinate_descent_tuning=True coordinate_descent_check_all_directions=True
simd_256: 1 0 0; full, 1; cpp.simdlen=256
tma: 1 0 4; full, 2; \
max_autotune=True triton.enable_persistent_tma_matmul=True
cudagraphs_of_tuned: 0.65 0 0; full, 3; triton.cudagraphs=True -record_cudagraphs
cpp_wrapper: 5 0 0; full, 3; cpp_wrapper=True"""


def test_the_table_of_steps():
    """They are raced in this order, and what they cost was measured."""
    assert "\n".join(map(row, STEPS)) == TABLE
    assert all(step.over and not step.compiler for step in STEPS)


ON_A_GPU = {"cudagraphs", "padded", "max_autotune", "tma", "cudagraphs_of_tuned", "cpp_wrapper"}
KERNELS = {"eager_numerics", "coordinate_descent", "all_directions"}  # of Inductor's own
REDUCTIONS = {"persistent_reductions", "mix_order_reductions", "multi_kernel"}


@pytest.mark.parametrize(
    ("stats", "tried"),
    [
        pytest.param(CPU, {"max_autotune", "cpp_wrapper", "no_size_asserts", "simd_256"}, id="cpu"),
        pytest.param(
            replace(CPU, custom=True), {"max_autotune", "cpp_wrapper", "simd_256"}, id="cpu, custom operators"
        ),
        pytest.param(replace(CPU, gemms=0), {"cpp_wrapper", "no_size_asserts", "simd_256"}, id="cpu without products"),
        pytest.param(
            replace(CPU, bytes_read=LITTLE / 2, bytes_written=LITTLE / 2),
            {"max_autotune", "cpp_wrapper", "no_size_asserts", "simd_256", "one_thread"},
            id="cpu, as many bytes as little",
        ),
        pytest.param(
            replace(CPU, bytes_read=LITTLE, bytes_written=1.0),
            {"max_autotune", "cpp_wrapper", "no_size_asserts", "simd_256"},
            id="a byte more",
        ),
        pytest.param(
            replace(CPU, reductions=9, softmaxes=9, opaque=True, dynamic=True),
            {"max_autotune", "cpp_wrapper", "simd_256"},
            id="cpu, all else",
        ),
        pytest.param(replace(GPU, ops=1), ON_A_GPU, id="gpu, a product alone"),
        pytest.param(
            replace(GPU, ops=1, gemms=0, convolutions=1), ON_A_GPU - {"padded"}, id="gpu, a convolution alone"
        ),
        pytest.param(replace(GPU, ops=1, gemms=0, attentions=1), ON_A_GPU - {"padded"}, id="gpu, attention alone"),
        pytest.param(replace(GPU, ops=3, convolutions=1, attentions=1), ON_A_GPU, id="gpu, one of each"),
        pytest.param(
            replace(GPU, ops=4, convolutions=1, attentions=1), ON_A_GPU | KERNELS, id="gpu, and another kernel"
        ),
        pytest.param(
            replace(GPU, ops=1, gemms=0),
            (ON_A_GPU | KERNELS) - {"padded", "max_autotune", "tma"},
            id="gpu, one kernel",
        ),
        pytest.param(replace(GPU, ops=8), ON_A_GPU | KERNELS, id="gpu, eight operators"),
        pytest.param(GPU, ON_A_GPU | KERNELS | {"combo_kernels"}, id="gpu, nine operators"),
        pytest.param(replace(GPU, ops=1, softmaxes=1), ON_A_GPU | {"two_pass_softmax"}, id="gpu, softmax"),
        pytest.param(replace(GPU, ops=1, reductions=1), ON_A_GPU | REDUCTIONS, id="gpu, a reduction"),
        pytest.param(
            replace(GPU, ops=2, reductions=1),
            ON_A_GPU | REDUCTIONS | KERNELS | {"coordinate_descent_looped"},
            id="gpu, a reduction and a product",
        ),
        pytest.param(
            replace(GPU, ops=1, opaque=True),
            {*step_names()} - {"eager", "default", "unfrozen", "one_thread", "simd_256", "no_size_asserts"},
            id="gpu, unknown operators",
        ),
    ],
)
def test_which_steps_can_gain(monkeypatch, stats, tried):
    """The whole set of steps of full effort on each kind of graph; of these "quick" has what compiles quickly."""
    monkeypatch.setattr(candidates, "installed", lambda: ())
    short = {"cudagraphs"} if stats.gpu else {"cpp_wrapper", "no_size_asserts", "one_thread"}
    for effort, wanted in (("full", tried), ("quick", tried & short)):
        found = [step.name for step in candidates_for(stats, effort, None, {}.get)]
        assert set(found) == wanted


@pytest.mark.parametrize(
    ("stats", "effort", "tried"),
    [
        pytest.param(CPU, "full", ["tmpl-tvm"], id="full"),
        pytest.param(CPU, "quick", [], id="quick"),
        pytest.param(GPU, "full", [], id="gpu"),
        pytest.param(replace(CPU, random=True), "full", [], id="random"),
    ],
)
def test_other_compilers_join_under_full_effort_on_a_cpu(monkeypatch, stats, effort, tried):
    """Of those installed, each that can have the graph; one that makes parameters constants is not among them."""
    monkeypatch.setattr(candidates, "installed", lambda: ("tmpl-tvm", "tmpl-onnxruntime"))
    found = candidates_for(stats, effort, None, {}.get)
    assert [each.name for each in found if each.compiler] == tried


FREEZES = "it makes parameters constants: set freezing=True to race it, and call the model under torch.no_grad()"


@pytest.mark.parametrize(
    ("compiler", "stats", "frozen", "why"),
    [
        pytest.param("tmpl-tvm", CPU, False, "", id="takes parameters"),
        pytest.param("tmpl-onnxruntime", CPU, False, FREEZES, id="freezes"),
        pytest.param("tmpl-onnxruntime", CPU, True, "", id="freezes by consent"),
        pytest.param("tmpl-tvm", replace(CPU, training=True), False, "", id="trains"),
        pytest.param(
            "tmpl-openvino-native",
            replace(CPU, training=True),
            True,
            "it compiles for inference only",
            id="does not train",
        ),
        pytest.param(
            "tmpl-tvm",
            replace(CPU, random=True),
            True,
            "it draws other random numbers than Inductor",
            id="random",
        ),
    ],
)
def test_why_a_compiler_is_not_raced(compiler, stats, frozen, why):
    """A row says what stands in its way."""
    assert why_not_raced(RaceCandidate(compiler, compiler=compiler), stats, frozen=frozen) == why


@pytest.mark.parametrize(
    ("named", "frozen", "candidate"),
    [
        pytest.param(
            "tmpl-tvm",
            False,
            RaceCandidate("tmpl-tvm", {}, over=False, costs=Costs(1.5), complexity=3, compiler="tmpl-tvm"),
            id="a compiler",
        ),
        pytest.param(
            "tmpl-tvm[trials=3]",
            True,
            RaceCandidate(
                "tmpl-tvm[trials=3]",
                {"freeze": True, "trials": 3},
                over=False,
                costs=Costs(1.5),
                complexity=3,
                compiler="tmpl-tvm",
            ),
            id="a compiler under options, frozen",
        ),
        pytest.param("packed", False, rewriting("packed"), id="a rewrite"),
        pytest.param("aten", False, RaceCandidate("aten", {"of": "aten"}, over=False, complexity=2), id="a template"),
    ],
)
def test_what_a_name_stands_for(named, frozen, candidate):
    """A compiler and a template stand alone, and a rewrite joins others."""
    found = candidates_for(CPU, "quick", [named], lambda name: {"of": name}, frozen=frozen)
    assert [replace(each, can_gain=candidate.can_gain) for each in found] == [candidate]


def test_eager_and_default_need_no_name():
    """They are in every race; to name them adds nothing, and other names keep their order."""
    found = candidates_for(CPU, "quick", ["simd_256", "eager", "cudagraphs", "default", "one_thread"], {}.get)
    assert [each.name for each in found] == ["simd_256", "cudagraphs", "one_thread"]


@pytest.mark.parametrize(
    ("device", "costs"), [pytest.param(CPU, Costs(1.2), id="cpu"), pytest.param(GPU, Costs(5.0), id="gpu")]
)
def test_a_name_of_two_steps_is_the_one_of_the_device(device, costs):
    """The C++ wrapper takes as long to compile as it takes there."""
    (step,) = candidates_for(device, "quick", ["cpp_wrapper"], {}.get)
    assert step.costs == costs


@pytest.mark.parametrize(
    ("costs", "stats", "seconds"),
    [
        pytest.param(Costs(), CPU, 7.0, id="default"),
        pytest.param(Costs(0.0, op_s=1.0), replace(CPU, gemms=2, convolutions=1, attentions=1), 5.0, id="fused"),
        pytest.param(Costs(0.0, op_s=1.0), replace(CPU, gemms=99), 0.0, id="none fused"),
        pytest.param(Costs(0.0, product_s=1.0), replace(CPU, gemms=4, layouts=2), 2.0, id="layouts"),
    ],
)
def test_seconds_to_compile(costs, stats, seconds):
    """Fused operators count by number, products by layout; surplus products count as nothing."""
    assert costs.seconds(7.0, stats) == seconds


@pytest.mark.parametrize(
    ("places", "name", "rewrites"),
    [
        pytest.param(["attention@2:0"], "attention", ["attention@2:0"], id="one rewrite"),
        pytest.param(["attention@2:0", "patches@1:0"], "rewrites", ["attention@2:0", "patches@1:0"], id="two"),
    ],
)
def test_places_as_a_candidate(places, name, rewrites):
    """It has the name of its rewrite, or one for several, and stands in place of default."""
    places = [each.replace(":0", f":{'0' * 16}") for each in places]
    found = placed(places, UNRECORDED)
    assert (found.name, found.over, found.complexity) == (name, False, 0)
    assert found.options == {**UNRECORDED, "rewrites": places}
    allowed = allowed_candidates(RaceSettings(), {}.get, ["attention", "patches"])
    assert trusted(found.name, found.options, "", allowed)
    assert not trusted(found.name, {"rewrites": [f"gather_sum@1:{'0' * 16}"]}, "", allowed)


def test_a_precision_as_a_candidate():
    """It compiles as quickly as default out of a cache; the bound travels with its options."""
    (found,) = precision_candidates(RaceSettings(precision=("bf16",), max_error=0.01))
    options = {"precision": "bf16", "max_error": 0.01}
    assert found == RaceCandidate(
        "bf16", options, found.can_gain, without=("freezing",), costs=Costs(0.65), complexity=2
    )


@pytest.mark.parametrize(
    ("candidate", "options"),
    [
        pytest.param(RaceCandidate("a", {"x": 2}), {"x": 2, "y": 1, "rewrites": ["one"]}, id="over"),
        pytest.param(RaceCandidate("a", {"z": 2}, without=("x", "rewrites")), {"y": 1, "z": 2}, id="without"),
        pytest.param(
            RaceCandidate("a", {"rewrites": ["two", "one"]}), {"x": 1, "y": 1, "rewrites": ["one", "two"]}, id="joins"
        ),
        pytest.param(
            RaceCandidate("a", {"rewrites": ["two"]}, over=False),
            {"x": 1, "y": 1, "rewrites": ["two"]},
            id="stands alone",
        ),
    ],
)
def test_options_of_a_step_over_the_current_best(candidate, options):
    """The step's options win, less what it leaves out; rewrites join those before them."""
    assert merged({"x": 1, "y": 1, "rewrites": ["one"]}, candidate) == options


def test_a_rewrite_over_options_without_any():
    """The first rewrite has none to join."""
    assert merged({"x": 1}, rewriting("packed")) == {"x": 1, "rewrites": ["packed"]}


@pytest.mark.parametrize(
    "named",
    [
        pytest.param(["eager", "default", "cudagraphs", "packed"], id="steps and rewrites"),
        pytest.param(["freezing", "aten+freezing"], id="templates"),
        pytest.param(["tmpl-tvm", "tmpl-tvm[exec_mode=compiled]"], id="compilers"),
    ],
)
def test_right_candidates_are_no_error(named):
    """Each kind of name may be listed."""
    pytest.importorskip("tvm")
    check_candidates(iter(named))


@pytest.mark.parametrize(
    ("named", "message"),
    [
        pytest.param(
            ["aten+auto"], "Candidate 'auto' enables `auto`; races cannot be nested; leave it out.", id="auto in a sum"
        ),
        pytest.param(["aten", "cudagraph"], "Unknown candidate 'cudagraph'. Did you mean 'cudagraphs'?", id="step"),
        pytest.param(["freezin"], "Unknown candidate 'freezin'. Did you mean 'freezing'?", id="template"),
        pytest.param(["openvin"], "Unknown candidate 'openvin'. Did you mean 'openvino-native'?", id="compiler"),
        pytest.param(
            ["xyz"],
            "Unknown candidate 'xyz'. `backend-kwargs list` shows templates and compilers, docs/auto-reference.md the "
            "steps.",
            id="unlike any",
        ),
        pytest.param(["pakced"], "Unknown candidate 'pakced'. Did you mean 'packed'?", id="rewrite"),
        pytest.param(
            ["aten", "default", "tmpl-tvm[trials=x]"],
            "TVM option 'trials' must be int of at least 0, got 'x' (str).",
            id="option",
        ),
        pytest.param(
            ["aten", "inductor:aten"],
            "Candidate 'inductor:aten' must be a step, a template without its backend, such as 'freezing', or one of "
            f"the compilers {', '.join(OTHERS)}, which alone take options in brackets.",
            id="backend",
        ),
    ],
)
def test_a_wrong_name_is_an_error(named, message):
    """Wherever it stands in the list."""
    with pytest.raises(BackendKwargsError) as error:
        check_candidates(named)
    assert str(error.value) == message


def test_what_a_request_may_choose():
    """The steps, the rewrites and precisions that it allows, and what it names; not what this process lacks."""

    def options_of(name):
        if name == "absent":
            raise BackendKwargsError("Unknown template 'absent'.")
        return {"of": name}

    named = ["aten", "absent", "cudagraphs", "default"]
    settings = RaceSettings(candidates=named, precision=("bf16",), max_error=0.5)
    allowed = allowed_candidates(settings, options_of, ["packed"])
    assert [each.name for each in allowed] == [
        *(step.name for step in STEPS),
        "default",
        "packed",
        "rewrites",
        "bf16",
        "aten",
    ]
    assert allowed[-1].options == {"of": "aten"}
    assert allowed[-2].options == {"precision": "bf16", "max_error": 0.5}


def test_a_named_compiler_may_be_chosen_frozen_or_not():
    """A request that names a compiler follows its decisions under either."""
    allowed = allowed_candidates(RaceSettings(candidates=["tmpl-tvm"]), {}.get)
    assert [each.options for each in allowed if each.compiler] == [{}]
    assert all(trusted("tmpl-tvm", options, "tmpl-tvm", allowed) for options in ({}, {"freeze": True}))


ALLOWED = [*STEPS, rewriting("packed"), rewriting("attention"), RaceCandidate("mine", {"cpp.cxx": "g++"}, over=False)]


@pytest.mark.parametrize(
    ("winner", "options", "trusts"),
    [
        pytest.param("eager", {}, True, id="eager"),
        pytest.param("default", {}, True, id="default"),
        pytest.param("cudagraphs", CUDAGRAPHS, True, id="a step"),
        pytest.param("max_autotune", {**CUDAGRAPHS, "max_autotune": True}, True, id="a step over another"),
        pytest.param("theirs", {}, False, id="a name that is not allowed"),
        pytest.param("theirs", CUDAGRAPHS, False, id="a name that is not allowed, with options of a step"),
        pytest.param("mine", {"cpp.cxx": "g++"}, True, id="a template"),
        pytest.param("mine", {"cpp.cxx": "/tmp/evil"}, False, id="another value"),
        pytest.param("cudagraphs", {**CUDAGRAPHS, "cpp.cc": "g++"}, False, id="an option that none sets"),
        pytest.param("packed", {"rewrites": ["attention", "packed"]}, True, id="rewrites"),
        pytest.param("packed", {"rewrites": ("packed",)}, True, id="a tuple of rewrites"),
        pytest.param("packed", {"rewrites": ["packed", "convolution"]}, False, id="a rewrite that is not allowed"),
        pytest.param("packed", {"rewrites": [f"rotary@1:{'0' * 16}"]}, False, id="a rewrite that was removed"),
        pytest.param("packed", {"rewrites": "packed"}, False, id="a text in place of rewrites"),
        pytest.param("cudagraphs", {"triton.cudagraphs": 1}, False, id="a value of another type"),
    ],
)
def test_which_stored_options_are_followed(winner, options, trusts):
    """Each option must be one that an allowed candidate sets, to the same value."""
    assert trusted(winner, options, "", iter(ALLOWED)) is trusts


@pytest.mark.parametrize(
    ("options", "why"),
    [pytest.param({}, "", id="none"), pytest.param({"precision": "bf16"}, "not on this CPU", id="one it lacks")],
)
def test_a_precision_that_a_compiler_lacks(monkeypatch, options, why):
    """A candidate in a precision for which the compiler has no kernels is skipped, with the reason."""
    monkeypatch.setattr(openvino_native, "why_not_in", lambda hint: "not on this CPU")
    candidate = RaceCandidate("openvino-native", options, compiler="openvino-native")
    assert why_not_raced(candidate, CPU, frozen=True) == why


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        pytest.param("default", CUDAGRAPHS, "cudagraphs", id="default with them"),
        pytest.param("packed", {**CUDAGRAPHS, "rewrites": ["packed"]}, "packed+cudagraphs", id="with them"),
        pytest.param("packed", {**UNRECORDED, "rewrites": ["packed"]}, "packed-cudagraphs", id="without them"),
    ],
)
def test_code_that_is_raced_both_ways_has_two_names(name, options, named):
    """A row for each, so that speedups are those of the row that they name; a stored decision of either is used."""
    assert candidates.name_of_other(name, options) == named
    assert trusted(named, options, "", allowed_candidates(RaceSettings(), {}.get, ["packed"]))
