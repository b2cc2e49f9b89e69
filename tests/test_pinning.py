"""`pin` and `reproducible="pinned"`: what timing chose is written once, and nothing is timed afterwards."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.auto.process_memory import forget_process, nothing_decided
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.facts.decision import RaceRow
from backend_kwargs.graphs.determinism import ASK
from backend_kwargs.torch_internals.dynamo import cache_entries
from backend_kwargs.trial.failures import chain_of
from tests import forks

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# A product of bmm has two kernels on a CPU under max_autotune, forward and backward: a library's and a template's.
# Nothing follows it, since torch 2.13 cannot compile the template with a pointwise operator after it.
TUNED = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
MODEL = """
import hashlib, json, random, sys, time
import torch
from torch._inductor.runtime.benchmarking import Benchmarker
import backend_kwargs as bk
from backend_kwargs.backends.generated_code import comparable
from torch._inductor.utils import run_and_get_code

def model():
    torch.manual_seed(0)
    return torch.randn(4, 16, 32, requires_grad=True), torch.randn(4, 32, 16)

def net(a, b):
    return torch.bmm(a, b)

def random_times():
    calls = []
    def draw(self, *args, **kwargs):
        calls.append(1)
        return random.random()
    Benchmarker.benchmark = Benchmarker.benchmark_cpu = draw
    return calls
"""
SERVE = """
calls = random_times()
torch._inductor.config.fx_graph_cache = torch._inductor.config.autotune_local_cache = False

def run():
    out = torch.compile(net, backend=backend)(a, b)
    out.backward(torch.ones_like(out))
    return out

seen = set()
for _ in range(int(sys.argv[2])):
    if len(seen) > 1:
        break
    torch.compiler.reset()
    backend = bk.make_backend("tmpl-inductor", json.loads(sys.argv[1]))
    a, b = model()
    out, codes = run_and_get_code(run)
    code = "\\n".join(map(comparable, codes))
    bits = b"".join(each.detach().numpy().tobytes() for each in (out, a.grad))
    hashes = [hashlib.sha256(each).hexdigest() for each in (code.encode(), bits)]
    seen.add(hashes[0])
    print(json.dumps([*hashes, len(calls), code.count("extern_kernels.bmm(")]))
"""


def served(options, cache, times=1):
    """Return, for each compile of a process, hashes of code and bits, what was timed so far, and library calls."""
    ran = forks.run("-c", MODEL + SERVE, json.dumps(options), times, env=environment(cache))
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]


def environment(cache):
    return {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A lock for the model, which random times have chosen."""
    tmp_path = tmp_path_factory.mktemp("pinning")
    code = "random_times()\nbk.pin(net, model(), lock='k.lock', backend=bk.make_backend('tmpl-inductor', "
    ran = forks.run("-c", f"{MODEL}{code}{TUNED!r}))", cwd=tmp_path, env=environment(tmp_path / "pinning"))
    assert ran.returncode == 0, ran.stderr
    return tmp_path / "k.lock"


@pytest.fixture
def lock(written, tmp_path):
    """A copy of the lock, which a test may edit."""
    return shutil.copy(written, tmp_path / "k.lock")


def pinned(lock):
    return {**TUNED, "reproducible": "pinned", "lock": str(lock), "strict": True}


def test_two_processes_give_the_same_code_and_bits(lock, tmp_path):
    """With times drawn at random, two cold processes time nothing and agree, forward and backward."""
    text = lock.read_text()
    one, two = (served(pinned(lock), tmp_path / str(at)) for at in range(2))
    assert one == two
    assert one[0][2] == 0
    assert lock.read_text() == text
    assert '"kernel" = ' in text


def test_without_a_lock_code_differs(written):
    """A control: times drawn at random choose other kernels in some compiles."""
    plain = served(TUNED, written.parent / "pinning", times=30)  # whose libraries the lock's process has compiled
    assert plain[0][2]
    assert len({code for code, *_ in plain}) == 2


def test_what_the_lock_says_is_compiled(lock, tmp_path):
    """A lock edited by hand to the library's kernels gives code without a template."""
    lock.write_text(re.sub(r'"kernel" = ".*"', '"kernel" = "bmm"', lock.read_text()))
    assert [each[2:] for each in served(pinned(lock), tmp_path / "library")] == [[0, 2]]


