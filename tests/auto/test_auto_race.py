"""What wins, what never does, and what a race leaves behind: nothing."""

import json
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import backend_kwargs
from backend_kwargs.compilers.auto.decisions import Store
from backend_kwargs.errors import BackendKwargsWarning


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


def test_equal_code_is_not_raced(auto, log):
    """A candidate whose generated code is that of the fastest so far is not timed."""
    backend_kwargs.register_template("same", {"max_autotune_gemm": False})
    auto(chain, ["same"])(torch.randn(64, 4096))
    told = next(line for line in log.text.splitlines() if line.strip().startswith("same "))
    assert "same code: as default" in told or "over eager" in told  # eager may have won on a busy machine


def test_a_decision_is_remembered(auto, store, log):
    """The second compile looks the decision up and compiles the winner alone."""
    x = torch.randn(8, 64)
    auto(chain)(x)
    first = Store(store).all()
    torch._dynamo.reset()
    log.clear()
    auto(chain)(x)
    assert Store(store).all() == first
    assert log.text.count("auto: ") == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: (chain, torch.randn(8, 32)), id="shape"),
        pytest.param(lambda x: (chain, x.double()), id="dtype"),
        pytest.param(lambda x: (chain, x.t().contiguous().t()), id="strides"),
        pytest.param(lambda x: (lambda x: torch.relu(x * 3 + 1).sum(-1), x), id="constant"),
        pytest.param(lambda x: (chain, x.clone().requires_grad_()), id="gradient"),
    ],
)
def test_another_graph_is_another_decision(auto, store, change):
    """Shape, type, strides, constants and gradients are part of the key."""
    x = torch.randn(8, 64)
    auto(chain)(x)
    torch._dynamo.reset()
    fn, other = change(x)
    auto(fn)(other)
    assert len(Store(store).all()) == 2


def test_names_of_the_user_are_no_part_of_the_key(auto, store):
    """The same computation under other names is the same graph."""

    def same(tensor):
        doubled = tensor * 2
        return torch.relu(doubled + 1).sum(-1)

    for fn in (chain, same):
        torch._dynamo.reset()
        auto(fn)(torch.randn(8, 64))
    assert len(Store(store).all()) == 1


def test_never_racing_takes_default(auto, store, log):
    """With race="never" and no decision, default is compiled."""
    x = torch.randn(8, 64)
    assert torch.allclose(auto(chain, race="never")(x), chain(x))
    assert "auto: default for a graph not raced: race='never', and no decision is stored" in log.text
    assert not store.exists()


def test_the_process_has_a_budget(auto, log):
    """When a process has spent its seconds on races, further graphs take default."""
    auto(chain, process_budget_s=0.001)(torch.randn(8, 64))
    torch._dynamo.reset()
    auto(torch.sin, process_budget_s=0.001)(torch.randn(8, 64))
    assert "not raced: the process has spent its 0.001 s on races" in log.text


def test_a_spent_budget_skips_candidates(auto, planted, store):
    """What the budget does not reach is told as skipped."""
    auto(chain, ["slow"], budget_s=0.0)(torch.randn(8, 64))
    row = rows_of(store)["slow"]
    assert (row["status"], row["reason"]) == ("skipped", "the budget of 0 s is spent")


def test_recompiles_inherit(store, log):
    """Beyond `most_races`, other sizes of one computation take its last winner without a race."""
    compiled = torch.compile(chain, backend=compiled_backend(most_races=1), dynamic=False)
    for size in (64, 32):
        compiled(torch.randn(8, size))
    assert len(Store(store).all()) == 1
    assert "not raced: it was raced for 1 other sizes" in log.text


def compiled_backend(**options):
    return backend_kwargs.make_backend("tmpl-inductor:auto", candidates=[], **options)


def test_dynamic_shapes_take_one_decision(store):
    """A symbolic graph is decided once and serves other sizes without a recompile."""
    compiled = torch.compile(chain, backend=compiled_backend(), dynamic=True)
    for size in (64, 32, 17):
        x = torch.randn(8, size)
        assert torch.allclose(compiled(x), chain(x), atol=1e-5)
    assert len(Store(store).all()) == 1


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


def test_inputs_without_memory_are_not_raced(log):
    """Where an input is no plain tensor, as DDP's optimizer hands over fakes, default is compiled."""
    backend = compiled_backend()
    gm = torch.fx.symbolic_trace(chain)
    with torch._subclasses.FakeTensorMode() as mode:
        backend(gm, [mode.from_tensor(torch.randn(8, 64))])
    assert "auto: default for a graph not raced: an input is no plain tensor" in log.text


def test_collectives_are_not_raced(log, tmp_path):
    """A graph in which other ranks take part is not run by one rank alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'init'}", rank=0, world_size=1)
    try:
        x = torch.randn(8)
        compiled = torch.compile(
            lambda x: dist._functional_collectives.all_reduce(x * 2, "sum", "0") + 1, backend=compiled_backend()
        )
        assert torch.allclose(compiled(x), x * 2 + 1)
    finally:
        dist.destroy_process_group()
    assert "auto: default for a graph not raced: other ranks take part in it" in log.text


def test_tiny_graphs_inherit(log):
    """After a first race, a graph of two operators on little data takes the winner of its neighbour."""
    backend = compiled_backend()
    torch.compile(chain, backend=backend)(torch.randn(8, 64))
    torch.compile(torch.sin, backend=backend)(torch.randn(8))
    assert "for a graph not raced: it is tiny" in log.text


def test_the_winner_comes_as_the_compiler_made_it():
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
    assert seen[0] is returned[-1] or seen[0].__name__ == "forward"  # eager, on a busy machine


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
    assert graph.race[0].startswith("auto: ")
    assert [line.split()[0] for line in graph.race[1:]] == ["eager", "default"]


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


RANK = """
import json, os, sys, time
import torch, torch.distributed as dist
import backend_kwargs
rank, file = int(sys.argv[1]), sys.argv[2]
os.environ["BACKEND_KWARGS_STORE"] = f"{file}-{rank}.sqlite"
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
backend = backend_kwargs.make_backend("tmpl-inductor:auto", candidates=[], budget_s=20)
def shared(x): return torch.relu(x * 2 + 1).sum(-1)
def own(x): return (x - rank).sin() if rank else x.cos().exp()
torch.compile(own, backend=backend)(torch.randn(8))
torch.compile(shared, backend=backend)(torch.randn(8, 64))
from backend_kwargs.compilers.auto.deciding import _decided
print(json.dumps([[each.winner, each.made] for each in _decided.values()]))
dist.barrier()
"""


def test_ranks_take_one_decision(tmp_path):
    """Two ranks agree on the graph that both compile, and neither waits for one that it alone compiles."""
    command = [sys.executable, "-c", RANK]
    ranks = [subprocess.Popen([*command, str(rank), tmp_path / "init"], stdout=-1, text=True) for rank in range(2)]
    seen = [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    assert seen[0][-1] == seen[1][-1]
