"""ONNX Runtime and OpenVINO's own compiler: results, constants and their guards, fallbacks to eager, and options."""

import copy
import importlib.util
import threading
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import backend_kwargs as bk
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.compare import Candidate, compare
from backend_kwargs.errors import BackendKwargsWarning

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ENGINES = [
    pytest.param("onnxruntime", marks=pytest.mark.skipif(not find_spec("onnxruntime"), reason="no ONNX Runtime")),
    pytest.param("openvino-native", marks=pytest.mark.skipif(not find_spec("openvino"), reason="no OpenVINO")),
]
NAMES = {"onnxruntime": "ONNX Runtime", "openvino-native": "OpenVINO"}
both = pytest.mark.parametrize("engine", ENGINES)
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 16), nn.LayerNorm(16)
    ).eval()


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4)).eval()


def backend(engine, **options):
    """Return an engine's backend that compiles parts of any size."""
    return bk.make_backend(engine, options, min_block_size=1)


def check(compiled, wanted, *args):
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), wanted(*args), rtol=1e-4, atol=1e-4)


def each_of(functions):
    """Return a function of the results of several functions, by their names: one graph, compiled once."""
    return lambda x: {name: function(x) for name, function in functions.items()}


@both
def test_a_model_is_one_part(engine):
    """A model is one part with its parameters as constants, and the report names the engine."""
    model = net()
    compiled = torch.compile(model, backend=backend(engine))
    check(compiled, model, X)
    reported = bk.report(compiled)
    (graph,) = reported.graphs
    assert (graph.engine.engine, len(graph.engine.partitions), graph.engine.fallbacks) == (NAMES[engine], 1, {})
    assert reported.ran is None


class Copies(nn.Module):
    """A model that returns copies of its inputs and of a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x, y):
        return x.clone(), (x * 2 + y).sin(), y.detach().clone(), self.weight.clone()


@both
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed sizes", "dynamic sizes"])
def test_a_copy_of_an_input_is_a_result(engine, dynamic):
    """A part may return copies of inputs and parameters; the inputs stay as they are, and results are the caller's."""
    model = Copies().eval()
    compiled = torch.compile(model, backend=backend(engine), dynamic=dynamic)
    for rows in (3, 5):
        x, y = torch.randn(rows, 4), torch.randn(rows, 4)
        given = x.clone(), y.clone()
        for _ in range(2):
            with torch.no_grad():
                results = compiled(x, y)
            torch.testing.assert_close((x, y), given, rtol=0, atol=0)
            torch.testing.assert_close(results, model(x, y))
            for each in results:
                each.fill_(-1)
    assert bk.report(compiled).graphs[0].engine.fallbacks == {}


@both
def test_a_step_of_an_optimizer_is_right(engine):
    """A compiled training step updates parameters and momentum as in eager."""

    def trained(compile_):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = compile_(step)
        for _ in range(3):
            run(torch.randn(2, 8))
        return [*model.parameters()]

    with pytest.warns(BackendKwargsWarning, match="compiles for inference only"):
        got = trained(lambda step: torch.compile(step, backend=backend(engine)))
    torch.testing.assert_close(got, trained(lambda step: step))


@both
def test_another_parameter_compiles_anew(engine):
    """A replaced parameter, another module of the class, and a replaced `.data` are compiled again."""
    model = small()
    compiled = torch.compile(model, backend=backend(engine))
    check(compiled, model, X)
    with torch.no_grad():
        model[2].weight = nn.Parameter(model[2].weight * 2)
    check(compiled, model, X)
    model[0].weight.data = model[0].weight.data * 3
    check(compiled, model, X)


@both
def test_a_copy_of_a_module_has_its_own_constants(engine):
    """Two modules of one class share no compiled part."""
    first, second = small(), small()
    with torch.no_grad():
        second[2].bias.add_(1)
    for model in (first, second, copy.deepcopy(second)):
        check(torch.compile(model, backend=backend(engine)), model, X)


@both
@pytest.mark.parametrize("dynamic", [None, True], ids=["after a second size", "at once"])
def test_sizes_stay_symbols(engine, dynamic):
    """One graph serves batches of other sizes."""
    model = small()
    compiled = torch.compile(model, backend=backend(engine), dynamic=dynamic)
    for batch in (4, 6, 7, 9):
        check(compiled, model, X.repeat(3, 1, 1, 1)[:batch])
    assert len(bk.report(compiled).graphs) == (1 if dynamic else 2)


