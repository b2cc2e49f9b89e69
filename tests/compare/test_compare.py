"""Whole comparisons through real torch.compile, with Inductor only where it matters."""

import os
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from backend_kwargs import make_backend
from backend_kwargs.compare import Candidate, Row, compare, fastest
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.harness import trial as isolating
from backend_kwargs.harness.study import checksum
from backend_kwargs.report.graphs import RETURNED, UNKNOWN
from backend_kwargs.trial import memory, timing
from benchmarks.execution.controls import slow_while_held

ROUNDS = 3
EAGER = Candidate("eager")


@pytest.fixture(params=[pytest.param(True, id="isolate_recompiles"), pytest.param(False, id="before torch 2.13")])
def isolation(request, monkeypatch):
    """Compile as this torch allows, and as torch before 2.13 does."""
    if not request.param:
        monkeypatch.setattr(isolating, "_can_isolate", lambda: False)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def rows_of(model, candidates, inputs=None, **kwargs) -> list[Row]:
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)) if inputs is None else inputs
    return compare(model, inputs, candidates, rounds=kwargs.pop("rounds", ROUNDS), **kwargs).rows


def forward(gm, example_inputs):
    """Return the graph uncompiled."""
    return gm.forward


def wrong(gm, example_inputs):
    """Scale every output by 1.05."""
    return lambda *args: tuple(1.05 * out for out in gm(*args))


def no_op(gm, example_inputs):
    """Return uninitialised memory instead of computing."""
    shapes = [torch.empty_like(out) for out in gm(*example_inputs)]
    return lambda *args: tuple(out.clone().zero_() for out in shapes)


def cached(gm, example_inputs):
    """Compute once, and return the first result for ever."""
    kept = []

    def run(*args):
        kept[:] = kept or gm(*args)
        return tuple(kept)

    return run


def lazy_cached(calls: int):
    """Be right for some calls, to pass a check that comes only before timing."""

    def backend(gm, example_inputs):
        left, kept = calls, []

        def run(*args):
            nonlocal left
            left -= 1
            if left < 0 and kept:
                return tuple(kept)
            kept[:] = gm(*args)
            return tuple(kept)

        return run

    return backend


def remembering(calls: int):
    """Be right for some calls, and then return stored results by input."""

    def backend(gm, example_inputs):
        left, seen = calls, {}

        def run(*args):
            nonlocal left
            left -= 1
            asked = tuple(float(arg.sum()) for arg in args)
            if left >= 0 or not seen:
                seen[asked] = tuple(gm(*args))
            return seen.get(asked, next(iter(seen.values())))

        return run

    return backend


def refusing(gm, example_inputs):
    raise ValueError("this one\ncannot")


def breaking_later(gm, example_inputs):
    left = 6

    def run(*args):
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("too many blocks in cooperative launch")
        return gm(*args)

    return run


def out_of_memory(gm, example_inputs):
    raise torch.OutOfMemoryError("no memory left")


# ---- candidates compile, each for itself


@pytest.mark.parametrize(
    ("isolation", "mode"),
    [
        pytest.param(False, "inference", id="before torch 2.13, inference"),
        pytest.param(True, "training", id="isolate_recompiles, training"),
    ],
    indirect=["isolation"],
)
def test_twelve_candidates_compile(isolation, mode):
    """All of twelve candidates compile their graph, despite dynamo's limit of eight variants."""
    backends = ["eager", "aot_eager", *(lambda gm, inputs: gm.forward for _ in range(10))]
    rows = rows_of(mlp(), [Candidate(str(at), backend) for at, backend in enumerate(backends)], rounds=1, mode=mode)
    statuses = ["fell_back", "unknown", *["fell_back"] * 10]
    assert [(row.status, row.graphs) for row in rows] == [(status, 1) for status in statuses]


class Broken(nn.Module):
    """A model with a graph break in a submodule."""

    class Inner(nn.Module):
        def forward(self, x):
            x = x.sin()
            torch._dynamo.graph_break()
            return x.cos()

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        return self.inner(x + 1) + 1


