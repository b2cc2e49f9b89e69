"""What wins, what never does, and what a race leaves behind: nothing."""

import gc
import os
import re
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor.utils import fresh_cache

import backend_kwargs
from backend_kwargs import measure
from backend_kwargs.compilers.auto import candidates, deciding, race
from backend_kwargs.compilers.auto.apart import LIBDEVICE
from backend_kwargs.compilers.auto.candidates import DEFAULT, EAGER, Candidate
from backend_kwargs.compilers.auto.decisions import Store
from backend_kwargs.compilers.auto.facts import seen_facts
from backend_kwargs.errors import BackendKwargsWarning

TOLD = {"device": "cpu", "training": False, "writes": False, "dynamic": False, "bytes_read": 0.0}


def chain(x):
    return torch.relu(x * 2 + 1).sum(-1)


def rows_of(store):
    (decision,) = Store(store).all()
    return {row["name"]: row for row in decision.rows}


def test_a_wrong_candidate_never_wins(auto, planted, store, log):
    """A candidate whose numbers are not eager's is dropped, and the log names it."""
    x = torch.randn(8, 64)
    assert torch.allclose(auto(chain, ["wrong"])(x), chain(x))
    assert "wrong is dropped: fail_accuracy: output" in log.text


def test_the_next_process_finds_the_winner(auto, store, default_wins):
    """What is compiled after a race lies in AOTAutograd's cache under the key of a process that runs no race."""
    x = torch.randn(8, 64)
    with fresh_cache():
        auto(chain)(x)
        torch._dynamo.reset()
        deciding.forget_process()
        counters.clear()
        auto(chain)(x)
    assert (counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]) == (1, 0)


class Averaged(nn.Module):
    """Weights that a call moves towards others through .data, whose changes no version counts."""

    def __init__(self, move):
        super().__init__()
        self.kept, self.trained = nn.Parameter(torch.ones(64)), nn.Parameter(torch.full((64,), 2.0))
        self.move = move

    def forward(self, x):
        self.move(self.kept, self.trained)
        return (x * self.kept).sin()


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(lambda to, by: to.data.mul_(0.5).add_(by.data, alpha=0.5), id="tensor"),
        pytest.param(lambda to, by: to.data[8:].mul_(0.5), id="view"),
        pytest.param(lambda to, by: to[8:].data.mul_(0.5), id="data of a view"),
        pytest.param(lambda to, by: torch._foreach_lerp_([to.data], [by.data], 0.5), id="list"),
    ],
)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_weights_changed_through_data_are_changed_once(auto, move, grad):
    """A race leaves them as they were, also where dynamo's fakes count no write."""
    model, expected, x = Averaged(move), Averaged(move), torch.randn(8, 64)
    with torch.set_grad_enabled(grad):
        assert torch.allclose(auto(model)(x), expected(x))
    assert torch.equal(model.kept, expected.kept)


def test_a_broken_candidate_hurts_no_other(auto, planted, store, log):
    """A candidate that fails to compile is dropped with its reason."""
    x = torch.randn(8, 64)
    assert torch.allclose(auto(chain, ["crash"])(x), chain(x))
    assert "crash is dropped: fail_to_run: RuntimeError: planted" in log.text


def test_a_slow_candidate_loses(auto, planted, log):
    """The candidate that sleeps 20 ms in each call is not kept."""
    auto(chain, ["slow"])(torch.randn(8, 64))
    slow = next(line for line in log.text.splitlines() if line.strip().startswith("slow "))
    assert "compiled in" in slow
    assert "kept" not in slow


def test_eager_wins_where_compiling_loses(auto, planted, log):
    """Where each compiled candidate is slower, the graph runs as it is."""
    backend_kwargs.register_template("slow_auto", base="auto+slow")
    x = torch.randn(8, 64)
    compiled = torch.compile(chain, backend=backend_kwargs.make_backend("tmpl-inductor:slow_auto", candidates=[]))
    assert torch.equal(compiled(x), chain(x))
    assert "No candidate beats eager on this graph, which runs uncompiled." in log.text