# ---- without a compile of C++


def square(x):
    return x @ x + 1


def pin_square(path, **options):
    return bk.pin(square, torch.ones(3, 3), lock=path, backend=bk.make_backend("tmpl-inductor", **options))


def compiled_with(backend, fn=square, x=None):
    """Return the result under a backend, or the error that it raises."""
    torch.compiler.reset()
    try:
        return torch.compile(fn, backend=backend)(torch.ones(3, 3) if x is None else x)
    except Exception as error:  # noqa: BLE001 - torch wraps it in errors of several kinds
        return str(next(each for each in chain_of(error) if isinstance(each, bk.BackendKwargsError)))


# ---- `pin` as it is called


norm, line = nn.BatchNorm1d(3).train(), nn.Linear(3, 3)


def held(x):
    return norm(line(x)).sin()


def test_what_a_function_holds_is_left_as_it_was(tmp_path):
    """Buffers and gradients of what a function names are the caller's; dynamo has compiled nothing of it."""
    before = [each.clone() for each in (*norm.buffers(), *line.parameters())]
    bk.pin(held, torch.randn(4, 3), lock=tmp_path / "k.lock", backend="tmpl-inductor")
    assert all(map(torch.equal, before, (*norm.buffers(), *line.parameters())))
    assert [each.grad for each in (*norm.parameters(), *line.parameters())] == [None] * 4
    assert not cache_entries(held.__code__)


PARAMETER = nn.Parameter(torch.ones(3, 3))
SQUARE = torch.ones(3, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((SQUARE, SQUARE), id="one tensor twice"),
        pytest.param((SQUARE, torch.ones(1, 3).expand(3, 3)), id="an expanded tensor"),
        pytest.param((SQUARE, SQUARE.t()), id="a view"),
        pytest.param((SQUARE, PARAMETER), id="a parameter"),
        pytest.param((SQUARE, PARAMETER * 2), id="a result with a gradient"),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it
def test_a_graph_is_that_of_the_callers_own_arguments(arguments, tmp_path):
    """What is pinned for a call's arguments serves the same call: copies are as dynamo sees the originals."""
    backend = bk.make_backend("tmpl-inductor:auto", budget_s=0)
    serving = bk.pin(torch.mul, arguments, lock=tmp_path / "k.lock", backend=backend)
    served = torch.compile(torch.mul, backend=bk.make_backend(serving, strict=True))(*arguments)
    torch.testing.assert_close(served, torch.mul(*arguments))


@torch.no_grad()
def test_a_lock_is_added_to(tmp_path):
    """With `add` a lock serves both calls and keeps what it had; sizes of the first do not vary in the second."""
    backend, path = bk.make_backend("tmpl-inductor:auto", budget_s=0), tmp_path / "k.lock"
    bk.pin(square, torch.ones(3, 3), lock=path, backend=backend)
    before = path.read_text()
    serving = bk.pin(square, torch.ones(4, 4), lock=path, backend=backend, add=True)
    assert {*before.splitlines()} < {*path.read_text().splitlines()}
    compiled = torch.compile(square, backend=bk.make_backend(serving, strict=True), dynamic=False)
    for size in (3, 4):
        torch.testing.assert_close(compiled(torch.ones(size, size)), square(torch.ones(size, size)))


@torch.no_grad()
def test_a_lock_of_another_machine_is_not_added_to(tmp_path):
    """What two machines chose is not in one lock."""
    pin_square(path := tmp_path / "k.lock")
    path.write_text(text := re.sub('"threads" = .*', '"threads" = 99', path.read_text()))
    with pytest.raises(bk.BackendKwargsError, match="was written for threads 99"):
        bk.pin(square, torch.ones(4, 4), lock=path, backend="tmpl-inductor", add=True)
    assert path.read_text() == text


@torch.no_grad()
def test_sizes_that_vary_are_pinned(tmp_path):
    """Under `dynamic` one decision serves any size."""
    backend = bk.make_backend("tmpl-inductor:auto", budget_s=0)
    serving = bk.pin(square, torch.ones(3, 3), lock=tmp_path / "k.lock", backend=backend, dynamic=True)
    compiled = torch.compile(square, backend=bk.make_backend(serving, strict=True), dynamic=True)
    for size in (4, 5):
        torch.testing.assert_close(compiled(torch.ones(size, size)), square(torch.ones(size, size)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"model": None}, "model must be a module or a function, got None (NoneType).", id="no model"),
        pytest.param({"lock": 3}, "lock must be a path, got 3 (int).", id="no path"),
        pytest.param(
            {"model": lambda x: 3},
            "Nothing is pinned: the call compiled no graph. Pass the model itself, not what torch.compile returned.",
            id="no graph",
        ),
        pytest.param(
            {"example_inputs": (torch.ones(3, 3), (each for each in []))},
            "The model and its inputs must be ones that copy.deepcopy() can copy, got TypeError: cannot pickle "
            "'generator' object.",
            id="no copy",
        ),
    ],
)
def test_what_cannot_be_pinned(arguments, message, tmp_path):
    """Wrong arguments are refused, and nothing is written."""
    given = {"model": square, "example_inputs": torch.ones(3, 3), "lock": tmp_path / "k.lock"} | arguments
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.pin(given.pop("model"), given.pop("example_inputs"), backend="tmpl-inductor", **given)
    assert str(raised.value) == message
    assert not (tmp_path / "k.lock").exists()


