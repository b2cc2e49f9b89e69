"""Races on a GPU: CUDA graphs, memory afterwards, and other models' graphs."""

import json
import logging
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import backend_kwargs
from backend_kwargs import trial
from backend_kwargs.auto import process_memory, race, steps
from backend_kwargs.auto.candidates import CUDAGRAPHS, UNRECORDED, WITH_GRAPHS
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.auto.verdicts import Verdict
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.interval import Interval
from backend_kwargs.rewrites import Rewrite, matching, register_rewrite
from backend_kwargs.rewrites.table import chosen_places, name_of
from backend_kwargs.rewrites.traced import Change
from tests.auto.graphs import rows_of

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def doubled(source, out, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(out + at, tl.load(source + at) * 2)


@triton.jit
def tripled(source, out, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(out + at, tl.load(source + at) * 3)


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch, fresh_dynamo):
    path = tmp_path / "decisions"
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(path))
    process_memory.forget_process()
    yield path
    process_memory.forget_process()


def mlp(layers=8, width=256):
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts).to("cuda", torch.bfloat16)


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def softmax(x):
    return torch.softmax(x, -1)


def auto(model, **options):
    return torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor:auto", **options))


@torch.no_grad()
def test_cudagraphs_win_where_launches_bind(store):
    """For a launch-bound MLP, CUDA graphs win."""
    model, x = mlp(), normal(64, 256)
    assert torch.allclose(auto(model)(x), model(x), atol=1e-2)
    (decision,) = Catalogue(store).all()
    assert decision.options.get("triton.cudagraphs") is True, [*map(str, decision.rows)]


def test_no_recording_of_cuda_graphs_is_timed(store, monkeypatch):
    """Where a call in eager is slow and the budget is spent, a few replays of a step are timed, no recording."""
    monkeypatch.setattr(steps, "SLOW_S", 0.0)
    model, x = mlp(layers=40, width=64), normal(8, 64)
    model(x).sum().backward()
    auto(model, rewrites=(), budget_s=0.5)(x).sum().backward()
    assert rows_of(store)["cudagraphs"].speedup.low > 1


@torch.no_grad()
def test_one_compile_serves_default_and_cuda_graphs(store):
    """Code that is compiled for CUDA graphs is raced without them, as default, and with them."""
    model, x = mlp(layers=40, width=64), normal(8, 64)
    assert torch.allclose(auto(model, rewrites=())(x), model(x), atol=1e-2)
    (decision,), rows = Catalogue(store).all(), rows_of(store)
    assert [*rows][:3] == ["eager", "default", "cudagraphs"]
    assert rows["default"].options == UNRECORDED
    assert rows["cudagraphs"].options == CUDAGRAPHS
    assert decision.options["triton.cudagraphs"] is True


@pytest.fixture
def default_is_kept(monkeypatch):
    """Let default win, whose code was compiled for CUDA graphs."""
    monkeypatch.setattr(race, "better", lambda challenger, *_: challenger.candidate.name == "default")


@torch.no_grad()
@pytest.mark.parametrize("again", [pytest.param(False, id="raced"), pytest.param(True, id="from the store")])
def test_code_for_cuda_graphs_reads_unaligned_inputs_without_them(store, default_is_kept, again):
    """Inputs that begin at any element, and a number on the CPU, are read as in eager, also by the next process."""
    base, scale = normal(65 * 64 + 1), torch.tensor(3.0)

    def scaled(x, scale):
        return (x.view(-1, 64) * scale).relu().sum(1)

    fn = auto(scaled)
    fn(base[: 64 * 64].clone(), scale)
    if again:
        torch._dynamo.reset()
        process_memory.forget_process()
        fn = auto(scaled)
    for start in (0, 1, 0, 1):
        x = base[start : start + 64 * 64]
        torch.testing.assert_close(fn(x, scale), scaled(x, scale), atol=1e-2, rtol=1e-2)
    assert rows_of(store)["default"].won