def test_without_a_right_candidate_eager_runs_with_a_warning(auto, planted):
    """Where no compiled candidate is right, a warning says why the graph runs in eager."""
    backend_kwargs.register_template("wrong_auto", base="auto+wrong")
    x = torch.randn(8, 64)
    compiled = torch.compile(chain, backend=backend_kwargs.make_backend("tmpl-inductor:wrong_auto", candidates=[]))
    with pytest.warns(BackendKwargsWarning, match=r"A graph runs in eager, as no candidate is right: default: output"):
        assert torch.equal(compiled(x), chain(x))


def test_equal_code_is_not_raced(auto, log, default_wins):
    """A candidate whose generated code is that of the fastest so far is not timed."""
    backend_kwargs.register_template("same", {"max_autotune_gemm": False})
    auto(chain, ["same"])(torch.randn(64, 4096))
    told = next(line for line in log.text.splitlines() if line.strip().startswith("same "))
    assert told.split(maxsplit=1)[1] == "same code: as default"


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), id="cond"),
        pytest.param(lambda x: (x[0] + x[1]) * x.sum(), id="views"),
    ],
)
def test_default_wins_right(auto, default_wins, store, fn):
    """Graphs that hold other graphs, and outputs of views, are raced and right."""
    x = torch.randn(8, 64)
    with torch.no_grad():
        assert torch.allclose(auto(fn)(x), fn(x), atol=1e-4)
    assert rows_of(store)["default"]["won"]


def test_inputs_that_share_memory(auto, default_wins, store):
    """What is written through one input is seen through the other, once."""

    def step(whole, row):
        row.add_(1)
        return whole * 2

    whole = torch.zeros(4, 8)
    with torch.no_grad():
        seen = auto(step)(whole, whole[1])
    assert whole[1].eq(1).all()
    assert not whole[[0, 2, 3]].any()
    assert torch.equal(seen, whole * 2)
    assert rows_of(store)["default"]["won"]


def test_inference_mode(auto, default_wins, store):
    """Inference tensors are raced like others."""
    with torch.inference_mode():
        x = torch.randn(8, 64)
        assert torch.allclose(auto(chain)(x), chain(x), atol=1e-5)
    assert rows_of(store)["default"]["won"]


def test_a_wrong_default_of_a_random_graph_never_wins(auto, planted):
    """Where eager draws other numbers, default is held against its twin that draws as eager does."""
    backend_kwargs.register_template("wrong_auto", base="auto+wrong")
    backend = backend_kwargs.make_backend("tmpl-inductor:wrong_auto", candidates=[])
    with pytest.warns(BackendKwargsWarning, match=r"A graph runs in eager, as no candidate is right: default: output"):
        torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5) + x, backend=backend)(torch.randn(8, 64))


def test_a_spent_budget_skips_candidates(monkeypatch, auto, planted, store):
    """What the budget does not reach is told as skipped."""
    monkeypatch.setattr(race._Race, "_left_s", 0.0)
    auto(chain, ["slow"])(torch.randn(8, 64))
    row = rows_of(store)["slow"]
    assert (row["status"], row["reason"]) == ("skipped", "the budget of 60 s is spent")


def test_a_call_longer_than_the_cap_is_not_raced(auto, log):
    """Where eager alone takes longer than two budgets default stands, after two calls in eager and no more."""
    naps = []

    @torch.library.custom_op("backend_kwargs_tests::long_nap", mutates_args=())
    def long_nap(x: torch.Tensor) -> torch.Tensor:
        naps.append(time.sleep(0.3))
        return x.clone()

    long_nap.register_fake(torch.empty_like)
    auto(lambda x: long_nap(x) + 1, budget_s=0.2)(torch.randn(8, 64))
    (message,) = [message for message in log.messages if message.startswith("auto: ")]
    why = r"a call in eager takes 0\.\d s, too long for a budget of 0\.2 s"
    assert re.fullmatch(rf"auto: default for a graph not raced: {why} \(0\.0 s\)", message)
    assert len(naps) == 3  # the last is the result's