@torch.no_grad()
def test_the_decision_of_a_race_is_pinned(tmp_path, monkeypatch):
    """Serving races nothing and uses no store: the decision is the lock's."""
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "store"))
    backend = bk.make_backend("tmpl-inductor:auto", candidates=["max_autotune"], budget_s=1)
    serving = bk.pin(square, torch.ones(3, 3), lock=tmp_path / "k.lock", backend=backend)
    chosen = (tmp_path / "k.lock").read_text()
    assert '["decisions"' in chosen
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "other"))
    with nothing_decided():
        compiled = torch.compile(square, backend=bk.make_backend(serving, strict=True))
        torch.testing.assert_close(compiled(torch.ones(3, 3)), square(torch.ones(3, 3)))
        (graph,) = bk.report(compiled).graphs
        assert f'"winner" = "{graph.race.winner}"' in chosen
    assert not (tmp_path / "other").exists()


@pytest.fixture
def decided(tmp_path):
    """A store whose decision for `square` is max_autotune, whatever its race has found."""
    store = str(tmp_path / "store")
    backend = bk.make_backend("tmpl-inductor:auto", candidates=["max_autotune"], budget_s=1, store=store)
    with torch.no_grad():
        compiled_with(backend)
        catalogue = Catalogue(store)
        (decision,) = catalogue.all()
        catalogue.forget()
        catalogue.add(replace(decision, winner="max_autotune", options={"max_autotune": True}, rows=(), cut_s=0.0))
        forget_process()
        yield backend


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("race", ["missing", "never"])
def test_the_decision_of_a_store_is_pinned(decided, race, strict, tmp_path):
    """What was raced without `reproducible` is what is pinned, whatever is done about what a lock lacks."""
    path = tmp_path / "k.lock"
    bk.pin(square, torch.ones(3, 3), lock=path, backend=bk.make_backend(decided, race=race, strict=strict))
    assert '"winner" = "max_autotune"' in path.read_text()