def test_twelve_candidates_compile_through_a_graph_break(isolation):
    """Submodules that become separate frames at a graph break reach no limit either."""
    rows = rows_of(Broken(), [Candidate(str(at), lambda gm, inputs: gm.forward) for at in range(12)], rounds=1)
    assert {(row.status, row.graphs > 1) for row in rows} == {("fell_back", True)}
    assert len({row.graphs for row in rows}) == 1


def test_graph_break_is_counted():
    """A graph break shows as more than one graph."""
    whole, broken = rows_of(mlp(), [Candidate("c", "eager")]), rows_of(Broken(), [Candidate("c", "eager")])
    assert whole[0].graphs == 1
    assert broken[0].graphs > 1


class Counter(nn.Module):
    """A model that dynamo recompiles at each call, since it guards on a changing int."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + 0 * self.calls


def test_recompile_is_caught():
    """A candidate that compiles while it is timed fails; eager still passes."""
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=False):
        eager, compiled = rows_of(Counter(), [EAGER, Candidate("c", "eager")])
    assert (eager.status, compiled.status) == ("pass", "fail_to_run")
    assert compiled.reason == "recompiled at each call, since an attribute of the model changes"
    assert compiled.latency is None


class History(nn.Module):
    """A model that keeps its last two inputs."""

    def __init__(self):
        super().__init__()
        self.last = []

    def forward(self, x):
        self.last = [*self.last[-1:], x]
        return torch.stack(self.last).sum(0)


def test_a_history_that_fills_is_timed():
    """What compiles again until a list is full, and then no longer, passes."""
    _, compiled = rows_of(History(), [EAGER, Candidate("c", "inductor")])
    assert (compiled.status, compiled.reason) == ("pass", "")


class Step(nn.Module):
    """A step of decoding, with one free row in its cache."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 16))
        self.register_buffer("filled", torch.tensor([3]))

    def forward(self, x):
        at = torch.arange(1) + self.filled
        self.filled.add_(1)
        self.keys.index_copy_(0, at, x[:1])
        return (self.keys @ x[0]).softmax(0)


def test_each_call_of_a_step_starts_from_its_state():
    """A step whose second call would go past its cache is compiled, checked and timed; the user's stays as it was."""
    model = Step()
    rows = rows_of(model, [EAGER, Candidate("c", "inductor")])
    assert [(row.status, row.reason, row.graphs) for row in rows] == [("pass", "", 0), ("pass", "", 1)]
    assert model.filled.item() == 3


class Growing(nn.Module):
    """A step that appends to a list in its input."""

    def forward(self, x, cache):
        cache.append(x.sum())
        return torch.stack(cache).sum() * x


def test_lists_in_inputs_do_not_grow():
    """Each call finds the list that the user passed, so that nothing recompiles."""
    inputs = (torch.randn(4), [torch.ones(())])
    rows = rows_of(Growing(), [EAGER, Candidate("c", "inductor")], inputs)
    assert [(row.status, row.reason, row.graphs) for row in rows] == [("pass", "", 0), ("pass", "", 1)]
    assert len(inputs[1]) == 1


class Filling(nn.Module):
    """A step that fills a dict in its input."""

    def forward(self, x, past):
        past["k"] = torch.cat((past["k"], x)) if "k" in past else x
        return past["k"] * 2


def test_dicts_in_inputs_are_emptied():
    """Each call finds the dict that the user passed."""
    rows = rows_of(Filling(), [EAGER, Candidate("c", "inductor")], (torch.randn(4), {}))
    assert [(row.status, row.reason, row.graphs) for row in rows] == [("pass", "", 0), ("pass", "", 1)]


def drawing(x, generator):
    return x + torch.rand(4, generator=generator)


def test_generators_as_arguments():
    """Each call draws what the user's first one does."""
    (row,) = rows_of(drawing, [EAGER], (torch.randn(4), torch.Generator().manual_seed(3)))
    assert (row.status, row.reason) == ("pass", "")


class State:
    """An object that torch's pytrees do not know, such as a decoder's cache."""

    def __init__(self, *values):
        self.values = list(values)


