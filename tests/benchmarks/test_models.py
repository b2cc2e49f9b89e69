"""Models and segments of the suite: their results, and the counts of operations and bytes."""

import pytest
import torch
from torch.nn.functional import silu, softplus

from benchmarks.workloads.cases import models, segments
from benchmarks.workloads.nets.counting import nbytes
from benchmarks.workloads.nets.llama import Decode, Llama, Prefill, Shape
from benchmarks.workloads.nets.scan import Scan
from benchmarks.workloads.nets.sparse import Dlrm, MoE

CPU = torch.device("cpu")
CASES = {case.name: case for case in (*models.CASES, *segments.CASES)}
SHAPE = Shape(layers=2, hidden=32, heads=4, kv_heads=2, inner=48, vocab=50, length=12, cache=(3, 12))


def built(name, dtype=torch.float32):
    torch.manual_seed(0)
    return CASES[name].build(CPU, dtype, "smoke")


def called(problem, fn=None):
    fn = problem.fn if fn is None else fn
    return [fn(arg) for arg in problem.args] if problem.sweep else fn(*problem.args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_finite_and_vary(name, dtype):
    problem = built(name, dtype)
    with torch.no_grad():
        outputs = called(problem)
    for output in outputs if problem.sweep else [outputs]:
        assert output.dtype == dtype
        assert output.isfinite().all()
        assert output.numel() == 1 or 0.1 < output.std() < 10


@pytest.mark.parametrize("name", CASES)
def test_same_call_gives_the_same(name):
    """A call depends only on its arguments, also with a cache."""
    problem = built(name)
    with torch.no_grad():
        torch.testing.assert_close(called(problem), called(problem), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama_prefill", "llama_decode_b16", "llama3_8b_layers"])
def test_operations_are_those_of_the_formula(name):
    """Operations are two per weight and token, and four per channel of each attended pair of positions."""
    problem = built(name)
    batch, shape = (2, models.LLAMA["smoke"]) if name != "llama3_8b_layers" else segments.LLAMA["smoke"]
    tokens, pairs = {"llama_decode_b16": (1, 25)}.get(name, (shape.length, shape.length * (shape.length + 1) / 2))
    weights = sum(p.numel() for n, p in problem.fn.named_parameters() if "layers" in n and p.ndim == 2)
    head = shape.hidden * shape.vocab  # of the last position
    assert problem.work.flops == 2 * batch * (tokens * weights + head) + 4 * batch * shape.hidden * pairs


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_of_what_there_is(name):
    """The least bytes are at most all tensors once, or three times for a step that writes what it reads."""
    problem, case = built(name), CASES[name]
    with torch.no_grad():
        there = nbytes(problem.fn, list(problem.fn.buffers()), problem.args, called(problem))
    times = len(problem.args) if problem.sweep else 1 if case.modes == ("fwd",) else 6
    assert 0 < problem.work.written < problem.work.bytes <= times * there


def test_llama_decodes_what_it_prefills():
    torch.manual_seed(0)
    prefill, decode, plain = (kind(SHAPE).double().eval() for kind in (Prefill, Decode, Llama))
    weights = {name: tensor for name, tensor in plain.state_dict().items() if not name.endswith(("keys", "values"))}
    for model in (prefill, decode):
        model.load_state_dict(weights, strict=False)
    tokens = torch.randint(SHAPE.vocab, (3, SHAPE.length))
    with torch.no_grad():
        for pos in range(SHAPE.length):
            logits = decode(decode.embed(tokens[:, pos : pos + 1]), torch.tensor([pos]))
        torch.testing.assert_close(logits, prefill(tokens))
        torch.testing.assert_close(logits, plain(tokens)[:, -1])
    caches = zip(decode.named_buffers(), prefill.named_buffers(), strict=True)
    for (_, decoded), (_, prefilled) in caches:
        torch.testing.assert_close(decoded, prefilled)


def test_llama_sees_nothing_after_the_position():
    torch.manual_seed(0)
    decode = Decode(SHAPE).eval()
    args = torch.randn(3, 1, SHAPE.hidden), torch.tensor([5])
    with torch.no_grad():
        before = decode(*args)
        for layer in decode.decoder.layers:
            layer.attention.keys[:, :, 6:] = 9
        assert torch.equal(decode(*args), before)
        decode.decoder.layers[0].attention.keys[:, :, 4] = 9
        assert not torch.equal(decode(*args), before)


def test_training_lowers_the_loss():
    problem = built("llama_train")
    optimizer = problem.optimizer(problem.fn.parameters())
    losses = []
    for _ in range(8):
        loss = problem.fn(*problem.args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_backward_reaches_everything():
    problem = built("llama3_8b_layers_backward")
    problem.fn(*problem.args).sum().backward()
    assert all(leaf.grad is not None for leaf in (*problem.fn.parameters(), *problem.args))


def test_moe_is_the_sum_over_chosen_experts():
    torch.manual_seed(0)
    moe, x = MoE(16, 8, 6, 2), torch.randn(10, 16)
    with torch.no_grad():
        got = moe(x)
        for row, token in zip(got, x, strict=True):
            weights, chosen = moe.router(token).topk(2)
            gates = (token @ moe.gate_up[chosen]).chunk(2, dim=-1)
            each = torch.stack([(silu(g) * u) @ moe.down[c] for g, u, c in zip(*gates, chosen, strict=True)])
            torch.testing.assert_close(row, weights.softmax(-1) @ each)


def test_scan_in_chunks_is_the_recurrence():
    torch.manual_seed(0)
    scan = Scan(3, 4).double()
    x, dt, b, c = (torch.randn(shape).double() for shape in ((2, 16, 3, 5), (2, 16, 3), (2, 16, 6), (2, 16, 6)))
    state, want = torch.zeros(2, 3, 5, 6).double(), []
    with torch.no_grad():
        for t in range(16):
            step = softplus(dt[:, t] - 2)
            decay = (-scan.rate.exp() * step).exp()
            state = decay[..., None, None] * state + torch.einsum("bh,bhp,bn->bhpn", step, x[:, t], b[:, t])
            want.append(torch.einsum("bhpn,bn->bhp", state, c[:, t]) + scan.skip[:, None] * x[:, t])
        torch.testing.assert_close(scan(x, dt, b, c), torch.stack(want, 1))


def test_dlrm_takes_each_pair_of_features_once():
    dlrm = Dlrm(3, 10, 4, 5, (6,), (7,))
    kept = {divmod(int(pair), 4) for pair in dlrm.pairs}
    assert kept == {(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)}


@pytest.mark.parametrize("name", ["resnet50_b1", "unet_level"])
def test_images_stand_with_channels_last(name):
    problem = built(name)
    assert problem.args[0].is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert called(problem).ndim == 2 or called(problem).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("name", "gigaflops", "mebibytes"),
    [
        # 4.09 GMAC and 25.6 M parameters in torchvision's table.
        pytest.param("resnet50_b1", 8.18, 49, id="resnet"),
        # 85 M weights for each of 16384 tokens, and attention; those weights, 12.7 k of 30.5 k words, and the outputs.
        pytest.param("bert_base_32x512", 3094, 206, id="bert"),
    ],
)
def test_full_size_is_the_published_one(name, gigaflops, mebibytes):
    problem = CASES[name].build(CPU, torch.bfloat16, "full")
    assert problem.work.flops == pytest.approx(gigaflops * 1e9, rel=0.01)
    assert problem.work.bytes == pytest.approx(mebibytes * 2**20, rel=0.02)


def test_sweep_takes_one_dynamic_compile(fresh_dynamo):
    problem = built("bert_sweep")
    compiles = []
    with torch.no_grad():
        compiled = torch.compile(problem.fn, backend=lambda gm, _: compiles.append(gm) or gm, dynamic=True)
        torch.testing.assert_close(called(problem, compiled), called(problem))
    assert len(compiles) == 1


@pytest.mark.parametrize("name", CASES)
def test_is_one_graph(name, fresh_dynamo):
    problem = built(name, CASES[name].dtype)
    with torch.no_grad():
        called(problem, torch.compile(problem.fn, backend="eager", fullgraph=True, dynamic=problem.sweep or None))


def test_decode_updates_its_cache_compiled(fresh_dynamo):
    problem = built("llama_decode_b1")
    attention = problem.fn.decoder.layers[0].attention
    with torch.no_grad():
        want = problem.fn(*problem.args)
        written = attention.keys.clone()
        attention.keys[:, :, problem.args[1]] = 0
        torch.testing.assert_close(torch.compile(problem.fn, fullgraph=True)(*problem.args), want)
    torch.testing.assert_close(attention.keys, written)