@pytest.mark.parametrize(("deterministic", "winner"), [(False, "max_autotune"), (True, "eager")])
def test_eager_has_won(decided, deterministic, winner, tmp_path):
    """Nobody checks the bits of eager's gradients: without deterministic algorithms the next fastest is pinned."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        pinned_rows(decided, tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    assert f'"winner" = "{winner}"' in (tmp_path / "k.lock").read_text()


def pinned_rows(backend, tmp_path):
    """Pin by a decision of these rows for the modes of now."""
    compiled_with(backend)
    catalogue = Catalogue(str(tmp_path / "store"))
    rows = (
        RaceRow("eager", seconds=1.0, status="pass", won=True),
        RaceRow("default", seconds=9.0, status="pass"),
        RaceRow("max_autotune", {"max_autotune": True}, seconds=3.0, status="pass"),
    )
    several = [replace(each, winner="eager", options={}, rows=rows, cut_s=0.0) for each in catalogue.all()]
    catalogue.forget()
    catalogue.add(*several)
    forget_process()
    bk.pin(square, torch.ones(3, 3), lock=tmp_path / "k.lock", backend=bk.make_backend(backend, race="never"))


@torch.no_grad()
def test_a_graph_that_no_race_decides(tmp_path):
    """Under race="never" a small graph after a break, which no store has, is pinned to default."""

    def breaks(x):
        x = square(x)
        torch._dynamo.graph_break()
        return x + 1

    store, x = str(tmp_path / "store"), torch.ones(3, 3)
    backend = bk.make_backend("tmpl-inductor:auto", candidates=[], budget_s=1, store=store)
    torch.compile(breaks, backend=backend)(x)
    forget_process()
    serving = bk.pin(breaks, x, lock=tmp_path / "k.lock", backend=bk.make_backend(backend, race="never"))
    torch.testing.assert_close(compiled_with(bk.make_backend(serving, strict=True), breaks), breaks(x))


@torch.no_grad()
def test_a_number_that_varies(tmp_path):
    """Where dynamo begins again with another graph, as for the eps of a norm, the lock has that one's decision."""
    net = nn.LayerNorm(16)
    backend = bk.make_backend("tmpl-inductor:auto", budget_s=0)
    serving = bk.pin(net, torch.ones(8, 16), lock=tmp_path / "k.lock", backend=backend, dynamic=True)
    compiled = torch.compile(net, backend=bk.make_backend(serving, strict=True), dynamic=True)
    for size in (8, 5):
        x = torch.randn(size, 16)
        torch.testing.assert_close(compiled(x), net(x))