def test_after_the_cap_default_stands(monkeypatch, auto, store):
    """A race whose time ends while default is compiled times nothing more, and is known to be cut."""
    over = iter([False, *[True] * 9])
    monkeypatch.setattr(race._Race, "_over", property(lambda self: next(over)))
    auto(chain)(torch.randn(8, 64))
    (decision,) = Store(store).all()
    assert (decision.winner, decision.cut_s) == ("default", 60)
    assert [row["seconds"] for row in decision.rows] == [None, None]


def test_what_would_be_compiled_twice_is_not(auto, planted, store):
    """A candidate whose options, over those of the fastest, were tried already is skipped."""
    backend_kwargs.register_template("slower", base="slow")
    auto(chain, ["slow", "slower"])(torch.randn(8, 64))
    row = rows_of(store)["slower"]
    assert (row["status"], row["reason"]) == ("skipped", "it would be slow again")


@pytest.mark.parametrize(
    ("seconds", "tried"),
    [
        pytest.param(1.2, True, id="far"),
        pytest.param(1.02, False, id="near"),
        pytest.param(0.5, True, id="beyond"),
    ],
)
def test_near_its_limit_a_graph_waits_for_nothing_expensive(monkeypatch, auto, store, seconds, tried):
    """Within 3 % of the limit nothing expensive is tried; what beats its limit proves that to be none."""
    costly = Candidate("costly", {"epilogue_fusion": False}, expensive=True)
    monkeypatch.setattr(race, "candidates_for", lambda *_: [costly])
    monkeypatch.setattr(race, "limit_of", lambda facts, device: 1.0)
    monkeypatch.setattr(measure, "percentile", lambda samples, q: seconds)
    auto(chain)(torch.randn(8, 64))
    row = rows_of(store)["costly"]
    assert (row["reason"] != "the fastest is within 3% of the limit already") is tried


@pytest.mark.parametrize(
    ("told", "limit"),
    [
        pytest.param({"bytes_read": 10}, 2.0, id="read"),
        pytest.param({"bytes_read": 8, "bytes_written": 8}, 4.0, id="copied"),
        pytest.param({"bytes_read": 10, "bytes_written": 5}, 3.5, id="mostly read"),
        pytest.param({"bytes_read": 10, "flops": 300}, 3.0, id="computed"),
        pytest.param({"bytes_read": 10, "device": "cpu"}, 0.0, id="on a CPU"),
    ],
)
def test_the_limit(monkeypatch, told, limit):
    """Memory that is only read is faster than memory that is copied; the larger of both limits holds."""
    monkeypatch.setattr(race, "_ceilings", lambda device: (4.0, 5.0, 100.0))
    _, facts = seen_facts(lambda: None, lambda seen: 0.0, **TOLD)
    assert race.limit_of(replace(facts, **{"device": "cuda"} | told), torch.device("cuda")) == limit


def test_without_memory_to_measure_it_there_is_no_limit(monkeypatch):
    """A device too full for a copy and a product is asked once, and the race goes on."""

    def full(device):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(race, "_measured", full)
    _, facts = seen_facts(lambda: None, lambda seen: 0.0, **TOLD | {"device": "cuda", "bytes_read": 10.0})
    assert race.limit_of(facts, torch.device("cuda:7")) == 0


@pytest.mark.parametrize(
    ("seconds", "beats", "kept"),
    [
        pytest.param(0.9, False, True, id="faster"),
        pytest.param(1.4, False, False, id="slower"),
        pytest.param(1.4, True, True, id="slower by chance"),
    ],
)
def test_eager_returns_where_later_rounds_differ(monkeypatch, seconds, beats, kept):
    """A champion that later rounds saw slower than eager meets it again, and goes if it loses."""
    monkeypatch.setattr(race._Race, "_beats", lambda self, challenger, champion: beats)
    monkeypatch.setattr(race._Race, "_over", False)
    champion, eager = runner(), runner()
    champion.row.seconds, eager.row.seconds = seconds, 1.0
    assert (object.__new__(race._Race)._not_slower(champion, eager) is champion) is kept


