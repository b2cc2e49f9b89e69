"""The table of steps: which are tried on which graph, and graph statistics."""

from dataclasses import replace

import pytest
import torch
from torch._inductor import list_mode_options

from backend_kwargs.auto.candidates import STEPS, allowed_candidates, candidates_for, trusted
from backend_kwargs.auto.graph_stats import GraphStats, observed_stats
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.options.catalogue import inductor_options

MARKS = {"device": "cpu", "training": False, "writes": False, "dynamic": False, "bytes_read": 9e7}
ONE_GEMM = GraphStats(
    ops=2,
    gemms=1,
    convolutions=0,
    reductions=0,
    softmaxes=0,
    attentions=0,
    bytes_written=1e7,
    random=False,
    **MARKS | {"device": "cuda"},
)
NORM = replace(ONE_GEMM, gemms=0, reductions=1, bytes_written=4e8)
SHORT = replace(ONE_GEMM, ops=100, gemms=20, reductions=10, softmaxes=2)
GRAPHS = {
    "GEMM": ONE_GEMM,
    "norm": NORM,
    "attention": replace(ONE_GEMM, gemms=0, attentions=1, ops=1),
    "short kernels": SHORT,
    "training": replace(SHORT, training=True),
    "dynamic": replace(SHORT, dynamic=True),
}


def names(facts, effort="quick"):
    return [step.name for step in candidates_for(facts, effort, None, lambda name: {})]


def facts_of(run, **marks):
    return observed_stats(run, **MARKS | marks)


def test_bytes_of_results():
    """All tensors in what was observed count."""
    seen = {"output": [torch.ones(2), 3], "grads": (torch.ones(4, dtype=torch.int8),)}
    assert facts_of(lambda: seen).bytes_written == 12.0


def test_each_option_is_inductors():
    """Every option of a step exists in torch; otherwise the step could never run."""
    assert {option for step in STEPS for option in step.options} <= set(inductor_options())


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_climb_can_reach_each_mode(mode, graph):
    """The steps of full effort together have the options of each torch mode, as far as they can gain on the graph."""
    facts = GRAPHS[graph]
    reached = {}
    for step in candidates_for(facts, "full", None, lambda name: {}):
        reached |= step.options
    wanted = dict(list_mode_options(mode))
    if "max_autotune" not in reached:  # its effect without GEMMs
        wanted["max_autotune_pointwise"] = wanted.pop("max_autotune", None)
    if facts.attentions == facts.ops:  # attention's kernel is the only one to tune
        wanted.pop("coordinate_descent_tuning", None)
    assert {name: reached.get(name) for name in wanted if wanted[name]} == {k: v for k, v in wanted.items() if v}


@pytest.mark.parametrize(
    ("facts", "tried"),
    [
        pytest.param(ONE_GEMM, True, id="GEMM"),
        pytest.param(replace(NORM, convolutions=1), True, id="convolution"),
        pytest.param(replace(NORM, ops=100), False, id="norm"),
    ],
)
def test_a_cpu_tunes_products_and_convolutions(facts, tried):
    """On a CPU only products and convolutions are tuned, since Inductor has its own kernels only for these."""
    assert ("max_autotune" in names(replace(facts, device="cpu"), "full")) is tried


@pytest.mark.parametrize("graph", GRAPHS)
def test_quick_tries_few(graph):
    """On a GPU quick effort tries CUDA graphs alone, which cost no compile; full effort tries them too."""
    assert names(GRAPHS[graph]) == ["cudagraphs"]
    assert set(names(GRAPHS[graph])) <= set(names(GRAPHS[graph], "full"))


@pytest.mark.parametrize(
    ("marks", "tried"),
    [
        pytest.param({"device": "cpu", "bytes_read": 1e6}, True, id="little"),
        pytest.param({"device": "cpu", "bytes_read": 1e9}, False, id="much"),
        pytest.param({"device": "cuda", "bytes_read": 1e6}, False, id="gpu"),
    ],
)
def test_little_work_is_tried_on_one_core(marks, tried):
    """On a CPU one thread is tried for small graphs, for which waking other cores takes longer."""
    assert ("one_thread" in names(replace(NORM, bytes_written=0.0, **marks))) is tried


