"""Candidates are versions of graphs that are traced once, and the winner is what was raced."""

import gc

import pytest
import torch

import backend_kwargs
from backend_kwargs.auto import compiling, process_memory, race
from backend_kwargs.backends.inductor import lowered
from backend_kwargs.graphs.replay import Task
from backend_kwargs.torch_internals import functorch
from backend_kwargs.torch_internals.caches import fresh_cache
from backend_kwargs.torch_internals.dynamo import counters
from tests.auto.graphs import chain, rows_of

STEPS = ["no_size_asserts", "one_thread"]
REPEATED = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(32, 64), torch.nn.LayerNorm(64)
        self.conv = torch.nn.Conv1d(1, 4, 3)

    def forward(self, x):
        y = torch.nn.functional.gelu(self.norm(self.first(x)))
        return self.conv(y[:, None]).softmax(-1), y @ y.t(), x[:1] @ x.t()


@pytest.fixture
def traces(monkeypatch):
    """Return the numbers of graphs of each trace and of each further lowering, in order."""
    seen = []

    def watch(name):
        original = getattr(compiling.Compiles, name)

        def watched(self, *given):
            made = original(self, *given)
            seen.append((name, len(made.lowered.graphs) if made.lowered else 0))
            return made

        monkeypatch.setattr(compiling.Compiles, name, watched)

    watch("_traced")
    watch("_lowered_again")
    return seen


@pytest.fixture
def lowerings(monkeypatch):
    """Return whether each lowered graph that Inductor compiled was a backward one."""
    from torch._inductor import compile_fx

    seen, original = [], compile_fx.fx_codegen_and_compile
    monkeypatch.setattr(
        compile_fx,
        "fx_codegen_and_compile",
        lambda *a, **kw: seen.append(bool(kw.get("is_backward"))) or original(*a, **kw),
    )
    return seen


@pytest.mark.parametrize(
    ("training", "graphs"), [pytest.param(False, 1, id="inference"), pytest.param(True, 2, id="training")]
)
def test_a_model_is_traced_once(auto, traces, training, graphs):
    """AOTAutograd makes the graphs for the first candidate; the others lower them again."""
    fn = auto(Layers(), candidates=STEPS, race="always")
    with torch.set_grad_enabled(training):
        fn(torch.randn(8, 32))
    assert traces == [("_traced", graphs), ("_lowered_again", graphs), ("_lowered_again", graphs)]


@pytest.mark.parametrize("training", [pytest.param(False, id="inference"), pytest.param(True, id="training")])
def test_the_winner_is_what_was_raced(auto, lowerings, monkeypatch, training):
    """After the race nothing is compiled: AOTAutograd's function is called for the last time in it."""
    counts = []
    original = compiling.Compiles.kept

    def kept(self, candidate):
        counts.append((len(lowerings), counters["aot_autograd"]["total"]))
        return original(self, candidate)

    monkeypatch.setattr(compiling.Compiles, "kept", kept)
    model, x = Layers(), torch.randn(8, 32)
    fn = auto(model, candidates=STEPS, race="always")
    with torch.set_grad_enabled(training):
        found = fn(x)
    assert counts == [(len(lowerings), counters["aot_autograd"]["total"])]
    torch.testing.assert_close(found, model(x))


@pytest.fixture
def two_threads():
    """Where torch has one, code for one thread is default's."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("winner", [pytest.param(name, id=name) for name in ("default", *STEPS)])
def test_each_version_that_is_kept_trains(auto, store, monkeypatch, winner):
    """Gradients of what serves are eager's, whichever version won, also in later steps."""
    monkeypatch.setattr(race, "better", lambda new, old, objective: new.row.name == winner)
    monkeypatch.setattr(race, "is_slower", lambda best, eager: False)
    model, x = Layers(), torch.randn(8, 32)
    fn = auto(model, candidates=STEPS, race="always")
    for _ in range(2):
        model.zero_grad()
        sum(out.sum() for out in fn(x)).backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        sum(out.sum() for out in model(x)).backward()
        torch.testing.assert_close(found, [p.grad for p in model.parameters()], rtol=1e-3, atol=1e-3)
    assert rows_of(store)[winner].won


def test_guards_of_the_trace_are_the_graphs(auto):
    """What was traced for equal inputs is compiled again for different ones, since its guards are kept with it."""

    def f(a, b):
        a.add_(1)
        return a * b

    fn = auto(f, candidates=STEPS, race="always")
    x, y = torch.randn(4), torch.randn(4)
    for first, second in ((x, x), (x, y)):
        want = f(*(given := (first.clone(),) * 2 if first is second else (first.clone(), second.clone())))
        given = (first.clone(),) * 2 if first is second else (first.clone(), second.clone())
        torch.testing.assert_close(fn(*given), want)