@torch.no_grad()
def test_a_rewrite_is_raced_with_cuda_graphs(store, monkeypatch):
    """Where calls of a rewrite's operator take the host longer than its kernels save, it gets CUDA graphs."""
    monkeypatch.setattr(race, "verdict_of", lambda *_: Verdict(2e-5, 1e-5, Interval(2.0, 1.9, 2.1)))
    monkeypatch.setattr(matching, "_without_kernel", {"none"})
    monkeypatch.setattr(matching, "_layout", lambda *_: time.sleep(5e-4))
    layers = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(8)]
    # A small input and a small result, so that CUDA graphs copy little.
    model = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1))
    model = model.to("cuda", torch.bfloat16, memory_format=torch.channels_last).eval()
    x = normal(128, 8, 56, 56).to(memory_format=torch.channels_last)
    torch.testing.assert_close(auto(model)(x), model(x), atol=1e-2, rtol=3e-2)
    rows = rows_of(store)
    recorded = [each for each in rows.values() if each.options.keys() == {"triton.cudagraphs", "rewrites"}]
    row = next(each for each in recorded if [*chosen_places(each.options["rewrites"])] == ["convolution"])
    assert (row.status, row.rewritten) == ("pass", {"convolution": 8}), rows


@torch.no_grad()
def test_a_place_that_wins_is_compiled_first(store):
    """Attention whose mask is expanded over the keys, so that torch has no fused kernel: default is not compiled."""
    mask = normal(1, 8, 512, 1).expand(4, 8, 512, 512)
    q = normal(4, 8, 512, 64)

    def attends(q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).relu()

    compiled = auto(attends)
    assert torch.allclose(compiled(q), attends(q), atol=2e-2)
    rows = rows_of(store)
    assert "default" not in rows
    (graph,) = backend_kwargs.report(compiled).graphs
    assert any(row.default_s > row.rewritten_s > row.limit_s > 0 for row in graph.race.places)
    assert any(name_of(entry) == "attention_mask" for row in rows.values() for entry in row.options.get("rewrites", ()))


@torch.no_grad()
def test_what_a_place_shows_is_kept(store, caplog):
    """Another model with the same place, and the same around it, times nothing."""
    caplog.set_level(logging.INFO, logger="backend_kwargs.auto")
    patches, other = (nn.Conv2d(3, 768, 16, stride=16).to("cuda", torch.bfloat16).eval() for _ in range(2))
    images, judged = normal(32, 3, 224, 224), []
    for model in (patches, nn.Sequential(other, nn.Linear(14, 16, device="cuda", dtype=torch.bfloat16))):
        caplog.clear()
        auto(model)(images)
        judged.append([each for each in caplog.messages if each.startswith("patches@")])
    assert [len(each) for each in judged] == [1, 0]


@torch.no_grad()
def test_default_follows_where_torch_records_nothing(store):
    """A graph that changes its input is not recorded: then default is compiled too, and CUDA graphs never win."""
    layers, state = mlp(layers=20, width=64), normal(8, 64)

    def step(state):
        state.copy_(layers(state))
        return state + 1

    expected = layers(state.clone()) + 1
    assert torch.allclose(auto(step, rewrites=())(state), expected, atol=1e-2)
    rows = rows_of(store)
    assert rows["default"].status in ("pass", "same code")
    assert not rows["cudagraphs"].won


@torch.no_grad()
def test_reductions_are_raced_where_memory_binds(store):
    """For a large softmax the persistent reduction has code of its own, which passes and is timed."""
    x = normal(8192, 8192)
    assert torch.allclose(auto(softmax, candidates=["persistent_reductions"])(x), softmax(x), atol=1e-2)
    row = rows_of(store)["persistent_reductions"]
    assert (row.status, row.speedup is None) == ("pass", False), row


def test_a_norms_backward_pass_is_tuned(store):
    """The rows per block of a layer norm's backward pass are tuned, into code of its own that is timed."""
    norm, x = nn.LayerNorm(4096).to("cuda", torch.bfloat16), normal(131072, 4096).requires_grad_()
    auto(norm, candidates=["mix_order_reductions"])(x).sum().backward()
    row = rows_of(store)["mix_order_reductions"]
    assert (row.status, row.speedup is None) == ("pass", False), row


@torch.no_grad()
def test_unaligned_rows_are_padded(store):
    """auto pads a product of odd sizes, unless Inductor's own timing has already decided to."""
    # So large that launching the further kernels does not take longer than the product.
    model, x = nn.Linear(2047, 4093).to("cuda", torch.bfloat16), normal(8189, 2047)
    assert torch.allclose(auto(model, candidates=["padded"])(x), model(x), atol=2e-2)
    row = rows_of(store)["padded"]
    by_default = (row.status, row.reason) == ("same code", "as default")
    assert by_default or (row.status, row.speedup is None) == ("pass", False), row