@both
def test_gradients_are_left_to_eager(engine):
    """A graph that records gradients runs in eager, with a warning that says why; a checkpoint draws what it drew."""
    model = nn.Linear(4, 64)

    def fn(x):
        return checkpoint(nn.functional.dropout, model(x), use_reentrant=False)

    compiled = torch.compile(fn, backend=backend(engine))
    with pytest.warns(BackendKwargsWarning, match="compiles for inference only. A graph runs in eager, since"):
        result = compiled(torch.randn(2, 4))
    result.sum().backward()
    torch.testing.assert_close(model.bias.grad, 2.0 * (result != 0).sum(0))
    assert bk.report(compiled).ran.what == f"ran in eager: no partition of {NAMES[engine]}"


@both
def test_what_it_has_not_runs_in_eager(engine):
    """Random operators run in eager."""

    def fn(x):
        return torch.relu(torch.relu(x * 2 + 1) + torch.rand_like(x)) * 3

    compiled = torch.compile(fn, backend=backend(engine))
    torch.manual_seed(0)
    given = compiled(X)
    torch.manual_seed(0)
    torch.testing.assert_close(given, fn(X))
    (graph,) = bk.report(compiled).graphs
    assert graph.engine.fallbacks["rand_like"] == "draws random numbers"
    assert graph.engine.partitions


@pytest.fixture
def refused(monkeypatch):
    """Make the first part of each graph refuse its inputs; return the number of its calls."""
    from backend_kwargs.backends import partitioned

    calls, finished = [], partitioned.finished

    def refuses(*args):
        calls.append(args)
        raise RuntimeError("no luck at all")

    def first_refuses(run, part, visible):
        monkeypatch.setattr(partitioned, "finished", finished)
        return refuses

    monkeypatch.setattr(partitioned, "finished", first_refuses)
    return calls


@both
def test_a_part_that_fails_at_a_call_stays_in_eager(engine, refused):
    """It is tried once; one warning and the report say why, and the other part still runs."""

    def fn(x):
        first = torch.relu(x * 2 + 1)
        return torch.relu(first + torch.rand_like(first)) * 3

    compiled = torch.compile(fn, backend=backend(engine))

    def seeded(call):
        torch.manual_seed(0)
        return call(X)

    with pytest.warns(BackendKwargsWarning) as warned:
        given = [seeded(compiled) for _ in range(3)]
    torch.testing.assert_close(given, [seeded(fn)] * 3)
    name = NAMES[engine]
    assert [str(each.message) for each in warned] == [
        f"{name} failed to run a part of a graph, which runs in eager from now on: RuntimeError: no luck at all."
    ]
    reported = bk.report(compiled)
    share = reported.graphs[0].engine
    assert (len(refused), len(share.partitions), share.failed) == (1, 1, 1)
    assert f"{name} failed to run it: RuntimeError: no luck at all" in share.fallbacks.values()
    assert reported.ran.what == f"ran in eager: {name} failed to run 1 of 2 partitions"


@both
def test_a_failed_part_is_a_status_of_compare(engine, refused):
    """The row of a candidate with a part that failed does not pass, although its results are eager's."""
    with pytest.warns(BackendKwargsWarning, match="failed to run a part"):
        (row,) = compare(small(), X, [Candidate("c", backend(engine))], rounds=1).rows
    assert (row.status, row.reason) == ("fell_back", f"ran in eager: {NAMES[engine]} failed to run 1 of 1 partition")


@both
def test_the_fallback_check_tells_of_a_failed_part(engine, refused):
    """A race asks it after the first call."""
    from backend_kwargs.facts import left_to_eager

    compiled = []

    def compile_fn(gm, inputs):
        compiled.append(backend(engine).compile(CapturedGraph(gm, inputs)))
        return compiled[0].call

    with pytest.warns(BackendKwargsWarning, match="failed to run a part"):
        torch.compile(lambda x: x.sin() + 1, backend=compile_fn)(X)
    why = f"{NAMES[engine]} failed to run 1 of 1 partition: sin, add: {NAMES[engine]} failed to run it"
    assert left_to_eager(compiled[0].facts.parts) == f"{why}: RuntimeError: no luck at all"


