"""What a worker has lowered is what this process finds in Inductor's cache, and nothing else is."""

import pytest
import torch
from torch import nn
from torch._guards import tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner

from backend_kwargs.auto.workers.graphs import packed
from backend_kwargs.auto.workers.pool import Workers
from backend_kwargs.rewrites.apply import with_rewrites
from backend_kwargs.torch_internals.lowered_graphs import again
from backend_kwargs.torch_internals.relowering import around_lowering, fresh_boxes, spare_of
from tests.auto.workers.lowering import LONG_S, lowered

OPTIONS = {"max_fusion_size": 7}


def layer():
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1))


def keys(workers, graphs, options, **changed):
    """Return the keys of graphs that a worker lowers under `options`."""
    tickets = [workers.submit(each.graph, options, **changed) for each in graphs]
    replies = [each.result(LONG_S) for each in tickets]
    assert [each.reason for each in replies] == [""] * len(graphs)
    return [each.key for each in replies]


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


KINDS = {
    "layers": (layer, torch.randn(4, 16)),
    # What a backward graph gets of a channels-last forward graph are views.
    "convolutions": (convolutions, torch.randn(2, 3, 6, 6)),
    "part of a tensor": (layer, torch.randn(9, 4, 16)[3].as_strided((4, 16), (1, 4))),
}


@pytest.mark.parametrize(("model", "x"), KINDS.values(), ids=KINDS)
def test_found_under_the_same_options(workers, model, x):
    """Forward and backward graphs of a module are found under the options under which a worker has lowered them."""
    graphs = lowered(model(), x, backward=True)
    assert len(graphs) == 2
    known = keys(workers, graphs, OPTIONS)
    assert [each.key(OPTIONS) for each in graphs] == [(key, True) for key in known]


def test_not_found_under_others(workers):
    """A graph is not found under other options than those of the worker."""
    (graph,) = lowered(layer().eval(), torch.randn(4, 16))
    keys(workers, [graph], OPTIONS)
    assert not graph.key({"max_fusion_size": 8})[1]


def test_the_code_is_that_of_this_process(workers):
    """A worker writes the code that this process would have written."""
    graphs = lowered(layer(), torch.randn(4, 16), backward=True)
    keys(workers, graphs, OPTIONS)
    with_cache = [each.code(OPTIONS)[0].source_code for each in graphs]
    without = [each.code({**OPTIONS, "fx_graph_cache": False})[0].source_code for each in graphs]
    assert with_cache == without


def test_sizes_that_are_symbols(workers):
    """Graphs with dynamic sizes are found, with the conditions that lowering them here would have set."""
    graphs = lowered(layer(), torch.randn(4, 16), backward=True, dynamic=True)
    known = keys(workers, graphs, OPTIONS)
    guards = [list(each.context.fake_mode.shape_env.guards) for each in graphs]
    assert [each.key(OPTIONS) for each in graphs] == [(key, True) for key in known]
    assert [list(each.context.fake_mode.shape_env.guards) for each in graphs] == guards


def test_a_rewrite_runs_in_the_worker(workers):
    """A rewritten graph has the rewrite's operator in its code, and shares no entry with the graph as it was."""

    def activated(x, weight):
        return nn.functional.conv2d(x, weight).relu()

    (graph,) = lowered(activated, torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3))
    rewritten = with_rewrites({}, ["convolution"])
    plain, changed = keys(workers, [graph], OPTIONS), keys(workers, [graph], {**OPTIONS, **rewritten})
    assert plain != changed
    code, hit = graph.code({**OPTIONS, **rewritten})
    assert hit
    assert "backend_kwargs" in code.source_code
    assert "backend_kwargs" not in graph.code(OPTIONS)[0].source_code


def norm(x, weight, bias):
    return nn.functional.layer_norm(x, (16,), weight, bias)


def loss(x, target):
    return nn.functional.cross_entropy(x, target)


def layer_and_loss(x, weight, target):
    return nn.functional.cross_entropy(nn.functional.linear(x, weight), target)


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize(
    ("name", "fn", "inputs"),
    [
        pytest.param("layer_norm_backward", norm, lambda: (leaf(64, 16), leaf(16), leaf(16)), id="layer_norm_backward"),
        pytest.param("cross_entropy", loss, lambda: (leaf(64, 16), torch.arange(64) % 16), id="cross_entropy"),
        pytest.param(
            "linear_cross_entropy",
            layer_and_loss,
            lambda: (leaf(64, 16), leaf(16, 16), torch.arange(64) % 16),
            id="linear_cross_entropy",
        ),
        pytest.param(
            "rotary", turned, lambda: (leaf(2, 4, 8, 16), torch.randn(8, 16), torch.randn(8, 16)), id="rotary"
        ),
    ],
)
def test_a_rewrite_of_dynamos_graph_runs_in_the_worker(workers, name, fn, inputs):
    """Code of a rewritten graph that a worker lowered calls the rewrite's operator; the graph as it was has others."""
    graphs = lowered(fn, *inputs(), backward=True, rewrites=[name])
    known = keys(workers, graphs, OPTIONS)
    found = [each.code(OPTIONS) for each in graphs]
    assert [(code._fx_graph_cache_key, hit) for code, hit in found] == [(key, True) for key in known]
    assert any("torch.ops.backend_kwargs." in code.source_code for code, _ in found)
    torch._dynamo.reset()
    plain = [each.code(OPTIONS) for each in lowered(fn, *inputs(), backward=True)]
    assert not any(hit for _, hit in plain)
    assert not any("torch.ops.backend_kwargs." in code.source_code for code, _ in plain)