class WithState(nn.Module):
    def forward(self, x):
        return State(x.sin(), State(x.cos()))


@pytest.mark.parametrize(
    ("backend", "status"), [("inductor", "pass"), (wrong, "fail_accuracy")], ids=["right", "wrong"]
)
def test_tensors_in_objects_are_compared(backend, status):
    """A result may be an object: its attributes are compared, not its identity."""
    (row,) = rows_of(WithState(), [Candidate("c", backend)], (torch.randn(64),))
    assert row.status == status


def test_silent_eager_is_caught():
    """A model that dynamo skips is reported, and not timed as compiled."""
    model = mlp()
    model.forward = torch._dynamo.disable(model.forward)
    (row,) = rows_of(model, [Candidate("c", "eager")])
    assert (row.status, row.graphs) == ("fail_to_run", 0)
    assert row.reason == "no graph reached the backend: this would run in eager"


def test_timed_callable_is_the_backends_own():
    """Counting wraps the compile but not the call: dynamo gets the function that the backend returned."""
    compiled = isolating.Counted(forward)
    gm = torch.fx.symbolic_trace(mlp())
    assert compiled(gm, []) == gm.forward
    assert compiled.graphs == 1


def test_modes_of_inductor_are_bound():
    """A mode is passed to plain "inductor" as torch.compile passes it."""
    counted, left = isolating.counted("inductor", "max-autotune-no-cudagraphs")
    assert counted.get_compiler_config()["max_autotune"] is True
    assert counted.compiler_name == "inductor"
    assert left == {"dynamic": None}


def test_modes_of_other_backends_are_passed_on():
    """Any other backend gets mode and options as torch.compile passes them."""
    got = {}

    def backend(gm, example_inputs, **kwargs):
        got.update(kwargs)
        return gm.forward

    rows_of(mlp(), [Candidate("c", backend, options={"a": 1})])
    assert got == {"options": {"a": 1}}


# ---- wrong results are reported, and timed all the same


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(wrong, id="wrong"),
        pytest.param(no_op, id="no-op"),
        pytest.param(cached, id="cached"),
        pytest.param(lazy_cached(6), id="later"),
        pytest.param(remembering(6), id="remembers each input"),
    ],
)
def test_cheats_are_caught(backend):
    """A wrong, missing or remembered result is reported and timed, even if it starts during timing."""
    good, bad = rows_of(mlp(), [Candidate("good", forward), Candidate("bad", backend)])
    assert (good.status, bad.status) == ("fell_back", "fail_accuracy"), bad.reason
    assert bad.latency
    assert bad.speedup
    assert not bad.right
    assert "RMSE to the reference" in bad.reason


def a_little_wrong(gm, example_inputs):
    return lambda *args: tuple(1.02 * out for out in gm(*args))


@pytest.mark.parametrize(
    ("tolerance", "status"), [pytest.param(None, "fail_accuracy", id="default"), pytest.param(0.1, "unknown", id="0.1")]
)
def test_tolerance(tolerance, status):
    """A larger tolerance accepts what the default refuses."""
    (row,) = compare(mlp(), torch.randn(64, 16), [Candidate("c", a_little_wrong)], rounds=1, tolerance=tolerance).rows
    assert row.status == status


def noisy(x):
    return x * torch.rand_like(x)


def test_a_model_that_draws_is_compared_with_its_own_numbers(fresh_dynamo):
    """In float64 it would draw others, from which eager is so far off that anything is as near."""
    good, bad = rows_of(noisy, [Candidate("good", forward), Candidate("bad", a_little_wrong)], torch.randn(64, 64))
    assert good.status == "fell_back"
    assert bad.reason.startswith("output: RMSE to the reference")


def test_tolerance_of_nothing_is_refused():
    """A tolerance of 0, which would accept nothing, is refused."""
    with pytest.raises(BackendKwargsError) as error:
        compare(mlp(), torch.randn(2, 16), [EAGER], tolerance=0.0)
    assert str(error.value) == "tolerance must be a number above 0, got 0.0 (float)."


