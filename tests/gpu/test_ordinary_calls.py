"""`auto` with CUDA graphs in ordinary code: results stay right, and a race slows nothing else down."""

import copy
import threading
import time
from statistics import median

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from backend_kwargs import make_backend
from backend_kwargs.auto import process_memory, race
from backend_kwargs.backends.inductor import cudagraph_outputs

CALLS = 6


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch, fresh_dynamo):
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "decisions"))
    # CUDA graphs always win, however busy the machine is: the tests check what follows.
    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: True)
    process_memory.forget_process()
    yield
    process_memory.forget_process()


def mlp(depth=6, width=128):
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU()))).cuda()


def auto(model, **options):
    """Compile by auto with CUDA graphs as the only candidate."""
    backend = make_backend("tmpl-inductor:auto", candidates=["cudagraphs"], **options)
    return torch.compile(model, backend=backend)


def inputs(*shape, count=CALLS):
    torch.manual_seed(1)
    return [torch.randn(*(shape or (32, 128)), device="cuda") for _ in range(count)]


def winner():
    return [decision.winner for decision in process_memory.memory().decisions.values() if decision.rows]


@pytest.fixture
def recorded():
    """Check at the end that CUDA graphs won the races, without which the test shows nothing."""
    yield
    assert set(winner()) == {"cudagraphs"}