def test_a_reference_that_cannot_be_had_says_nothing(auto, capfd):
    """A graph that fails in float64, as it names float32, is raced without a reference and without a traceback."""
    x, w = torch.randn(8, 8).bfloat16(), torch.randn(8, 8)
    with torch.no_grad():
        auto(lambda x, w: x.to(torch.float32) @ w)(x, w)
    assert "Traceback" not in capfd.readouterr().err


def test_float8_is_raced(auto, store):
    """Inputs of eight bits, which have no comparison, are raced like others."""
    with torch.no_grad():
        auto(lambda x: x.to(torch.float32) * 2)(torch.randn(64, 64).to(torch.float8_e4m3fn))
    assert rows_of(store)["default"]["status"] == "pass"


@pytest.mark.parametrize(("ops", "tried"), [pytest.param(10, True, id="many"), pytest.param(2, False, id="few")])
def test_what_saves_launches_is_tried_where_those_count(monkeypatch, auto, store, ops, tried):
    """A step that saves launches is skipped where those, at 5 µs each, are less than 3 % of a call."""
    spares = Candidate("spares", {"epilogue_fusion": False}, saves_launches=True)
    monkeypatch.setattr(race, "candidates_for", lambda *_: [spares])
    monkeypatch.setattr(measure, "percentile", lambda samples, q: 1e-3)

    def seen(*args, **marks):
        result, facts = seen_facts(*args, **marks)
        return result, replace(facts, ops=ops)

    monkeypatch.setattr(race, "seen_facts", seen)
    auto(chain)(torch.randn(8, 64))
    skipped = rows_of(store)["spares"]["reason"] == "it saves time of the host, of which little is spent here"
    assert skipped is not tried


def test_the_users_frozen_objects_stay_frozen(auto):
    """A race looks for garbage among what it made itself, by a freeze of its own, unless the user has frozen some."""
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        auto(chain)(torch.randn(8, 64))
        assert 0 < gc.get_freeze_count() <= before
    finally:
        gc.unfreeze()
    before = gc.get_freeze_count()
    torch._dynamo.reset()
    auto(chain, race="always")(torch.randn(8, 64))
    assert gc.get_freeze_count() == before


@torch.no_grad()
def test_frozen_weights_bring_a_cpus_own_gemms(store, monkeypatch):
    """With freezing=True, kernels for constant weights are tried, also on a CPU."""
    steps = [step for step in candidates.STEPS if step.name != "cpp_wrapper"]  # as it takes seconds
    monkeypatch.setattr(candidates, "STEPS", steps)
    model, x = nn.Linear(32, 32), torch.randn(8, 32)
    compiled = torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor:auto+freezing"))
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    assert rows_of(store)["max_autotune"]["status"] in ("pass", "same code")


def test_a_step_leaves_out_what_it_must(monkeypatch, auto, store, default_wins):
    """A step is laid over the options of the fastest so far, but for those that it is without."""
    one = Candidate("one", {"epilogue_fusion": False, "max_fusion_size": 2})
    two = Candidate("two", {"realize_reads_threshold": 1}, without=("max_fusion_size",))
    monkeypatch.setattr(race, "candidates_for", lambda *_: [one, two])
    monkeypatch.setattr(race, "_code", lambda fn: ())
    auto(chain)(torch.randn(8, 64))
    assert rows_of(store)["two"]["options"] == {"epilogue_fusion": False, "realize_reads_threshold": 1}


def compiled_backend(**options):
    return backend_kwargs.make_backend("tmpl-inductor:auto", candidates=[], **options)


