"""Steps with state on a GPU: a call past the end of a cache would end every later CUDA call of the process."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import backend_kwargs
from backend_kwargs.compare import Candidate, compare
from backend_kwargs.rewrites import Rewrite, register_rewrite


def auto(fn, tmp_path, **options):
    """Compile by a race of all steps that fit into its budget."""
    options = {"budget_s": 30.0, "store": str(tmp_path / "decisions"), "race": "always"} | options
    return torch.compile(fn, backend=backend_kwargs.make_backend("tmpl-inductor:auto", **options))


def counted(keys, filled, new):
    at = torch.arange(1, device=keys.device) + filled
    filled.add_(1)
    keys.index_copy_(0, at, new)
    return (keys @ new[0]).softmax(0)


def ring(keys, head, new):
    keys.index_copy_(0, head, new)
    head.copy_((head + 1) % len(keys))
    return (keys @ new[0]).softmax(0)


def state(at, rows=64):
    torch.manual_seed(0)
    return [torch.randn(rows, 64, device="cuda"), torch.tensor([at], device="cuda")]


def freed(keys, bias, new):
    rows = keys * new
    keys.untyped_storage().resize_(0)
    return rows.relu() + bias


@pytest.mark.parametrize("left", [24, 1], ids=["24 free rows", "one free row"])
@pytest.mark.parametrize("step", [counted, ring], ids=["counter", "ring"])
@torch.no_grad()
def test_a_race_leaves_the_process_alive(step, left, tmp_path):
    """A loop to the end of the cache under auto gives eager's results, all kept, and CUDA still works."""
    given, expected = state(64 - left), state(64 - left)
    compiled, news = auto(step, tmp_path), [torch.randn(1, 64, device="cuda") for _ in range(left)]
    kept = [compiled(*given, new) for new in news]
    torch.cuda.synchronize()
    assert_close(kept, [step(*expected, new) for new in news])
    assert_close(given, expected)
    (graph,) = backend_kwargs.report(compiled).graphs
    assert "race failed" not in str(graph)


@torch.no_grad()
def test_memory_that_a_step_frees(tmp_path):
    """A step that frees what it has read runs once, as in eager, and the process stays alive."""
    keys, new = torch.randn(64, 64, device="cuda"), torch.randn(1, 64, device="cuda")
    wanted = (keys * new).relu() + 1
    assert_close(auto(freed, tmp_path)(keys, torch.ones(1, device="cuda"), new), wanted)
    assert keys.untyped_storage().nbytes() == 0
    torch.cuda.synchronize()


class Step(nn.Module):
    """One step of decoding with a cache of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(8, 64))
        self.register_buffer("filled", torch.tensor([7]))
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        at = torch.arange(1, device=x.device) + self.filled
        self.filled.add_(1)
        self.keys.index_copy_(0, at, self.layer(x))
        return (self.keys @ x[0]).softmax(0)


def test_compare_calls_a_step_from_its_state():
    """All peers of a step with one free row pass, are timed, and leave the user's module as it was."""
    model = Step().cuda().eval()
    names = ("default", "cudagraphs")
    candidates = [Candidate("eager"), *(Candidate(name, f"tmpl-inductor:{name}") for name in names)]
    rows = compare(model, torch.randn(1, 64, device="cuda"), candidates, rounds=5).rows
    assert {row.label: (row.status, row.reason) for row in rows} == dict.fromkeys(("eager", *names), ("pass", ""))
    torch.cuda.synchronize()
    assert model.filled.item() == 7


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.register_buffer("warm", torch.linspace(0, 1, 3))
        self.register_buffer("step", torch.tensor([1]))

    def forward(self, x):
        self.step += 1
        return self.layer(self.norm(x)).square().mean() + self.warm.index_select(0, self.step)[0]


def test_training_with_a_counter(tmp_path):
    """A training step at the last element of its table: loss, counters and gradients are eager's."""
    torch.manual_seed(0)
    model, x = Counting().cuda(), torch.randn(16, 64, device="cuda")
    twin = copy.deepcopy(model)
    loss, wanted = auto(model, tmp_path)(x), twin(x)
    loss.backward()
    wanted.backward()
    torch.cuda.synchronize()
    assert_close(loss, wanted)
    assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    grads = [[p.grad for p in each.parameters()] for each in (model, twin)]
    assert_close(*grads, atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_a_candidate_that_writes_an_input(tmp_path):
    """The user's tensor stays as it is when a candidate writes what eager only reads."""
    from tests.auto.test_auto_state import in_place

    register_rewrite("gpu_in_place", Rewrite("adds in place", traced=in_place))
    x = torch.randn(64, 64, device="cuda")
    before = x.clone()
    compiled = auto(lambda x: torch.add(x, 1) * 1.0, tmp_path, candidates=["gpu_in_place"])
    assert_close(compiled(x), before + 1)
    assert torch.equal(x, before)


@torch.no_grad()
def test_rounded_positions_are_not_raced(tmp_path):
    """Positions made of floating-point numbers are not raced on a GPU, and the report says why."""
    table, x = torch.randn(10, 4, device="cuda"), torch.rand(5, device="cuda")
    compiled = auto(lambda table, x: table[(x * 9).long()] * 2 + 1, tmp_path)
    assert_close(compiled(table, x), table[(x * 9).long()] * 2 + 1)
    assert "its positions are rounded from floating-point numbers" in str(backend_kwargs.report(compiled))


@torch.no_grad()
def test_generate_with_a_static_cache(tmp_path):
    """`generate` with transformers' static cache, its prompt one token short of it, gives eager's tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what transformers imports
        transformers = pytest.importorskip("transformers")
        transformers.LlamaForCausalLM  # noqa: B018 - it is imported when it is named
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval().cuda()
    prompt = torch.randint(1, 64, (1, 15), device="cuda")
    given = {"max_length": 16, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(prompt, **given)
    model.forward = auto(model.forward, tmp_path)
    for _ in range(2):
        assert torch.equal(model.generate(prompt, cache_implementation="static", **given), wanted)
    longer = model.generate(prompt[:, :4], cache_implementation="static", **given)
    torch.cuda.synchronize()
    assert longer.shape[1] <= 16