def wraps(gm, example_inputs):
    return lambda *args: list(gm(*args))


@pytest.mark.parametrize(
    ("backend", "status", "reason"),
    [
        pytest.param("inductor", "pass", "", id="torch's Inductor"),
        pytest.param(make_backend("tmpl-inductor:aten"), "pass", "", id="ours"),
        pytest.param(forward, "fell_back", RETURNED.what, id="a function that returns the graph"),
        pytest.param(make_backend(forward), "fell_back", RETURNED.what, id="the same as ours"),
        pytest.param(wraps, "unknown", UNKNOWN.what, id="another function"),
        pytest.param(make_backend(wraps), "unknown", UNKNOWN.what, id="the same as ours too"),
    ],
)
def test_what_ran_is_a_status(backend, status, reason):
    """A row passes only if it is known that its own backend ran; others are timed with their own status."""
    (row,) = rows_of(mlp(), [Candidate("c", backend)], rounds=1)
    assert (row.status, row.reason, row.right) == (status, reason, True)


@pytest.mark.skipif(not find_spec("openvino"), reason="no OpenVINO")
@pytest.mark.filterwarnings("ignore:torch._dynamo.config.inline_inbuilt_nn_modules is deprecated:FutureWarning")
def test_a_fallback_of_openvinos_own_backend_is_not_seen():
    """OpenVINO's own backend falls back without saying so: its row is right, and no pass."""
    candidate = Candidate("c", make_backend("openvino", config={"NO_SUCH_PROPERTY": "1"}))
    (row,) = rows_of(mlp(), [candidate], rounds=1)
    assert (row.status, row.right) == ("unknown", True)


class WrongGradient(torch.autograd.Function):
    """The identity function, with twice the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def doubled(x):
    return 2 * x + 1


@pytest.mark.skipif(not find_spec("onnxruntime"), reason="no ONNX Runtime")
def test_a_function_has_a_row_for_each_backends_own_graphs():
    """ONNX Runtime has no 16-bit integers; that is not said of another backend that compiled the same function."""
    engine, inductor = Candidate("engine", make_backend("onnxruntime")), Candidate("inductor", "inductor")
    ours = Candidate("ours", make_backend("tmpl-inductor"))
    found = compare(doubled, torch.arange(8, dtype=torch.int16), [EAGER, engine, inductor, ours], rounds=2)
    assert [row.status for row in found.rows] == ["pass", "fell_back", "pass", "pass"]
    graphs = [sum(line.startswith("graph ") for line in row.report.splitlines()) for row in found.rows]
    assert graphs == [0, 1, 0, 1]


def test_wrong_gradients_are_caught():
    """In training a right output with wrong gradients fails."""

    def backend(gm, example_inputs):
        return lambda *args: tuple(WrongGradient.apply(out) for out in gm(*args))

    good, bad = rows_of(mlp(), [Candidate("good", "aot_eager"), Candidate("bad", backend)], mode="training")
    assert (good.status, bad.status) == ("unknown", "fail_accuracy")
    assert bad.reason.startswith("gradients[")


def test_lost_mutation_is_caught():
    """A backend that forgets to update a buffer fails, although its outputs are right."""

    def backend(gm, example_inputs):
        def call(*args):
            return gm(*(arg.clone() if torch.is_tensor(arg) and arg.ndim < 2 else arg for arg in args))

        return call

    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    good, bad = rows_of(model, [Candidate("good", "eager"), Candidate("bad", backend)], mode="training")
    assert (good.status, bad.status) == ("fell_back", "fail_accuracy")
    assert bad.reason.startswith("state[")


def test_a_written_input_is_caught():
    """A backend that writes an input which eager only reads fails, although its outputs are right."""

    def backend(gm, example_inputs):
        def call(*args):
            results = gm(*args)
            args[-1].data.add_(1)
            return results

        return call

    (bad,) = rows_of(torch.sin, [Candidate("bad", backend)], inputs=(torch.randn(8),))
    assert (bad.status, bad.reason) == ("fail_accuracy", "input 0: it is written, and eager only reads it")


class Held(nn.Module):
    """Reads a parameter, a buffer and a plain attribute."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("shift", torch.ones(16))
        self.table = torch.ones(16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        self.seen.copy_(torch.maximum(self.seen, x.detach().amax(0)))
        return x * self.weight + self.shift + self.table


def writing(part, *, fails=False):
    """Return a backend that doubles a tensor of the model in each call, without a new version of it."""

    def backend(gm, example_inputs):
        at = next(i for i, node in enumerate(gm.graph.find_nodes(op="placeholder")) if part in node.name)

        def call(*args):
            results = gm(*args)
            args[at].data.mul_(2)
            if fails:
                raise ValueError("this one")
            return results

        return call

    return backend


HELD = [
    pytest.param("weight", "weight", id="parameter"),
    pytest.param("shift", "shift", id="buffer"),
    pytest.param("table", "['table']", id="attribute"),
]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(("part", "name"), HELD)
def test_a_written_weight_is_caught(part, name, mode):
    """A backend that writes what eager only reads fails, and those before and after it do not."""
    candidates = [EAGER, Candidate("bad", writing(part)), Candidate("good", forward)]
    eager, bad, good = rows_of(Held(), candidates, mode=mode)
    assert (bad.status, bad.reason) == ("fail_accuracy", f"it changes {name}, which eager only reads")
    assert (eager.status, good.status) == ("pass", "fell_back")


def test_a_weight_is_put_back_after_a_failure():
    """A backend that writes and then raises does not spoil the results of the others."""
    eager, bad, good = rows_of(
        Held(), [EAGER, Candidate("bad", writing("weight", fails=True)), Candidate("good", forward)]
    )
    assert (eager.status, bad.reason, good.status) == ("pass", "ValueError: this one", "fell_back")


def test_a_written_weight_is_caught_without_a_copy(monkeypatch):
    """Of a model too large to copy, checksums show what was written, and only the one that wrote is blamed for it."""
    monkeypatch.setattr(memory, "LARGEST_COPIES", 0)
    bad, later = rows_of(Held(), [Candidate("bad", writing("weight")), Candidate("later", forward)])
    assert later.reason.startswith("output: ")
    assert bad.reason == (
        "it changes weight, which eager only reads; the model is too large to put it back, so later rows may be wrong"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool], ids=str)