def test_dynamic_shapes_take_one_decision(store):
    """A symbolic graph is decided once and serves other sizes without a recompile."""
    compiled = torch.compile(chain, backend=compiled_backend(), dynamic=True)
    for size in (64, 32, 17):
        x = torch.randn(8, size)
        assert torch.allclose(compiled(x), chain(x), atol=1e-5)
    assert len(Store(store).all()) == 1


def test_a_race_leaves_what_torch_knows_of_sizes(monkeypatch, default_wins):
    """Guards and replacements of the shape environment, and the tracing context, are after a race as before."""
    seen, run = [], deciding.race

    def known():
        context = TracingContext.get()
        env = context.fake_mode.shape_env
        sizes = [str(each) for each in (env.guards, env.replacements, env.axioms, env.divisible)]
        return [
            *sizes,
            context.fw_metadata,
            context.params_flat,
            context.output_strides,
            len(context.guards_context.dynamo_guards),
        ]

    def spy(request, tick):
        seen.append(known())
        outcome = run(request, tick)
        seen.append(known())
        return outcome

    monkeypatch.setattr(deciding, "race", spy)
    torch.compile(lambda x: torch.relu(x.view(-1, 2) + 1).sum(-1), backend=compiled_backend(), dynamic=True)(
        torch.randn(8, 64)
    )
    assert seen[0] == seen[1]


def test_training_gives_the_right_gradients(auto):
    """Forward and backward are decided together, and gradients are eager's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(8, 16)
    auto(model)(x).square().mean().backward()
    seen = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    for got, wanted in zip(seen, model.parameters(), strict=True):
        assert torch.allclose(got, wanted.grad, atol=1e-5)


def test_racing_touches_no_gradient(auto):
    """A race leaves `.grad` empty and calls no hook of the user's."""
    model, x = nn.Linear(16, 4), torch.randn(8, 16)
    called = []
    model.weight.register_hook(lambda grad: called.append(1))
    auto(model)(x)
    assert model.weight.grad is None
    assert called == []


