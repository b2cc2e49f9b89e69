"""Processes with a missing compiler, little memory or time, or tensors that are not plain."""

import gc
import logging
import resource

import pytest
import torch
from torch._inductor.utils import fresh_cache

from backend_kwargs import make_backend
from backend_kwargs.auto import process_memory
from backend_kwargs.auto.store import Catalogue
from tests import forks
from tests.auto.graphs import change
from tests.faults.attempts import TIMES


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="backend_kwargs.auto")
    return caplog


def chain(x):
    return torch.relu(x * 2 + 1).sum(-1)


@torch.no_grad()
def test_a_broken_compiler_is_not_remembered(auto, store, log, warned):
    """If default cannot be compiled, the decision is kept in the process but not stored."""
    x = torch.randn(8, 64)
    for _ in range(2):
        with fresh_cache(), warned():
            assert torch.allclose(auto(chain, options={"cpp.cxx": ("/no/such/compiler",)})(x), chain(x))
        torch._dynamo.reset()
    assert Catalogue(store).all() == []
    assert sum(line.startswith("default is dropped") for line in log.messages) == 1


@torch.no_grad()
def test_what_a_broken_compiler_left_in_a_store_is_not_followed(auto, races, store, begin_anew):
    """A stored decision for eager from a process where default could not run is not used."""
    x = torch.randn(8, 64)
    auto(chain)(x)
    default = {"name": "default", "status": "fail_to_run", "reason": "InvalidCxx"}
    rows = [{"name": "eager", "won": True}, default]
    change(store, winner="eager", rows=rows)
    begin_anew()
    auto(chain)(x)
    assert races.count == 2


SHORT = """
import resource, sys, warnings
warnings.simplefilter("ignore")
import torch

def chain(x):
    return torch.relu(x * 2 + 1).sum(-1)

compiled = torch.compile(chain, backend="tmpl-inductor:auto", options={"candidates": [], "budget_s": 20.0})
with torch.no_grad():
    compiled(torch.randn(4, 8))  # what a first compile loads is loaded
    held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    x = torch.randn(64, 1 << 18)  # 64 MiB
    limit = held + int(sys.argv[1]) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
    try:
        result = compiled(x)
    except (RuntimeError, MemoryError) as error:
        said = f"{type(error).__name__}: {error}"  # dynamo raises a RuntimeError that names the first one
        print("raised", "allocate memory" in said or "MemoryError" in said)
    else:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        print("right", torch.allclose(result, chain(x), atol=1e-3))
"""


@pytest.mark.parametrize("mib", [80, 150, 250, 400] if TIMES > 1 else [150])
def test_out_of_memory(tmp_path, mib):
    """If memory runs out during a race, the result is right or the error is out of memory."""
    done = forks.run("-c", SHORT, mib)
    assert done.stdout in ("right True\n", "raised True\n"), done.stderr[-2000:]


def parts(count):
    """Return functions with their own code, like the parts of a model after graph breaks."""
    for at in range(count):
        space = {"torch": torch}
        exec(f"def part(x):\n    return torch.relu(x * {at + 1} / {at + 2} + 0.5)", space)
        yield space["part"]


@torch.no_grad()
def test_many_graphs_keep_to_the_budget(auto):
    """All races of a process together take at most process_budget_s, except for the last one."""
    compiled = expected = torch.randn(8, 64)
    for part in parts(4 * TIMES):
        compiled, expected = auto(part, budget_s=2.0, process_budget_s=3.0)(compiled), part(expected)
    assert torch.allclose(compiled, expected, atol=1e-5)
    assert process_memory.memory().race_seconds
    assert sum(process_memory.memory().race_seconds[:-1]) < 3.0


@torch.no_grad()
def test_compiled_and_dropped(auto):
    """The memory of a process that compiles and deletes models with auto does not grow."""
    page = resource.getpagesize()

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:  # noqa: PTH123 - no path of a project
            return int(file.read().split()[1]) * page

    x, seen = torch.randn(8, 1 << 16), []
    for at in range(6 * TIMES):
        model = torch.nn.Sequential(torch.nn.Linear(1 << 16, 16), torch.nn.ReLU())  # 4 MiB
        compiled = auto(model)
        assert torch.allclose(compiled(x), model(x), atol=1e-3)
        del model, compiled
        torch._dynamo.reset()
        if at >= 2:
            seen.append(resident())
    assert seen[-1] - seen[0] < (2 << 20) * len(seen) / 2 + (16 << 20)


@torch.no_grad()
def test_dtensors_take_default(auto, log, tmp_path):
    """DTensors are not plain tensors: their graph uses default, and the log says why."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        x = distribute_tensor(torch.randn(8, 64), init_device_mesh("cpu", (1,)), [Shard(0)])
        result = auto(chain)(x)
        assert torch.allclose(result.full_tensor(), chain(x).full_tensor(), atol=1e-5)
    finally:
        dist.destroy_process_group()
    assert "auto: default for a graph not raced: an input is not a plain tensor (0.0 s)" in log.messages


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # torch means to drop them
@torch.no_grad()
def test_quantized_tensors_reach_no_race(auto, races):
    """torch's quantized tensors have no fakes, so dynamo runs them in eager and no graph is raced."""
    x = torch.quantize_per_tensor(torch.randn(8, 64), 0.1, 0, torch.qint8)

    def dequantized(x):
        return torch.relu(x.dequantize() * 2 + 1).sum(-1)

    assert torch.allclose(auto(dequantized)(x), dequantized(x), atol=1e-5)
    assert races.count == 0


@torch.no_grad()
def test_weights_of_eight_bits_are_raced(auto, log):
    """A graph with int8 weights and scales, which are plain tensors, is raced with right results."""
    weight, scale, x = torch.randint(-128, 127, (64, 64), dtype=torch.int8), torch.rand(64, 1), torch.randn(8, 64)

    def linear(x, weight, scale):
        return x @ (weight.float() * scale / 128).T

    assert torch.allclose(auto(linear)(x, weight, scale), linear(x, weight, scale), atol=1e-3)
    assert [line for line in log.messages if line.startswith("auto: ")][-1].count("\n") == 2


NUMBERS = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-40, 1e38, 1.0, -1.5, 3e8]
GRAPHS = {
    "compare": lambda x: torch.where(torch.eq(x, x), x, torch.zeros_like(x)) + (x < 1).float(),
    "rounding": lambda x: (x + 12582912.0) - 12582912.0,
    "product": lambda x: (x.reshape(2, -1).nan_to_num(0.0, 2.0, -2.0).clamp(-2, 2) @ torch.ones(5, 3)).sin(),
    "softmax": lambda x: torch.softmax(x.nan_to_num(0.0, 9.0, -9.0).clamp(-9, 9), -1).cumsum(-1),
    "integers": lambda x: (x.nan_to_num(0.0, 9.0, -9.0).clamp(-9, 9).int() * 1000000007 + 100) // 7,
}


@pytest.mark.parametrize("name", list(GRAPHS) if TIMES > 1 else ["compare"])
@torch.no_grad()
def test_full_effort_keeps_numbers(auto, name):
    """With effort="full" and special values the winner gives eager's results."""
    x, graph = torch.tensor(NUMBERS), GRAPHS[name]
    compiled = torch.compile(graph, backend=make_backend("tmpl-inductor:auto", effort="full", budget_s=30.0))
    assert torch.allclose(compiled(x), graph(x), rtol=1e-5, atol=1e-5, equal_nan=True)