def test_inference_mode(tmp_path):
    """The model is pinned there as under no_grad, and its lock serves both."""
    net, x = nn.Linear(4, 4), torch.ones(2, 4)
    backend = bk.make_backend("tmpl-inductor:auto", budget_s=0)
    with torch.inference_mode():
        serving = bk.make_backend(bk.pin(net, x, lock=tmp_path / "k.lock", backend=backend), strict=True)
        torch.testing.assert_close(compiled_with(serving, net, x), net(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled_with(serving, net, x), net(x))


@torch.no_grad()
def test_positional_and_keyword_arguments(tmp_path):
    """A pair of both is a call, as for seal."""

    def scaled(x, *, by):
        return x @ x * by

    x, by = torch.ones(3, 3), torch.tensor(2.0)
    serving = bk.pin(scaled, ((x,), {"by": by}), lock=tmp_path / "k.lock", backend="tmpl-inductor")
    torch.testing.assert_close(torch.compile(scaled, backend=serving)(x, by=by), scaled(x, by=by))


def test_nothing_is_decided_that_may_not_be_raced(decided, tmp_path):
    """Under race="never" a graph without a decision is an error, and not pinned to default."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.pin(square, torch.ones(512, 512), lock=tmp_path / "k.lock", backend=bk.make_backend(decided, race="never"))
    assert str(raised.value) == (
        "Nothing is pinned for a graph of float32 512x512: race='never', and a decision is stored only for other "
        "sizes. Leave out race='never', or budget_s=0 to pin default."
    )


@torch.no_grad()
def test_a_graph_that_the_lock_lacks(tmp_path):
    """Another size is an error under `strict`, and compiled under default without it."""
    backend = bk.make_backend("tmpl-inductor:auto", candidates=["max_autotune"], budget_s=1)
    serving = bk.pin(square, torch.ones(3, 3), lock=(path := tmp_path / "k.lock"), backend=backend)
    x = torch.ones(4, 4)
    torch.testing.assert_close(compiled_with(serving, x=x), square(x))
    assert compiled_with(bk.make_backend(serving, strict=True), x=x) == (
        f"Lock {str(path)!r} has no decision for a graph of float32 4x4 without gradients: pin it too (add=True), or "
        "leave out 'strict'."
    )


def test_another_number_of_threads(tmp_path):
    """A lock of a machine with other threads is refused with both numbers."""
    serving, threads = pin_square(path := tmp_path / "k.lock"), torch.get_num_threads()
    path.write_text(path.read_text().replace(f'"threads" = {threads}', '"threads" = 99'))
    assert compiled_with(serving) == (
        f"Lock {str(path)!r} was written for threads 99 (here {threads}): write one here by `backend-kwargs pin`, or "
        "bk.pin(...)."
    )


def test_a_gradient_that_adds_atomically(tmp_path):
    """What would give other bits is refused by name when a lock is written, which then is not."""
    at = torch.tensor([0, 0, 1])

    def gathered(x):
        return x[at].sin()

    x = torch.ones(3, 3, requires_grad=True)
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.pin(gathered, x, lock=tmp_path / "k.lock", backend="tmpl-inductor")
    assert str(raised.value) == f"'aten.index_put.default' may compute in another order in each run: {ASK}."
    assert not (tmp_path / "k.lock").exists()


def test_a_gradient_under_deterministic_algorithms(tmp_path):
    """With torch's deterministic algorithms it is pinned, and its code adds nothing atomically."""
    net = nn.Embedding(5, 4)
    torch.use_deterministic_algorithms(True)
    try:
        serving = bk.pin(net, torch.tensor([1, 1, 3]), lock=tmp_path / "k.lock", backend="tmpl-inductor")
        torch.compile(net, backend=serving)(torch.tensor([1, 1, 3])).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert net.weight.grad.tolist() == [[0] * 4, [2] * 4, [0] * 4, [1] * 4, [0] * 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"reproducible": "pinned"},
            "Option 'reproducible' needs 'lock', the file that `backend-kwargs pin` or bk.pin(...) wrote.",
            id="no lock",
        ),
        pytest.param(
            {"lock": "k"}, "Option 'lock' pins nothing by itself: pass reproducible='pinned' too.", id="lock alone"
        ),
        pytest.param(
            {"reproducible": "pinned", "lock": "k", "max_autotune_gemm_backends": "ATEN,CUTLASS"},
            "CUTLASS cannot be pinned: leave it out of 'max_autotune_gemm_backends'.",
            id="CUTLASS",
        ),
        pytest.param(
            {"reproducible": "pinned", "lock": "k", "use_aoti": True},
            "Options 'use_aoti' and 'reproducible' cannot be combined; leave one out.",
            id="ahead of time",
        ),
    ],
)
def test_options_that_cannot_be_pinned(options, message):
    """They are refused before anything is compiled."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.make_backend("tmpl-inductor", options).verify()
    assert str(raised.value) == message


@pytest.mark.filterwarnings("ignore:Template 'max_autotune_no_cudagraphs' cannot act fully")
def test_a_template_that_cannot_act_fully_is_pinned(tmp_path):
    """What this machine lacks is told, as when serving, and is no error."""
    serving = bk.pin(
        square, torch.ones(3, 3), lock=tmp_path / "k.lock", backend="tmpl-inductor:max_autotune_no_cudagraphs"
    )
    torch.testing.assert_close(compiled_with(serving), square(torch.ones(3, 3)))


def test_the_command(tmp_path):
    """The command writes a lock and prints the lines that serve by it."""
    (tmp_path / "m.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)\n"
    )
    ran = forks.run(
        "-m", "backend_kwargs", "pin", "m.py:build", "--lock", "k.lock", "--backend", "tmpl-inductor", cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "k.lock is written. Commit it, and serve with:",
        "",
        "import backend_kwargs as bk",
        "torch.compile(model, backend=bk.make_backend('tmpl-inductor', {'reproducible': 'pinned', 'lock': 'k.lock'}))",
    ]
    assert (tmp_path / "k.lock").read_text().startswith("# What timing chose")


def test_the_command_with_a_model_that_fails(tmp_path):
    """An error of the model is one line."""
    (tmp_path / "m.py").write_text("import torch\n\ndef build():\n    return (lambda x: {}[1]), torch.ones(2)\n")
    ran = forks.run("-m", "backend_kwargs", "pin", "m.py:build", "--lock", "k.lock", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (2, "error: m.py:build cannot be pinned: KeyError: 1.\n")