def test_a_checksum_depends_on_the_order(dtype):
    x = torch.arange(6).remainder(2).reshape(2, 3).to(dtype)
    assert torch.equal(checksum(x), checksum(x.clone()))
    assert not torch.equal(checksum(x), checksum(x.flip(1).roll(1, 1)))


@pytest.mark.parametrize(
    ("backend", "status", "reason"),
    [
        pytest.param(refusing, "fail_to_run", "ValueError: this one", id="compile"),
        pytest.param(breaking_later, "fail_to_run", "RuntimeError: too many blocks in cooperative launch", id="run"),
        pytest.param(out_of_memory, "oom", "OutOfMemoryError: no memory left", id="memory"),
        pytest.param(
            "no_such_backend",
            "unavailable",
            "InvalidBackend: Invalid backend: 'no_such_backend', see `torch._dynamo.list_backends()` for available "
            "backends.",
            id="name",
        ),
    ],
)
def test_failing_candidate_is_a_row(backend, status, reason):
    """A candidate that fails is reported in one line, and the others are still compared."""
    bad, good = rows_of(mlp(), [Candidate("bad", backend), Candidate("good", "eager")])
    assert (bad.status, bad.reason, bad.latency) == (status, reason, None)
    assert good.verdict == "baseline"


def test_unrepeatable_eager_is_told():
    """If eager is not reproducible nothing can be checked, so nothing is timed."""
    drift = iter(range(1000))
    rows = rows_of(lambda x: x + next(drift), [EAGER, Candidate("c", forward)])
    assert [row.status for row in rows] == ["eager_two_runs_differ"] * 2
    assert [row.latency for row in rows] == [None] * 2