@torch.no_grad()
def test_a_loop_that_holds_its_result(recorded):
    """`out = f(x)` in a loop gives eager's results at each step."""
    model = mlp()
    f = auto(model)
    for x in inputs():
        out = f(x)
        assert_close(out, model(x), atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_results_kept_in_a_list(recorded):
    """Results of different inputs keep their values after later calls."""
    model, xs = mlp(), inputs()
    f = auto(model)
    kept = [f(x) for x in xs]
    assert_close(kept, [model(x) for x in xs], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_a_result_fed_back(recorded):
    """A result can be the next input."""
    model, (x, *_) = mlp(), inputs()
    f, y, z, seen = auto(model), x, x, []
    for _ in range(CALLS):
        y, z = f(y), model(z)
        seen.append((y, z))
    assert_close([a for a, _ in seen], [b for _, b in seen], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_two_functions_nested(recorded):
    """Both results of `g(f(x))` keep their values."""
    first, second, xs = mlp(), mlp(4), inputs()
    f, g = auto(first), auto(second)
    kept = [(y := f(x), g(y)) for x in xs]
    assert_close(kept, [(first(x), second(first(x))) for x in xs], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_results_moved_to_the_cpu_later(recorded):
    """Results that are read at the end are those of their own calls."""
    model, xs = mlp(), inputs()
    f = auto(model)
    kept = [f(x) for x in xs]
    torch.cuda.synchronize()
    assert_close([y.cpu() for y in kept], [model(x).cpu() for x in xs], atol=1e-4, rtol=1e-3)


class Decoder(nn.Module):
    """Greedy decoding with a static key-value cache, a buffer that each step writes to."""

    def __init__(self, vocabulary=64, width=64, length=16):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("cache", torch.zeros(length, width))

    def forward(self, token, at):
        x = self.embed(token)
        self.cache.index_copy_(0, at, self.key(x))
        seen = torch.arange(len(self.cache), device=x.device) <= at
        scores = (self.query(x) @ self.cache.t()).masked_fill(~seen, -1e9)
        return self.head(x + torch.softmax(scores, -1) @ self.cache)


@torch.no_grad()
def test_a_greedy_decode_loop():
    """Tokens and all kept logits equal eager's."""
    torch.manual_seed(0)
    eager = Decoder().cuda()
    model = copy.deepcopy(eager)
    step = auto(model)

    def decode(call):
        token, kept = torch.tensor([3], device="cuda"), []
        for at in range(12):
            logits = call(token, torch.tensor([at], device="cuda"))
            kept.append(logits)
            token = logits.argmax(-1)
        return kept

    assert_close(decode(step), decode(eager), atol=1e-4, rtol=1e-3)
    assert_close(model.cache, eager.cache, atol=1e-4, rtol=1e-3)


def losses_and_gradients(call, model, xs, every):
    """Train with steps that accumulate the gradients of `every` calls; return losses and `.grad` at each call."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.05), []
    for at, x in enumerate(xs):
        loss = call(x).square().mean()
        loss.backward()
        seen.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
        if at % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("every", [1, 2, 3])
def test_gradient_accumulation(recorded, every):
    """Losses and `p.grad` equal eager's at each call, also with accumulation."""
    eager, xs = mlp(), inputs()
    model = copy.deepcopy(eager)
    got = losses_and_gradients(auto(model), model, xs, every)
    assert_close(got, losses_and_gradients(eager, eager, xs, every), atol=1e-4, rtol=1e-3)


def test_a_kept_grad_stays():
    """`.grad` after one call is not overwritten by the next call's backward pass."""
    eager, xs = mlp(), inputs()
    model = copy.deepcopy(eager)
    f, kept = auto(model), []
    for net, call in ((model, f), (eager, eager)):
        mine = []
        for x in xs:
            net.zero_grad()
            call(x).square().mean().backward()
            mine.append([p.grad for p in net.parameters()])
        kept.append(mine)
    assert_close(kept[0], kept[1], atol=1e-4, rtol=1e-3)


def test_autograd_grad():
    """Gradients returned by `autograd.grad` for inputs and parameters keep their values."""
    model, xs = mlp(), [x.requires_grad_() for x in inputs()]
    f, leaves = auto(model), list(model.parameters())
    got = [torch.autograd.grad(f(x).square().mean(), [x, *leaves]) for x in xs]
    assert_close(got, [torch.autograd.grad(model(x).square().mean(), [x, *leaves]) for x in xs], atol=1e-4, rtol=1e-3)


def test_two_forwards_before_one_backward():
    """The buffers that the first call saved for its backward pass survive a second call."""
    eager, (a, b, *_) = mlp(), inputs()
    model = copy.deepcopy(eager)
    f = auto(model)
    for _ in range(CALLS):
        for net, call in ((model, f), (eager, eager)):
            net.zero_grad()
            (call(a).square() + 2 * call(b)).mean().backward()
        grads = [[p.grad for p in net.parameters()] for net in (model, eager)]
        assert_close(*grads, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_outputs_that_share_memory():
    """Outputs that alias each other or an input do so as in eager, and keep their values."""

    def fn(x):
        y = x.sin().cos().exp().tanh()
        return y, y[1:], y.t(), x, x[1:], y * 2

    f, xs = auto(fn), inputs()
    kept = [f(x) for x in xs]
    assert_close(kept, [fn(x) for x in xs])
    for x, (y, tail, transposed, same, rest, _) in zip(xs, kept, strict=True):
        assert same is x
        assert rest.data_ptr() == x[1:].data_ptr()
        y.fill_(7)
        assert (tail == 7).all()
        assert (transposed == 7).all()


def test_a_second_thread(recorded):
    """Two threads that call one compiled function each keep their own results."""
    model, xs = mlp(), inputs()
    f, results = auto(model), {}
    with torch.no_grad():
        expected = [model(x) for x in xs]
        f(xs[0])

    def work(name):
        with torch.no_grad():
            results[name] = [f(x) for x in xs]
            torch.cuda.synchronize()

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
        thread.join()
    assert_close(results["a"], expected, atol=1e-4, rtol=1e-3)
    assert_close(results["b"], expected, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_a_side_stream(recorded):
    """On a user's stream, synchronized as usual, results are right and are not overwritten."""
    model, xs = mlp(), inputs()
    f, side = auto(model), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = [f(x) for x in xs]
    torch.cuda.current_stream().wait_stream(side)
    assert_close(kept, [model(x) for x in xs], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_dynamic_shapes():
    """With sizes that change from call to call, every result keeps its values."""
    model = mlp()
    f = torch.compile(model, dynamic=True, backend=make_backend("tmpl-inductor:auto", candidates=["cudagraphs"]))
    xs = [torch.randn(rows, 128, device="cuda") for rows in (8, 16, 8, 24, 16, 8, 24)]
    kept = [f(x) for x in xs]
    assert_close(kept, [model(x) for x in xs], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_sizes_in_turn_are_looked_up_once(monkeypatch):
    """Once each size has been recorded, calls no longer search the pool for results, whatever the order of sizes."""
    model = mlp()
    f = torch.compile(model, dynamic=True, backend=make_backend("tmpl-inductor:cudagraphs", clone_outputs=True))
    xs = [torch.randn(rows, 128, device="cuda") for rows in (8, 16, 24)]
    for _ in range(4):
        for x in xs:
            f(x)
    monkeypatch.setattr(cudagraph_outputs._PooledCopies, "_looked_up", None)
    kept = [f(x) for x in (*xs, *reversed(xs))]
    assert_close(kept, [model(x) for x in (*xs, *reversed(xs))], atol=1e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({"graph_partition": True}, id="partitions"),
        pytest.param({"triton.cudagraph_unexpected_rerecord_limit": 1}, id="rerecord limit"),
        pytest.param({"triton.skip_cudagraph_warmup": True}, id="no warm-up"),
    ],
)
def test_results_of_partitions_and_fallbacks_stay(setting):
    """With several graphs per call, and calls that skip CUDA graphs, results keep their values too."""

    def fn(x, y):
        first = (x.sin() @ x.t()).relu()
        host = first.sum().cpu() if setting.get("graph_partition") else first.sum()
        return first, (y.cos() + 1) * 2, host

    f = torch.compile(fn, backend=make_backend("tmpl-inductor:cudagraphs", setting, clone_outputs=True))
    xs, ys = inputs(), inputs()
    kept = [f(x, y) for x, y in zip(xs, ys, strict=True)]
    assert_close(kept, [fn(x, y) for x, y in zip(xs, ys, strict=True)], atol=1e-3, rtol=1e-3)


def loops_s(x, *functions, rounds=7, calls=28):
    """Return, for each function, the least seconds of a call in loops that keep its result; they take turns."""
    for f in functions:
        for _ in range(20):
            out = f(x)
    seconds = [[] for _ in functions]
    for _ in range(rounds):
        for f, taken in zip(functions, seconds, strict=True):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(calls):
                out = f(x)
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - started) / calls)
    del out
    return [min(taken) for taken in seconds]


@torch.no_grad()
def test_a_race_leaves_the_marks_of_other_functions(evidence):
    """A race marks no step for a plain `reduce-overhead` function; its times before and after are recorded."""
    from torch._inductor.cudagraph_trees import MarkStepBox

    model, (x, *_) = mlp(), inputs()
    other = torch.compile(mlp(), mode="reduce-overhead")
    eager, taken = loops_s(x, model, other)
    before = taken / eager
    auto(mlp(4))(x)
    assert set(winner()) == {"cudagraphs"}
    eager, taken = loops_s(x, model, other)
    after = taken / eager
    evidence("auto", "reduce-overhead loop before and after a race, shares of eager's", shares=[before, after])
    assert MarkStepBox.mark_step_counter == 0


@torch.no_grad()
def test_time_of_what_auto_returns_in_a_loop(evidence):
    """The time of the winner in such a loop is recorded beside reduce-overhead's with cloned outputs, not judged."""
    model, (x, *_) = mlp(), inputs()
    plain = torch.compile(mlp(), mode="reduce-overhead")
    cloned, raced = loops_s(x, lambda x: plain(x).clone(), auto(model))
    evidence("auto", "held loop: cloned reduce-overhead, auto", microseconds=[cloned * 1e6, raced * 1e6])
    assert winner() == ["cudagraphs"]


@torch.no_grad()
def test_a_race_between_two_graphs_of_one_call():
    """The second graph races while the outputs of the first one's CUDA graph are still needed."""

    def fn(x):
        y = torch.relu(x @ x.t()).sin()
        torch._dynamo.graph_break()
        z = (y @ y).cos()
        return y, z, y + z

    f, xs = auto(fn), inputs(64, 64)
    kept = [f(x) for x in xs]
    assert_close(kept, [fn(x) for x in xs], atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_host_time_of_copies(evidence):
    """The cost of copying two small outputs is recorded, but not judged."""

    def fn(x):
        return x.sin(), x.cos()

    x = torch.randn(64, 64, device="cuda")
    calls = {
        name: torch.compile(fn, backend=make_backend("tmpl-inductor:cudagraphs", clone_outputs=clone))
        for name, clone in (("raw", False), ("copied", True))
    }
    for call in calls.values():
        for _ in range(30):
            out = call(x)
    hosts = {name: [] for name in calls}
    for _ in range(30):
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(20):
                out = call(x)
            hosts[name].append((time.perf_counter() - started) / 20)
    del out
    medians = {name: median(each) * 1e6 for name, each in hosts.items()}
    evidence("clone_outputs=True", "host time of two outputs", microseconds=medians)