def test_other_keyword_arguments(workers):
    """CUDA graphs are an option and a keyword argument of the lowering; a worker gives both."""
    (graph,) = lowered(layer().eval(), torch.randn(4, 16))
    (key,) = keys(workers, [graph], {"triton.cudagraphs": True})
    assert graph.key({"triton.cudagraphs": True}, cudagraphs=True) == (key, True)


def test_an_option_set_for_the_whole_process(workers):
    """What a user has set in Inductor's config is set in the worker too."""
    (graph,) = lowered(layer().eval(), torch.randn(4, 16))
    config.realize_reads_threshold += 1
    try:
        (key,) = keys(workers, [graph], OPTIONS)
        assert graph.key(OPTIONS) == (key, True)
    finally:
        config.realize_reads_threshold -= 1


@pytest.mark.parametrize(
    ("change", "back"),
    [
        pytest.param(
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            lambda: torch.use_deterministic_algorithms(False),
            id="deterministic",
        ),
        pytest.param(lambda: torch.set_num_threads(1), lambda: torch.set_num_threads(2), id="threads"),
        pytest.param(
            lambda: torch.set_float32_matmul_precision("high"),
            lambda: torch.set_float32_matmul_precision("highest"),
            id="precision",
        ),
        pytest.param(
            lambda: torch.backends.cuda.enable_flash_sdp(False),
            lambda: torch.backends.cuda.enable_flash_sdp(True),
            id="attention",
        ),
    ],
)
def test_settings_of_torch(workers, change, back):
    """Settings of torch that Inductor reads are those of this process, also if they change after the start."""
    (graph,) = lowered(layer().eval(), torch.randn(4, 16))
    before = torch.get_num_threads()
    change()
    try:
        options = with_rewrites(OPTIONS, ["convolution"])
        (key,) = keys(workers, [graph], options)
        assert graph.key(options) == (key, True)
    finally:
        back()
        torch.set_num_threads(before)


def test_the_graph_stays_as_it_was(workers):
    """Making bytes of a graph changes neither it nor its key."""
    (graph,) = lowered(layer().eval(), torch.randn(4, 16))
    (again,) = lowered(layer().eval(), torch.randn(4, 16))
    assert graph.key()[0] == again.key()[0]
    assert [node.meta.keys() for node in graph.gm.graph.nodes] == [node.meta.keys() for node in again.gm.graph.nodes]


def test_nothing_is_set_here(workers):
    """A request leaves this process's options as they were."""
    (graph,) = lowered(layer().eval(), torch.randn(4, 16))
    before = config.save_config_portable(ignore_private_configs=False)
    keys(workers, [graph], OPTIONS)
    assert config.save_config_portable(ignore_private_configs=False) == before


def test_a_job_that_has_not_begun_can_be_taken_back():
    """A ticket is a future: what has not begun is cancelled."""
    pool = Workers(1, nice=0)
    try:
        (graph,) = lowered(layer().eval(), torch.randn(4, 16))
        first, second = pool.submit(graph.graph, OPTIONS), pool.submit(graph.graph, OPTIONS)
        assert second.cancel()
        assert first.result(LONG_S).reason == ""
    finally:
        pool.stop()


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_found_as_a_race_lowers_again(workers, cudagraphs):
    """A copy that a race keeps, and lowers as races do, is found."""
    options = {**OPTIONS, "triton.cudagraphs": cudagraphs}
    graphs = lowered(layer(), torch.randn(4, 16), backward=True)
    boxes = fresh_boxes(graphs[0].kwargs, cudagraphs=cudagraphs)
    for each in graphs[: 1 if cudagraphs else 2]:  # on a CPU, the first turns CUDA graphs off for the second
        with tracing(each.context), again():
            kept = spare_of(each.gm)
            reply = workers.submit(packed(kept, each.inputs, each.kwargs), options).result(LONG_S)
            with around_lowering(each.inputs, options):
                code = compile_fx_inner(spare_of(kept), each.inputs, **{**each.kwargs, **boxes})
        assert (reply.reason, reply.key) == ("", code._fx_graph_cache_key)