def test_failing_eager_is_told():
    """A model that does not run gives rows with the reason."""
    rows = rows_of(mlp(), [EAGER, Candidate("c", "eager")], torch.randn(3, 5))
    assert [row.status for row in rows] == ["fail_to_run"] * 2
    assert rows[0].reason.startswith("eager failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied")


# ---- figures


def test_rows_hold_their_figures():
    """A row that passed has compile seconds, a latency, a speedup, memory, errors and its raw samples."""
    found = compare(mlp(), torch.randn(8, 16), [EAGER, Candidate("c", "aot_eager")], rounds=5)
    eager, compiled = found.rows
    assert (found.baseline, eager.verdict) == ("eager", "baseline")
    assert (eager.compile_s, eager.graphs) == (None, 0)
    assert compiled.compile_s > 0
    assert compiled.latency.low <= compiled.latency.median <= compiled.latency.high
    assert compiled.speedup is not None
    assert len(compiled.samples) == 5
    assert compiled.accuracy.rmse < 1e-5
    assert compiled.accuracy.reference_rmse < 1e-5
    assert found.noise.low <= 1 <= found.noise.high


@pytest.fixture
def passes(monkeypatch):
    """Return a function that moves the clock of timings, which nothing else moves."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(timing, "MOST_REPEATS", 1)  # the model itself, which is timed too, does not move it
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_slow_candidate_is_seen(passes):
    """The speedup of a candidate whose calls take ten times as long is a tenth."""

    def taking(seconds):
        return lambda gm, example_inputs: lambda *args: passes(seconds) or gm(*args)

    x = torch.randn(2, 16)
    candidates = [Candidate("fast", taking(0.005)), Candidate("slow", taking(0.05))]
    fast, slower = rows_of(mlp(), candidates, x, rounds=5)
    assert fast.verdict == "baseline"
    assert slower.speedup.median == pytest.approx(0.1)


def test_what_is_fast_only_while_results_are_dropped_loses(passes):
    """A planted candidate that is slow while its last result is alive is measured as slower."""

    def steady(gm, example_inputs):
        return lambda *args: passes(0.03) or gm(*args)

    def planted(gm, example_inputs):
        return slow_while_held(lambda *args: passes(0.01) or gm(*args), lambda: passes(0.5))

    found = compare(mlp(), torch.randn(2, 16), [Candidate("steady", steady), Candidate("planted", planted)], rounds=3)
    assert found.rows[1].samples == pytest.approx([0.51] * 3)
    assert found.rows[1].speedup.median < 1
    assert fastest(found) is None


@pytest.mark.parametrize(
    ("labels", "wanted", "baseline"),
    [
        pytest.param(["a", "eager"], None, "eager", id="eager"),
        pytest.param(["a", "b"], None, "a", id="first"),
        pytest.param(["a", "eager"], "a", "a", id="named"),
        pytest.param(["bad", "b"], "bad", "b", id="named one fails"),
        pytest.param(["wrong", "b"], "wrong", "b", id="named one is wrong"),
        pytest.param(["wrong"], None, "wrong", id="all are wrong"),
    ],
)
def test_baseline(labels, wanted, baseline):
    """The baseline is the requested one, else eager, else the first that passes."""
    backends = {"eager": None, "bad": refusing, "wrong": a_little_wrong}
    found = compare(
        mlp(), torch.randn(64, 16), [Candidate(n, backends.get(n, forward)) for n in labels], rounds=1, baseline=wanted
    )
    assert found.baseline == baseline


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(torch.ones(2, 3), id="tensor"),
        pytest.param([torch.ones(2, 3)], id="list"),
        pytest.param({"x": torch.ones(2, 3)}, id="mapping"),
        pytest.param(([torch.ones(2, 3)], {"by": 3}), id="arguments and keywords"),
    ],
)
def test_example_inputs(inputs):
    """Inputs are a tensor, positional arguments, keywords or both, and the model may be a function."""
    (row,) = rows_of(lambda x, by=2: {"y": x * by}, [Candidate("c", "inductor")], inputs)
    assert row.status == "pass"


def test_dropout_is_off_in_training_and_told():
    """Training runs without dropout, and says so, since Inductor draws other masks."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    found = compare(model, torch.randn(4, 16), [Candidate("c", "aot_eager")], mode="training", rounds=1)
    assert found.rows[0].right
    assert "Dropout is off" in found.notes[1]
    assert model[1].p == 0.5