def test_a_call_that_eager_refuses_too_is_no_failure():
    """An error of the caller's is raised, and the next call runs on the compiler."""
    from backend_kwargs.graphs.parts import serving

    noted = []
    part = torch.fx.symbolic_trace(lambda x: x.reshape(2) + 1)
    run = serving(lambda x: [x.reshape(2) + 1], part, noted.append)
    with pytest.raises(RuntimeError, match="shape"):
        run(torch.ones(3))
    assert isinstance(run(torch.ones(2)), list)
    assert noted == []


class Bags(nn.Module):
    """Embeddings added in bags, then a layer."""

    def __init__(self):
        super().__init__()
        self.bag, self.linear = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 4)

    def forward(self, ids):
        return self.linear(self.bag(ids)).relu()


@both
def test_bags_of_embeddings_are_eagers(engine):
    """ONNX Runtime crashes on the exporter's translation, and with it the process."""
    model, ids = Bags().eval(), torch.arange(12).reshape(3, 4)
    compiled = torch.compile(model, backend=backend(engine))
    check(compiled, model, ids)
    assert "_embedding_bag" in bk.report(compiled).graphs[0].engine.fallbacks


F = nn.functional
DROPPED = {  # by the exporter, without a word
    "batch_norm": (
        lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
        "_native_batch_norm_legit_functional",
        "ONNX Runtime's norm has the statistics of inference",
    ),
    "avg_pool2d": (
        lambda x: F.avg_pool2d(x, 2, divisor_override=3),
        "avg_pool2d",
        "ONNX has no divisor_override",
    ),
    "log_ndtr": (
        lambda x: torch.special.log_ndtr(10 * x - 20),
        "special_erfcx",
        "the exporter's formula overflows",
    ),
    "atan2": (
        lambda x: torch.atan2(0 * x, x - 0.5),
        "atan2",
        "the exporter's formula has the other sign at zero",
    ),
    "scatter_reduce": (
        lambda x: x.scatter_reduce(0, torch.zeros(4, 3, 8, 8, dtype=torch.int64), x, "mean", include_self=False),
        "scatter_reduce",
        "the exporter writes the last value instead of the mean",
    ),
}


@pytest.mark.skipif(not find_spec("onnxruntime"), reason="no ONNX Runtime")
def test_what_the_exporter_translates_wrongly_runs_in_eager():
    """Statistics of a batch, a divisor, a formula that overflows, one with the wrong sign, and means of groups."""
    fn = each_of({name: fn for name, (fn, _, _) in DROPPED.items()})
    compiled = torch.compile(fn, backend=backend("onnxruntime"))
    check(compiled, fn, X)
    fallbacks = bk.report(compiled).graphs[0].engine.fallbacks
    assert {op: fallbacks.get(op) for _, op, _ in DROPPED.values()} == {op: why for _, op, why in DROPPED.values()}


@pytest.mark.skipif(not find_spec("onnxruntime"), reason="no ONNX Runtime")
@pytest.mark.parametrize(("dtype", "in_eager"), [(torch.float32, set()), (torch.float64, {"linalg_vector_norm"})])
def test_a_root_of_a_norm_runs_in_eager_only_in_float64(dtype, in_eager):
    """The exporter rounds 1 / 3 to float32, which is what eager does in float32."""

    def roots(x):
        return torch.linalg.vector_norm(x, 3, dim=1) * 2

    compiled = torch.compile(roots, backend=backend("onnxruntime"))
    check(compiled, roots, X.to(dtype))
    assert set(bk.report(compiled).graphs[0].engine.fallbacks) == in_eager


@pytest.mark.skipif(not find_spec("onnxruntime"), reason="no ONNX Runtime")
def test_other_reductions_of_groups_run_in_onnx_runtime():
    """Only means of groups are translated wrongly: sums, as in message passing, run in ONNX Runtime."""
    index = torch.randint(3, (4, 3, 8, 8), generator=torch.Generator().manual_seed(0))

    def grouped(x):
        return [
            x.scatter_reduce(1, index, x * 2, reduce, include_self=include_self)
            for reduce in ("sum", "prod", "amax", "amin")
            for include_self in (True, False)
        ]

    compiled = torch.compile(grouped, backend=backend("onnxruntime"))
    check(compiled, grouped, X)
    assert bk.report(compiled).graphs[0].engine.fallbacks == {}