@pytest.mark.parametrize(
    ("facts", "tried"),
    [
        pytest.param(NORM, True, id="norm"),
        pytest.param(SHORT, True, id="long"),
        pytest.param(ONE_GEMM, False, id="GEMM"),
        pytest.param(replace(NORM, device="cpu"), False, id="cpu"),
    ],
)
def test_rows_and_columns_reduced_at_once_are_tuned(facts, tried):
    """The step is a candidate for every reduction on a GPU."""
    assert ("mix_order_reductions" in names(facts, "full")) is tried


@pytest.mark.parametrize(
    ("step", "facts", "tried"),
    [
        pytest.param("padded", ONE_GEMM, True, id="GEMM"),
        pytest.param("padded", NORM, False, id="norm"),
        pytest.param("padded", replace(ONE_GEMM, device="cpu"), False, id="GEMM on a CPU"),
        pytest.param("combo_kernels", SHORT, True, id="many kernels"),
        pytest.param("combo_kernels", NORM, False, id="few"),
        pytest.param("combo_kernels", replace(SHORT, device="cpu"), False, id="many on a CPU"),
    ],
)
def test_what_is_tried_before_gemms_are_tuned(step, facts, tried):
    """GEMMs are padded and many kernels combined, only on a GPU, before tuning, which takes minutes."""
    found = names(facts, "full")
    assert (step in found) is tried
    assert not tried or found.index(step) < found.index("max_autotune")


@pytest.mark.parametrize("step", ["multi_kernel", "all_directions"])
def test_what_takes_minutes_is_for_full_effort(step):
    """Steps that seldom win and compile each kernel many times are tried only with effort="full"."""
    assert (step in names(NORM), step in names(NORM, "full")) == (False, True)


def test_cuda_graphs_are_tried_again_after_all_that_shortens_kernels():
    """CUDA graphs are tried last but one, before the C++ wrapper: shorter kernels leave more to gain."""
    assert names(SHORT, "full")[-2:] == ["cudagraphs_of_tuned", "cpp_wrapper"]


COSTLY = {"triton.cudagraphs": 3, "cpp_wrapper": 3, "max_autotune": 2, "coordinate_descent_tuning": 2}


@pytest.mark.parametrize("step", [step for step in STEPS if step.can_gain(SHORT)], ids=lambda step: step.name)
def test_complexity_on_a_gpu(step):
    """Among equals, changed kernels precede tuned ones, and these before CUDA graphs and wrappers."""
    tunes = {"combo_kernels", "triton.multi_kernel"} & set(step.options) and step.name != "persistent_reductions"
    assert step.complexity == max([COSTLY.get(name, 1) for name in step.options] + [2 if tunes else 1])


@pytest.mark.parametrize(("device", "complexity"), [("cpu", 2), ("cuda", 3)])
def test_a_named_step_is_that_of_the_device(device, complexity):
    """The C++ wrapper has a higher complexity on a GPU, where a different step has this name."""
    (step,) = candidates_for(replace(NORM, device=device), "quick", ["cpp_wrapper"], lambda name: {})
    assert step.complexity == complexity


def absent(name):
    raise BackendKwargsError(f"Unknown template {name!r}.")


def test_a_stored_winner_that_this_process_lacks_is_not_followed():
    """A stored winner is not used if its template is listed but not registered in this process."""
    allowed = allowed_candidates(RaceSettings(candidates=["mine"]), absent)
    assert not trusted("mine", {"max_autotune": True}, "", allowed)
    assert trusted("max_autotune", {"max_autotune": True}, "", allowed)


def test_a_backward_is_seen():
    """Operators of the backward pass count like those of the forward pass."""
    weight = torch.zeros(8, 8, requires_grad=True)
    assert facts_of(lambda: (torch.zeros(4, 8) @ weight).sum().backward()).gemms == 2