def test_sizes_that_change_are_compiled_again(monkeypatch):
    """A graph with symbolic sizes is compiled again after its race, in which candidates may have guarded them."""
    kept = []
    original = compiling.Compiles.kept
    monkeypatch.setattr(compiling.Compiles, "kept", lambda self, made: kept.append(original(self, made)) or kept[-1])
    backend = backend_kwargs.make_backend("tmpl-inductor:auto", candidates=STEPS, race="always")
    fn = torch.compile(chain, backend=backend, dynamic=True)
    for size in (8, 9, 16):
        x = torch.randn(size, 64)
        torch.testing.assert_close(fn(x), chain(x))
    assert kept
    assert all(each is None for each in kept)


@pytest.mark.parametrize("training", [pytest.param(False, id="inference"), pytest.param(True, id="training")])
def test_options_of_lowering_change_no_graph_before(training):
    """What AOTAutograd hands to Inductor is the same under all of these options."""
    values = {"cpp.threads": 1, "cpp.simdlen": 256, "triton.multi_kernel": 3}
    false = ("online_softmax", "size_asserts", "record_cudagraphs")
    changed = {name: values.get(name, name not in false) for name in compiling.OF_LOWERING}

    def graphs(options):
        seen = []

        def keeping(compile_fx, gm, inputs, inner, **kwargs):
            def compile_one(lowered, *given, **also):
                seen.append(lowered.print_readable(print_output=False, include_stride=True))
                return inner(lowered, *given, **also)

            return compile_fx(gm, inputs, compile_one, **kwargs)

        backend = backend_kwargs.make_backend("tmpl-inductor", options=options)

        def compiler(gm, inputs):
            from backend_kwargs.backends import CapturedGraph

            return backend.compile(CapturedGraph(gm, inputs, compile_fx=keeping)).call

        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.set_grad_enabled(training), functorch.patched(**REPEATED):
            torch.compile(Layers(), backend=compiler)(torch.randn(8, 32))
        return seen

    assert len(found := graphs(changed)) == 1 + training
    assert found == graphs({})


@pytest.mark.parametrize("training", [pytest.param(False, id="inference"), pytest.param(True, id="training")])
def test_a_winner_that_was_lowered_again_is_found_by_the_next_process(auto, default_wins, lowerings, training):
    """Inductor's cache has its code, under the key of a graph that is traced anew."""
    x = torch.randn(8, 32)
    with torch.set_grad_enabled(training):
        for _ in range(2):
            torch._dynamo.reset()
            process_memory.forget_process()
            fn = auto(Layers(), candidates=["no_size_asserts"])
            del lowerings[:]
            counters.clear()
            sum(out.sum() for out in fn(x))
    assert lowerings == []
    assert counters["inductor"]["fxgraph_cache_miss"] == 0


def test_nothing_of_a_race_is_left(auto, default_wins):
    """The compiled function of a training step keeps no inputs, references or graphs of its race."""
    fn = auto(Layers(), candidates=STEPS, race="always")
    sum(out.sum() for out in fn(torch.randn(8, 32))).backward()
    gc.collect()
    kinds = (Task, compiling.Compiles, lowered.TracingApart, lowered.LoweredGraph)
    assert [type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds)] == []


def test_the_same_code_has_the_same_artifacts(auto, default_wins, monkeypatch):
    """What torch saves of a candidate belongs to its code with CUDA graphs and without."""
    seen = []
    original = compiling.Compiles.kept

    def kept(self, candidate):
        seen.append((candidate.artifacts, self.other(candidate).artifacts))
        return original(self, candidate)

    monkeypatch.setattr(compiling.Compiles, "kept", kept)
    with fresh_cache():
        auto(Layers(), candidates=["default"], race="always")(torch.randn(8, 32))
    ((its, others),) = seen
    assert its
    assert others == its


def test_graphs_in_a_graph_are_copied(auto, traces, default_wins):
    """A branch that the first lowering changes is as it was for the next one, and results stay right."""

    def branched(x):
        def changed(x):
            y = x.clone()
            y[0] = x.sum()
            return y

        return torch.cond(x.sum() > 0, changed, lambda x: x.clone() * 2, (x,))

    again = []
    original = lowered.Lowered.again

    def watched(self, version):
        again.append([each.gm.true_graph_0.code for each in self.graphs])
        return original(self, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowered.Lowered, "again", watched)
        x = torch.randn(8, 4)
        with torch.no_grad():
            found = auto(branched, candidates=["no_size_asserts", "default"], race="always")(x)
    torch.testing.assert_close(found, branched(x))
    assert len({code for (code,) in again}) == 1
    assert "index_put" in again[0][0] or "select_scatter" in again[0][0]