def test_buffers_change_once(auto):
    """Batch norm's statistics after the first call are those of one call."""
    x = torch.randn(32, 4, 3, 3)
    raced, plain = (nn.BatchNorm2d(4) for _ in range(2))
    auto(raced)(x)
    plain(x)
    for got, wanted in zip(raced.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(got, wanted)


def test_a_cache_that_is_written_is_right_the_first_time(auto):
    """A key-value cache that a step updates in place holds one step, through every alias."""

    def step(cache, new, at):
        cache[at] = new
        return cache.sum() + new.sum()

    cache, new = torch.zeros(4, 8), torch.randn(8)
    with torch.no_grad():
        seen = auto(step)(cache, new, 2)
    assert torch.allclose(seen, 2 * new.sum(), atol=1e-5)
    assert torch.equal(cache[2], new)
    assert not cache[[0, 1, 3]].any()


def test_a_candidates_libdevice_goes_with_it(auto, monkeypatch):
    """What a candidate has Triton link is gone before the next is compiled, also where the candidate fails."""
    monkeypatch.delenv(LIBDEVICE, raising=False)

    def linked(graph):
        monkeypatch.setenv(LIBDEVICE, "planted.bc")
        raise RuntimeError("planted")

    backend_kwargs.register_template("linked", {"post_grad_custom_post_pass": linked, "fx_graph_cache": False})
    auto(chain, ["linked"])(torch.randn(8, 64))
    assert LIBDEVICE not in os.environ


def test_donated_buffers_are_the_calls_own(auto):
    """A backward graph that overwrites what the forward one saved is raced on calls of its own."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), torch.randn(4, 16)
    model(x).sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with functorch_config.patch(donated_buffer=True):
        auto(model)(x).sum().backward()
    assert all(torch.allclose(p.grad, grad, atol=1e-5) for p, grad in zip(model.parameters(), wanted, strict=True))


def test_random_state_is_untouched(auto):
    """Dropout under a seed draws what it draws without a race, and leaves the generator there."""
    model, x = nn.Dropout(0.5), torch.ones(64, 64)
    torch.manual_seed(0)
    raced = auto(model)(x), torch.rand(3)
    torch._dynamo.reset()
    torch.manual_seed(0)
    again = auto(model)(x), torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(raced, again, strict=True))


def test_weights_stay_static_inputs(auto, monkeypatch):
    """Candidates and the winner get the static inputs that default alone gets, or CUDA graphs would copy weights."""
    import torch._inductor.compile_fx as module

    seen, inner = [], module.compile_fx_inner

    def spy(gm, example_inputs, **kwargs):
        seen.append(tuple(kwargs.get("static_input_idxs", ())))
        return inner(gm, example_inputs, **kwargs)

    monkeypatch.setattr(module, "compile_fx_inner", spy)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 16)
    with torch.no_grad():
        torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor", fx_graph_cache=False))(x)
        alone = seen.pop()
        torch._dynamo.reset()
        auto(model, fx_graph_cache=False)(x)
    assert alone
    assert set(seen) == {alone}


def test_options_of_the_user_stand(auto, planted, store):
    """An option given beside auto holds for each candidate, and a candidate that only sets it otherwise is skipped."""
    backend_kwargs.register_template("fuse", {"epilogue_fusion": True})
    auto(chain, ["fuse"], epilogue_fusion=False)(torch.randn(8, 64))
    row = rows_of(store)["fuse"]
    assert row["reason"] == "it can do nothing here: your options set it otherwise"


def test_an_unknown_candidate_is_an_error_at_once():
    """A candidate's name is checked when the backend is made."""
    with pytest.raises(backend_kwargs.BackendKwargsError) as error:
        backend_kwargs.make_backend("tmpl-inductor:auto", candidates=["cudagraph"])
    assert str(error.value) == "Unknown candidate 'cudagraph'. Did you mean 'cudagraphs'?"


def test_the_winner_comes_as_the_compiler_made_it(default_wins):
    """Nothing is wrapped round what compiling the winner alone returns."""
    import torch._inductor.compile_fx as module

    returned, compile_fx = [], module.compile_fx

    def spy(*args, **kwargs):
        returned.append(compile_fx(*args, **kwargs))
        return returned[-1]

    backend, seen = compiled_backend(cpp_wrapper=False), []

    def through(gm, example_inputs):
        seen.append(backend(gm, example_inputs))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compile_fx", spy)
        torch.compile(lambda x: torch.relu(x @ x + 1).sum(-1), backend=through)(torch.randn(64, 64))
    assert seen[0] is returned[-1]


def runner(*, rank=1, speedup=None, peak_bytes=None):
    row = race.Row("a step", speedup=speedup, peak_bytes=peak_bytes)
    return race.Runner(Candidate("a step", rank=rank), row, None, ())


@pytest.mark.parametrize(
    ("ratio", "rank", "peak_bytes", "wins"),
    [
        pytest.param((1.05, 1.03, 1.08), 2, 200, True, id="faster"),
        pytest.param((1.0, 0.95, 1.05), 1, 90, True, id="even and lighter"),
        pytest.param((1.0, 0.95, 1.05), 1, 96, False, id="even and hardly lighter"),
        pytest.param((1.0, 0.95, 1.05), 2, 90, False, id="dearer"),
        pytest.param((0.965, 0.95, 0.981), 1, 90, False, id="a little slower"),
        pytest.param((0.8, 0.6, 0.985), 1, 90, False, id="slower by an unsure margin"),
        pytest.param((1.3, 1.021, 1.5), 1, 110, True, id="faster by an unsure margin, and heavier"),
        pytest.param((1.0, 0.95, 1.05), 1, None, False, id="unknown"),
        pytest.param((0.9, 0.85, 0.95), 1, 50, False, id="slower"),
    ],
)
def test_of_two_as_fast_the_lighter_wins(ratio, rank, peak_bytes, wins):
    """Within noise and at the same rank, over 5 % less memory decides; else the earlier stays."""
    challenger = runner(rank=rank, speedup=measure.Interval(*ratio), peak_bytes=peak_bytes)
    assert race._better(challenger, runner(peak_bytes=100), "latency") is wins


def test_memory_decides_between_no_replays():
    """Against a CUDA graph, whose memory is in its pool, and against eager memory decides nothing."""
    lighter = runner(speedup=measure.Interval(1.0, 0.95, 1.05), peak_bytes=0)
    replayed, eager = runner(peak_bytes=100), runner(peak_bytes=100)
    replayed.code, eager.candidate = (("code", True),), Candidate(EAGER)
    assert not race._better(lighter, replayed, "latency")
    assert not race._better(lighter, eager, "latency")


def test_cuda_graphs_cost_whichever_step_brought_them():
    """Within noise a candidate with CUDA graphs does not replace one without, however little memory it needs."""
    graphed = runner(speedup=measure.Interval(1.0, 0.95, 1.05), peak_bytes=0)
    graphed.row.options["triton.cudagraphs"] = True
    assert not race._better(graphed, runner(peak_bytes=100), "latency")


@pytest.mark.parametrize(
    ("saves", "seconds", "opaque", "tried"),
    [
        pytest.param(True, 1e-2, False, False, id="little"),
        pytest.param(True, 1e-4, False, True, id="much"),
        pytest.param(True, 1e-2, True, True, id="opaque"),
        pytest.param(False, 1e-2, False, True, id="saves no launch"),
    ],
)
def test_saved_launches_have_to_count(saves, seconds, opaque, tried):
    """One launch less is not worth a try where a call takes 10 ms, unless the graph holds other graphs."""
    _, facts = seen_facts(lambda: torch.ones(2) + 1, lambda seen: 0.0, **TOLD)
    step = Candidate("a step", saves_launches=saves)
    assert race._saves_enough(step, replace(facts, opaque=opaque), seconds) is tried


@pytest.mark.parametrize(
    ("ratio", "wins"),
    [
        pytest.param((0.985, 0.97, 0.99), True, id="within the margin"),
        pytest.param((0.9, 0.7, 1.1), True, id="unsure"),
        pytest.param((0.8, 0.6, 1.1), False, id="unsure but far"),
        pytest.param((0.8, 0.74, 0.99), False, id="slower"),
    ],
)
def test_default_is_kept_within_noise(ratio, wins):
    """Default stands before eager unless it is slower beyond noise."""
    default = race.Runner(Candidate(DEFAULT, over=False, rank=0), race.Row(DEFAULT), None, ())
    default.row.speedup = measure.Interval(*ratio)
    eager = race.Runner(Candidate(EAGER), race.Row(EAGER), None, ())
    assert race._better(default, eager, "latency") is wins


def test_memory_as_the_objective(store):
    """With objective="memory" each candidate's peak is known, and the one with less wins."""
    torch.compile(chain, backend=compiled_backend(objective="memory"))(torch.randn(512, 512))
    rows = rows_of(store)
    assert all(row["peak_bytes"] is not None for row in rows.values())
    least = min(row["peak_bytes"] for row in rows.values())
    winner = next(row for row in rows.values() if row["won"])
    assert winner["peak_bytes"] <= 1.05 * least


def test_a_report_tells_the_race(store):
    """`report` holds the table of the race that chose how a graph is compiled."""
    compiled = torch.compile(chain, backend=compiled_backend())
    compiled(torch.randn(8, 64))
    (graph,) = backend_kwargs.report(compiled).graphs
    assert [row["name"] for row in graph.race.rows] == ["eager", "default"]
    assert [row["name"] for row in graph.race.rows if row["won"]] == [graph.race.winner]
    assert graph.race.table in str(backend_kwargs.report(compiled)).replace("\n  ", "\n")


def test_four_threads(auto):
    """Four threads that compile at once all get right numbers."""
    x = torch.randn(8, 64)
    seen = {}

    def work(at):
        seen[at] = auto(lambda x: chain(x) + at)(x)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.allclose(seen[at], chain(x) + at, atol=1e-5) for at in range(4))