TINY = {
    "added": lambda x: (0 * x + 1e-12).rsqrt(),
    "subtracted": lambda x: (0 * x - 1e-9).abs().log(),
    "added to an integer": lambda x: (0 * x).to(torch.int64) + 1e-12,
    "a factor": lambda x: x * (1 + 1e-6),
    "a divisor": lambda x: x / (1 + 1e-6),
    "a norm": lambda x: 1e-12 * x / ((0 * x).square().sum(-1, keepdim=True).sqrt() + 1e-12),
}


@both
def test_tiny_constants_are_kept(engine):
    """A small epsilon is added, and a factor near one multiplies: the exporter's own optimizer drops both."""
    fn = each_of(TINY)
    given, wanted = torch.compile(fn, backend=backend(engine))(X), fn(X)
    for name in TINY:
        rtol = 5e-7 if name in ("a factor", "a divisor") else 1e-4  # the former two are one rounding
        torch.testing.assert_close(
            given[name], wanted[name], rtol=rtol, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


IN_TWO_WAYS = {
    "linear": (lambda x, w: F.linear(F.linear(x, w).sin(), w.T), (8, 8)),
    "a transpose of a transpose": (lambda x, w: (x @ w.T).sin() @ w.T.T, (8, 8)),
    "batches": (lambda x, w: torch.bmm(torch.bmm(x[0], w).sin(), w.mT), (3, 8, 8)),
    "convolutions": (lambda x, w: F.conv_transpose2d(F.conv2d(x, w).sin(), w), (3, 3, 3, 3)),
    "slices": (lambda x, w: F.linear(x, w[:8]) + F.linear(x, w[8:]) + x @ w[:8], (16, 8)),
    "a bias": (lambda x, w: F.linear(x, w, w[0]) + x @ w, (8, 8)),
    "both operands": (lambda x, w: x @ (w @ w) + x @ (w.T @ w), (8, 8)),
}


class Reads(nn.Module):
    """A function of an input and a parameter."""

    def __init__(self, fn, sizes):
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(torch.randn(sizes, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return self.fn(x, self.weight)


class Tied(nn.Module):
    """Two parameters in the same memory."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.empty(8, 8))
        self.second.data = self.first.data

    def forward(self, x):
        return F.linear(x, self.first).sin() @ self.second


@both
def test_a_parameter_is_read_in_two_ways(engine):
    """Each product reads a shared parameter in its own layout: OpenVINO packs a constant once for each address.

    Weights tied by `.data` are one constant by their address, too.
    """
    models = nn.ModuleDict({name: Reads(*each) for name, each in IN_TWO_WAYS.items()} | {"tied": Tied()})
    fn = each_of(models)
    compiled = torch.compile(fn, backend=backend(engine))
    check(compiled, fn, X)
    assert bk.report(compiled).graphs[0].engine.fallbacks == {}


@pytest.mark.skipif(not find_spec("openvino"), reason="no OpenVINO")
def test_a_parameter_that_is_read_in_one_way_has_no_copy():
    """A layer that is called several times has its weight in memory once."""
    from backend_kwargs.backends.openvino.model import _separate_constants

    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    for _ in range(3):
        moved = graph.call_function(torch.ops.aten.permute.default, (weight, [1, 0]))
        x = graph.call_function(torch.ops.aten.mm.default, (x, moved))
    graph.output((x,))
    root = nn.Module()
    root.register_buffer("weight", torch.ones(8, 8))
    part = torch.fx.GraphModule(root, graph)
    _separate_constants(part)
    assert [name for name, _ in part.named_buffers()] == ["weight"]


SCALARS = {
    "repeat": lambda x: x.repeat(()),
    "tile": lambda x: x.tile(()),
    "logsumexp": lambda x: torch.logsumexp(x, 0),
}


@pytest.mark.skipif(not find_spec("onnxruntime"), reason="no ONNX Runtime")
def test_results_that_are_inputs():
    """ONNX Runtime writes a result that is an input's own value."""
    x, fn = torch.tensor(-8.4783), each_of(SCALARS)
    given = torch.compile(fn, backend=backend("onnxruntime"))(x)
    torch.testing.assert_close(given, fn(x))


LARGE = torch.tensor([2**53 + 1, -(2**40) - 5, 2**31, 2**61 + 1, -7, 2**24 + 1])
INTEGERS = {
    "sum": lambda x: (x + 1).sum(),
    "prod": lambda x: x.prod(),
    "floor": lambda x: torch.div(x + 1, 3, rounding_mode="floor"),
    "trunc": lambda x: torch.div(x + 1, 3, rounding_mode="trunc"),
    "pow": lambda x: (x + 1) ** 2,
    "compared": lambda x: torch.where(x + 1 > 2**35, x * 3, -x),
    "clamped": lambda x: (x + 1).clamp(-(2**35), 2**35),
    "filled": lambda x: (x + 1).masked_fill(x > 0, 2**40),
    "converted": lambda x: (x.double() * 1.5).to(torch.int64),
    "32 bits": lambda x: (x.to(torch.int32) + 2**30).abs().amax(0),
    "topk": lambda x: (x % 2).topk(3)[1],
}


@both
def test_integers_are_exact(engine):
    """Integers that floats, or 32 bits, cannot represent give eager's results."""
    fn = each_of(INTEGERS)
    given = torch.compile(fn, backend=backend(engine))(LARGE)
    torch.testing.assert_close(given, fn(LARGE), rtol=0, atol=0)


@pytest.mark.skipif(not find_spec("onnxruntime"), reason="no ONNX Runtime")
def test_the_exporter_does_not_list_the_operators_of_torchvision(caplog, monkeypatch):
    """It does for others than this package, after a compile too."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from backend_kwargs.backends.onnxruntime import session

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: found(name, *rest) if name != "torchvision" else None
    )
    session._registry.cache_clear()  # or the tests before this one had the lines
    torch.compile(torch.relu, backend=backend("onnxruntime"))(X)
    assert "torchvision" not in caplog.text
    ONNXRegistry.from_torchlib()
    assert "torchvision is not installed. Skipping torchvision::nms" in caplog.messages


@pytest.mark.skipif(not find_spec("onnxruntime"), reason="no ONNX Runtime")
def test_the_exporter_does_not_warn_about_its_own_constants(caplog):
    """It has an empty constant for a write at indices, as in a mixture of experts."""
    rows = torch.tensor([0, 2])
    compiled = torch.compile(lambda x: x.index_put((rows, rows), x[:2, 0]), backend=backend("onnxruntime"))
    x = torch.randn(4, 3)
    torch.testing.assert_close(compiled(x), x.index_put((rows, rows), x[:2, 0]))
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


@both
def test_inputs_that_change_and_views_are_eagers(engine):
    """A graph may write to an input, and may return a view of one."""

    def fn(x, y):
        y.add_(torch.relu(x))
        return x.view(-1), y * 2

    compiled = torch.compile(fn, backend=backend(engine))
    x, y, z = torch.randn(4, 4), torch.zeros(4, 4), torch.zeros(4, 4)
    view, doubled = compiled(x, y)
    _, wanted = fn(x, z)
    torch.testing.assert_close((y, doubled), (z, wanted))
    assert view.data_ptr() == x.data_ptr()


@both
def test_results_have_eagers_strides_and_memory_of_their_own(engine):
    """Results have eager's strides, and a second call does not change the first one's."""

    def fn(x):
        return torch.relu(x).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) + 1

    compiled = torch.compile(fn, backend=backend(engine))
    first = compiled(X)
    kept = first.clone()
    compiled(X * 2)
    torch.testing.assert_close(first, kept)
    assert first.stride() == fn(X).stride()


@both
def test_two_threads_at_once(engine):
    """Two threads can call one compiled function at the same time."""
    model = small()
    compiled = torch.compile(model, backend=backend(engine))
    check(compiled, model, X)
    inputs = [X + i for i in range(4)]
    with torch.no_grad():
        wanted, given = [model(x) for x in inputs], {}

    def work(i):
        with torch.no_grad():
            for _ in range(20):
                given[i] = compiled(inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(wanted):
        torch.testing.assert_close(given[i], result, rtol=1e-4, atol=1e-4)


@both
def test_operators_can_be_left_to_aten(engine):
    """Operators named in `aten_ops` run in eager, and the report says so."""
    model = small()
    compiled = torch.compile(model, backend=backend(engine, aten_ops=("addmm",)))
    check(compiled, model, X)
    assert bk.report(compiled).graphs[0].engine.fallbacks == {"addmm": "left to ATen by aten_ops"}


@both
@pytest.mark.parametrize("size", [8, 1], ids=["strided", "contiguous"])
def test_a_pending_negation_is_applied(engine, size):
    """An input that torch has negated only in name, as a conjugate's imaginary part, has its sign."""
    x = torch.complex(X, X + 1).flatten()[:size].conj().imag
    assert (x.is_neg(), x.is_contiguous()) == (True, size == 1)
    compiled = torch.compile(lambda x: torch.sin(x) + 1, backend=backend(engine))
    torch.testing.assert_close(compiled(x), torch.sin(x) + 1, rtol=1e-4, atol=1e-4)
    assert bk.report(compiled).graphs[0].engine.fallbacks == {}


def short(x):
    return torch.relu(x * 2) + torch.rand_like(x)


def long(x):
    for _ in range(9):
        x = torch.sin(x) + 1
    return x + torch.rand_like(x)


def product(x):
    return torch.mm(x, x.T).relu() + torch.rand(1)


LEAST = {"onnxruntime": 4, "openvino-native": 8}
BLOCKS = [
    pytest.param(short, (8, 8), 0, id="few operators"),
    pytest.param(short, (1024, 1024), 1, id="many elements"),
    pytest.param(product, (128, 128), 1, id="a large product"),
    pytest.param(product, (16, 16), 0, id="a small product"),
    pytest.param(long, (8, 8), 1, id="many operators"),
]


@pytest.mark.parametrize(
    ("engine", "dynamic", "fn", "sizes", "parts"),
    [
        pytest.param(
            *engine.values, dynamic, *block.values, id=f"{engine.values[0]}-{sizes}-{block.id}", marks=engine.marks
        )
        for engine in ENGINES
        for dynamic, sizes in ((False, "fixed sizes"), (True, "dynamic sizes"))
        for block in BLOCKS
        # What little work is does not depend on the engine, only the number of operators.
        if engine is ENGINES[0] or (not dynamic and "operators" in block.id)
    ],
)
def test_a_part_that_costs_more_than_eager_runs_in_eager(engine, dynamic, fn, sizes, parts):
    """A part of few operators and little work is left to eager, and the report says why."""
    compiled = torch.compile(fn, backend=bk.make_backend(engine), dynamic=dynamic)
    x = torch.randn(sizes)
    torch.manual_seed(0)
    given = compiled(x)
    torch.manual_seed(0)
    torch.testing.assert_close(given, fn(x), rtol=1e-4, atol=1e-4)
    (graph,) = bk.report(compiled).graphs
    assert len(graph.engine.partitions) == parts
    why = f"a part of fewer than {LEAST[engine]} operators and little work costs more than eager"
    assert graph.engine.fallbacks.get("relu") == (None if parts else why)


@both
def test_without_a_part_modules_share_a_graph(engine):
    """Where nothing is compiled no parameter is a constant, so a second module needs no second graph."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    compiled = torch.compile(lambda model, x: model(x), backend=bk.make_backend(engine))
    x = torch.randn(2, 4)
    for model in (first, second):
        check(compiled, lambda model, x: model(x), model, x)
    assert len(bk.report(compiled).graphs) == 1


@both
def test_is_raced_where_the_caller_froze_the_parameters(engine, tmp_path):
    """The engines are raced only with `freezing`, since they make parameters constants."""
    model = nn.Linear(8, 4)
    for freezing, status in ((False, "skipped"), (True, "pass")):
        torch._dynamo.reset()
        backend = bk.make_backend(
            "tmpl-inductor:auto",
            candidates=[f"{engine}[min_block_size=1]"],
            freezing=freezing,
            budget_s=300.0,
            store=str(tmp_path / "store"),
        )
        compiled = torch.compile(model, backend=backend)
        check(compiled, model, X)
        row = bk.report(compiled).graphs[0].race.rows[-1]
        assert (row.name, row.compiler, row.status) == (f"{engine}[min_block_size=1]", engine, status)


WRONG = {
    "onnxruntime threads": (
        "onnxruntime",
        {"intra_op_num_threads": 0},
        "ONNX Runtime option 'intra_op_num_threads' must be int of at least 1 | None, got 0 (int).",
    ),
    "onnxruntime name": (
        "onnxruntime",
        {"spinning": True},
        "Unknown ONNX Runtime option 'spinning'. Did you mean 'allow_spinning'?",
    ),
    "openvino-native precision": (
        "openvino-native",
        {"inference_precision": "fp8"},
        "OpenVINO option 'inference_precision' must be 'f32' | 'bf16' | 'f16', got 'fp8' (str).",
    ),
    "openvino-native property": (
        "openvino-native",
        {"config": {"NUM_STREAM": 1}},
        "Unknown property of OpenVINO's CPU 'NUM_STREAM'. Did you mean 'NUM_STREAMS'?",
    ),
}


@pytest.mark.parametrize(("name", "options", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_option_raises_at_once(name, options, message):
    """A wrong option raises before there is a graph."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.make_backend(name, options)
    assert " ".join(str(raised.value).split()) == message


KEYS, SEEN = torch.randn(1, 2, 8, 16), torch.ones(1, 1, 1, 8, dtype=torch.bool)


def attend(q):
    """Return a view of attention's result, which OpenVINO's decompositions lay out in another order."""
    return torch.nn.functional.scaled_dot_product_attention(q, KEYS, KEYS, attn_mask=SEEN).view(1, 4, 1, 16)


@torch.no_grad()
def test_attention_is_left_to_aten():
    """In float32 ATen's kernel runs attention, with eager's numbers."""
    pytest.importorskip("openvino")
    compiled, rows = torch.compile(attend, backend=backend("openvino-native")), torch.randn(1, 2, 2, 16)
    assert torch.equal(compiled(rows), attend(rows))
    fallbacks = bk.report(compiled).graphs[0].engine.fallbacks
    assert fallbacks["_scaled_dot_product_flash_attention_for_cpu"] == (
        "ATen's kernel is faster than the parts that OpenVINO takes"
    )


@torch.no_grad()
def test_a_graph_that_cannot_be_traced_runs_in_eager():
    """A graph that a decomposition breaks is no error: it is decomposed below float32."""
    pytest.importorskip("openvino")
    rows = torch.randn(1, 2, 2, 16)
    compiled = torch.compile(attend, backend=backend("openvino-native", inference_precision="bf16"))
    with pytest.warns(BackendKwargsWarning) as caught:
        torch.testing.assert_close(compiled(rows), attend(rows))
    wanted = (
        "OpenVINO compiles nothing of a graph, which runs in eager: AOTAutograd cannot trace it with OpenVINO's "
        "decompositions: ValueError: Cannot view a tensor with shape"
    )
    assert any(str(each.message).startswith(wanted) for each in caught)
    assert "ran in eager: no partition of OpenVINO" in str(bk.report(compiled))


def with_nan(*shape):
    """Return numbers of both signs, of which every fifth is nan."""
    numbers = torch.arange(torch.Size(shape).numel()) * 7 % 13 - 6.0
    numbers[::5] = torch.nan
    return numbers.reshape(shape)


NAN = {
    "max_pool1d": lambda x: nn.functional.max_pool1d(x[0], 2),
    "max_pool2d": lambda x: nn.functional.max_pool2d(x, 3, 2, 1),
    "max_pool3d": lambda x: nn.functional.max_pool3d(x[None], 2),
    "adaptive_max_pool2d": lambda x: nn.functional.adaptive_max_pool2d(x, 3),
    "amax": lambda x: x.amax(1),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "sign": torch.sign,
    "comparison": lambda x: torch.where(x <= 0, 1.0, 2.0),
    "infinite norm": lambda x: torch.linalg.vector_norm(x, torch.inf, 1),
    "norm of -inf": lambda x: torch.linalg.vector_norm(x, -torch.inf, 1),
}


@both
@torch.no_grad()
def test_nan_stays_nan(engine):
    """What compares numbers, between two other operators, gives nan where eager does."""
    x = with_nan(2, 3, 8, 8)

    def compares(x):
        return [function(x * 2) + 1 for function in NAN.values()]

    results = torch.compile(compares, backend=backend(engine))(x)
    assert [
        name for name, one, other in zip(NAN, results, compares(x), strict=True) if not one.isnan().equal(other.isnan())
    ] == []