@torch.no_grad()
def test_another_triton_kernel_is_another_graph(store):
    """The key of a decision contains the source of a user's Triton kernel."""

    def calling(kernel):
        def fn(x):
            out = torch.empty_like(x)
            kernel[(x.numel() // 128,)](x, out, 128)
            return out + 1

        return fn

    x = normal(1024)
    assert torch.allclose(auto(calling(doubled))(x), x * 2 + 1, atol=5e-2)
    torch._dynamo.reset()
    assert torch.allclose(auto(calling(tripled))(x), x * 3 + 1, atol=5e-2)
    assert len(Catalogue(store).all()) == 2


@torch.no_grad()
def test_other_models_keep_their_graphs():
    """The recorded graphs of another model are replayed as before, in the same memory."""
    other, x = mlp(2), normal(64, 256)
    compiled = torch.compile(other, mode="reduce-overhead")
    for _ in range(4):
        compiled(x)
    place = compiled(x).data_ptr()
    auto(mlp())(x)
    assert compiled(x).data_ptr() == place
    assert torch.equal(compiled(x), compiled(x))


HELD = """
import gc, json, sys
import torch
from torch import nn
import backend_kwargs
from backend_kwargs.auto.process_memory import call_until_chosen, memory
torch.manual_seed(0)
parts = [part for _ in range(8) for part in (nn.Linear(2048, 2048), nn.ReLU())]
model = nn.Sequential(*parts).to("cuda", torch.bfloat16)
x = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)
compiled = torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor:auto", **json.loads(sys.argv[1])))
with torch.no_grad():
    for _ in range(4):
        compiled(x)
    call_until_chosen(lambda: compiled(x))
    model(x)  # so that cuBLAS has its workspace, which a call without CUDA graphs leaves
torch.cuda.synchronize()
gc.collect()
torch.cuda.empty_cache()
print(json.dumps([len(memory().race_seconds), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]))
"""


@pytest.mark.parametrize("options", [{}, {"effort": "full"}], ids=["quick", "full"])
def test_memory_after_the_race(options):
    """Memory is within 5 % of a process that compiles only the winner: losers leave no pool or weight.

    Reserved memory may be larger by a few of the allocator's segments of 20 MiB, which one small tensor keeps.
    """

    def held():
        command = [sys.executable, "-c", HELD, json.dumps(options)]
        return json.loads(subprocess.check_output(command, text=True).strip().splitlines()[-1])

    (raced, *after_race), (found, *alone) = held(), held()
    assert (raced, found) == (1, 0)
    assert after_race[0] <= 1.05 * alone[0]
    assert after_race[1] <= 1.05 * alone[1] + 3 * 20 * 2**20


def test_training_on_a_gpu():
    """Forward and backward are raced together, and gradients equal eager's."""
    model, x = mlp(4), normal(64, 256)
    auto(model)(x).float().square().mean().backward()
    seen = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).float().square().mean().backward()
    for got, parameter in zip(seen, model.parameters(), strict=True):
        assert torch.nn.functional.cosine_similarity(got.flatten(), parameter.grad.flatten(), 0) > 0.99


def test_random_state_of_the_gpu_is_untouched():
    """With a seed dropout draws the same numbers with and without a race."""
    model, x = nn.Dropout(0.5), normal(1024, 1024)
    seen = []
    for _ in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        seen.append((auto(model)(x), torch.rand(3, device="cuda")))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@torch.no_grad()
def test_a_written_cache_is_right_the_first_time():
    """A key-value cache updated in place contains one step after the first call."""

    def step(cache, new):
        cache[:, 3] = new
        return (cache * 2).sum(-1)

    cache, new = torch.zeros(64, 8, 256, device="cuda"), torch.randn(64, 256, device="cuda")
    assert torch.allclose(auto(step)(cache, new)[:, 3], 2 * new.sum(-1), atol=1e-3)
    assert torch.equal(cache[:, 3], new)
    assert not cache[:, :3].any()


RANK = """
import json, os, sys
import torch, torch.distributed as dist
import backend_kwargs
rank, file = int(sys.argv[1]), sys.argv[2]
os.environ["BACKEND_KWARGS_STORE"] = f"{file}-{rank}"
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=2)
backend = backend_kwargs.make_backend("tmpl-inductor:auto")
def own(x): return x.sin() if rank else x.cos().exp() * 2
def shared(x): return torch.softmax(x, -1)
x = torch.randn(2048, 2048, device="cuda")
torch.compile(own, backend=backend)(x)
out = torch.compile(shared, backend=backend)(x)
dist.all_reduce(out)
torch.cuda.synchronize()
from backend_kwargs.auto.process_memory import memory
print(json.dumps([[each.winner, each.made] for each in memory().decisions.values()][-1]))
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_take_one_decision(tmp_path):
    """Two NCCL ranks use one decision for a graph that both compile."""
    command = [sys.executable, "-c", RANK]
    ranks = [subprocess.Popen([*command, str(rank), tmp_path / "init"], stdout=-1, text=True) for rank in range(2)]
    seen = [rank.communicate(timeout=300)[0].strip().splitlines()[-1] for rank in ranks]
    assert seen[0] == seen[1]


@torch.no_grad()
def test_static_weights_are_not_copied(caplog):
    """At a replay the CUDA-graph winner copies its one input and no weight."""
    caplog.set_level(logging.INFO, logger="backend_kwargs.auto")
    model, x = mlp(4, 1024), normal(16, 1024)
    raced = auto(model, clone_outputs=False)
    alone = torch.compile(model, mode="reduce-overhead")
    counts = []
    for compiled in (raced, alone):
        for _ in range(4):
            compiled(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            compiled(x)
            torch.cuda.synchronize()
        counts.append(sum("copy" in event.name.lower() or "multi_tensor" in event.name for event in trace.events()))
    assert counts[0] <= counts[1]


@torch.no_grad()
def test_a_near_winner_with_cuda_graphs_serves_after_its_check(store):
    """What another machine's winner was compiled to is checked, and gives right numbers in later calls."""
    model = mlp()
    auto(model)(normal(16, 256))
    (decision,) = Catalogue(store).all()
    Catalogue(store).forget()
    there = {**decision.machine, "torch": "2.1.0"}
    settled = replace(decision, rows=(), cut_s=0.0)
    Catalogue(store).add(replace(settled, winner=WITH_GRAPHS.name, options=CUDAGRAPHS, machine=there))
    process_memory.forget_process()
    torch._dynamo.reset()
    compiled = auto(model, match="device", race="never")
    for _ in range(5):
        x = normal(16, 256)
        assert torch.allclose(compiled(x).clone(), model(x), atol=1e-2)
    assert [each.winner for each in process_memory.memory().decisions.values()] == [WITH_GRAPHS.name]


def leaves_results_unwritten(gm, example_inputs):
    """Return a change to calls that after the first return memory as they find it."""
    results = []

    def wrap(compiled):
        def call(*inputs):
            if results:
                return [torch.empty(each.shape, dtype=each.dtype, device="cuda") for each in results]
            found = compiled(*inputs)
            results.extend(each.to("meta") for each in found)
            return found

        return call

    return Change(copy_of_graph(gm), example_inputs, count=1, wrap=wrap)


@torch.no_grad()
def test_code_that_reads_what_it_has_not_written_is_refused(store):
    """Free memory is filled before a call that is checked: the numbers of the call before are not there any more."""
    register_rewrite("unwritten", Rewrite("leaves its results unwritten", traced=leaves_results_unwritten))
    backend = backend_kwargs.make_backend("tmpl-inductor:auto", candidates=["unwritten"], race="always")
    x = normal(64, 64)
    assert torch.equal(torch.compile(softmax, backend=backend)(x), softmax(x))
    (decision,) = Catalogue(store).all()
    row = {each.name: each for each in decision.rows}["unwritten"]
    assert row.status == "fail_accuracy"


@pytest.mark.parametrize("size", [1 << 10, 5 << 20], ids=["small", "large"])
def test_free_memory_is_filled(size):
    """A tensor that is made of free memory then holds nan."""
    freed = torch.zeros(size, device="cuda")
    del freed
    trial.fill_free_memory(torch.device("cuda", 0))
    assert torch.empty(size, device="cuda").isnan().all()


def test_filled_memory_counts_as_no_calls():
    """Where nothing but free memory was filled, a GPU has room for what calls take."""
    torch.empty(1 << 28, device="cuda")
    trial.fill_free_memory(torch.device("cuda", 0))
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()


def test_memory_of_other_allocators_is_not_filled():
    """CUDA's own allocator tells nothing of what it has free, which is no error of a candidate."""
    code = (
        "import os; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync'\n"
        "import torch; from backend_kwargs.trial import fill_free_memory\n"
        "fill_free_memory(torch.ones(1, device='cuda').device)"
    )
    subprocess.check_call([sys.executable, "-c", code])