def test_inductor_compiles_cold():
    """Two equal candidates both compile: neither finds the other's kernels in a cache."""
    rows = rows_of(mlp(), [Candidate("one", "inductor"), Candidate("two", "inductor")], rounds=1)
    assert [(row.status, row.graphs, row.cache) for row in rows] == [("pass", 1, "cold")] * 2


# ---- nothing stays changed


def test_nothing_stays_changed(isolation):
    """Model, gradients, inputs, random state, grad mode, dynamo's config and environment are restored."""
    model, x = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).train(), torch.randn(4, 16)
    rows_of(mlp(), [Candidate("first", "eager")])
    state, given = {name: tensor.clone() for name, tensor in model.state_dict().items()}, x.clone()
    before = (torch._dynamo.config.get_config_copy(), torch._inductor.config.get_config_copy(), dict(os.environ))
    rng = torch.get_rng_state()
    rows_of(model, [EAGER, Candidate("c", "aot_eager"), Candidate("bad", refusing)], x, mode="training")
    rows_of(model, [EAGER, Candidate("c", "aot_eager"), Candidate("bad", refusing)], x)
    assert before == (
        torch._dynamo.config.get_config_copy(),
        torch._inductor.config.get_config_copy(),
        dict(os.environ),
    )
    assert torch.equal(rng, torch.get_rng_state())
    assert torch.equal(given, x)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert model[0].weight.grad is None
    assert torch.is_grad_enabled()


def test_failing_candidate_leaves_no_folder(tmp_path, monkeypatch):
    """A candidate's cache folder is removed, even if it fails."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows_of(mlp(), [Candidate("bad", refusing), Candidate("good", "eager")])
    assert list(tmp_path.iterdir()) == []


# ---- arguments


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        pytest.param({"mode": "train"}, "mode must be 'inference' or 'training', got 'train' (str).", id="mode"),
        pytest.param({"rounds": 0}, "rounds must be a whole number of at least 1, got 0 (int).", id="rounds"),
        pytest.param(
            {"rounds": 1.5}, "rounds must be a whole number of at least 1, got 1.5 (float).", id="half a round"
        ),
        pytest.param({"baseline": "eagre"}, "Unknown baseline 'eagre'. Did you mean 'eager'?", id="baseline"),
        pytest.param(
            {"baseline": "zzz"},
            "Unknown baseline 'zzz'. It is the label of one of the candidates.",
            id="far baseline",
        ),
        pytest.param(
            {"candidates": [EAGER, EAGER]},
            "Candidate 'eager' is given twice: name it once, or give each Candidate its own label.",
            id="twice",
        ),
        pytest.param(
            {"example_inputs": 3},
            "Inputs must be a tensor, a tuple of arguments, a dict of keywords, or (args, kwargs), got 3 (int).",
            id="inputs",
        ),
        pytest.param(
            {"example_inputs": [(x for x in ())]},
            "compare copies the model and its inputs, which failed: TypeError: cannot pickle 'generator' object",
            id="copy",
        ),
        pytest.param(
            {"device": ""},
            "Cannot run on device '', try 'cpu': RuntimeError: Device string must not be empty.",
            id="device",
        ),
        pytest.param(
            {"device": "xpu", "example_inputs": 3},
            "Cannot run on device 'xpu', try 'cpu': AssertionError: Torch not compiled with XPU enabled.",
            id="device of another build, first of all",
            marks=pytest.mark.skipif(torch.xpu.is_available(), reason="an XPU is here"),
        ),
    ],
)
def test_wrong_arguments(kwargs, message):
    """A wrong argument raises at once."""
    arguments = {"model": mlp(), "example_inputs": torch.ones(2, 16), "candidates": [EAGER], **kwargs}
    with pytest.raises(BackendKwargsError) as raised:
        compare(**arguments)
    assert str(raised.value) == message