@torch.no_grad()
@torch.library.custom_op("backend_kwargs_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("custom", [False, True], ids=["torch's", "others"])
def test_operators_that_are_not_those_of_torch(custom):
    """A graph with operators of other libraries is told apart: their layouts are only what these libraries say."""
    x = torch.randn(4)
    assert facts_of(lambda: doubled(x) if custom else x * 2).custom is custom


def test_a_graph_in_a_graph_is_opaque():
    """Operators in a higher-order operator are not counted, so every step may gain and CUDA graphs are tried."""
    seen = []

    def branching(x):
        return torch.cond(x.sum() > 0, lambda x: torch.softmax(x @ x, -1), lambda x: x + 1, (x,))

    def backend(gm, example_inputs):
        seen.append(facts_of(lambda: gm(*example_inputs)))
        return gm

    torch.compile(branching, backend=backend)(torch.randn(8, 8))
    assert seen[0].opaque
    on_gpu = names(replace(seen[0], device="cuda"), "full")
    assert {"cudagraphs", "two_pass_softmax", "max_autotune"} <= set(on_gpu)
    assert not facts_of(lambda: torch.randn(8, 8).softmax(-1)).opaque


COUNTED = {
    "a product": (lambda x: x @ x, "1 op, 1 GEMM"),
    "products": (lambda x: (x @ x) @ x + 1, "3 ops, 2 GEMMs"),
    "a convolution": (lambda x: torch.nn.functional.conv1d(x[None], x[:, :, None]), "1 op, 1 convolution"),
    "reductions": (lambda x: x.sum() + x.amax(), "3 ops, 2 reductions"),
    "a softmax": (lambda x: x.softmax(-1), "1 op, 1 reduction"),
    "norms": (
        lambda x: torch.nn.functional.layer_norm(x, (8,)) + torch.nn.functional.group_norm(x, 2),
        "3 ops, 2 reductions",
    ),
    "views": (lambda x: x.t().unsqueeze(0)[0].neg(), "1 op"),
    "random": (torch.bernoulli, "1 op, random"),
}


@pytest.mark.parametrize(("run", "text"), COUNTED.values(), ids=COUNTED)
@torch.no_grad()
def test_what_a_graph_is_said_to_have(run, text):
    """Operators but views, products, convolutions and reductions by number, then what marks it."""
    x = torch.zeros(8, 8)
    assert str(facts_of(lambda: run(x))) == text


def test_marks_of_a_graph():
    """Each that holds is in the text."""
    marked = replace(ONE_GEMM, training=True, random=True, writes=True, dynamic=True, convolutions=2, reductions=1)
    assert str(marked) == "2 ops, 1 GEMM, 2 convolutions, 1 reduction, training, random, writes, dynamic"


@pytest.mark.parametrize(
    ("run", "counts"),
    [
        pytest.param(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q), (1, 0), id="attention"),
        pytest.param(lambda q: q.softmax(-1) + q.log_softmax(-1), (0, 2), id="softmaxes"),
        pytest.param(lambda q: q + 1, (0, 0), id="neither"),
    ],
)
def test_attention_and_softmax_are_counted(run, counts):
    """What CUDA kernels of both could gain is decided by their number; attention's dropout of 0 draws nothing."""
    q = torch.randn(1, 2, 8, 8)
    with torch.no_grad():
        facts = facts_of(lambda: run(q))
    assert (facts.attentions, facts.softmaxes, facts.random) == (*counts, False)
    assert facts.matmul is bool(counts[0])


def test_layouts_of_products():
    """Each layout counts once, however often it runs, since it is tuned once."""
    x, weight = torch.randn(4, 8), torch.randn(8, 16)
    facts = facts_of(lambda: (x @ weight, x @ weight, weight @ torch.randn(16, 2), x + 1))
    assert (facts.gemms, facts.layouts, facts.fused) == (3, 2, facts.ops - 3)
