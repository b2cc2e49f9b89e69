"""`reproducible="pinned"` on a GPU: with times drawn at random, cold processes agree in code and bits."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.auto.pinned import PinnedChooser

ROOT = str(Path(__file__).parents[2])
ENVIRONMENT = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
SCRIPT = """
import faulthandler, hashlib, json, random, re, sys
faulthandler.dump_traceback_later(300, exit=True)
import torch
from torch._inductor.runtime.benchmarking import Benchmarker
from torch._inductor.utils import run_and_get_code
import backend_kwargs as bk

calls = []

def drawing(timer):
    def draw(*args, **kwargs):
        calls.append(1)
        timer(*args, **kwargs)  # raises for what needs more shared memory than there is
        return random.random()
    return draw

kinds = [Benchmarker]
for kind in kinds:
    kinds += kind.__subclasses__()
    for name in ("benchmark", "benchmark_cpu", "benchmark_gpu"):
        if name in vars(kind):
            setattr(kind, name, drawing(vars(kind)[name]))

torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 512)
).cuda().half()
x = torch.randn(256, 512, device="cuda", dtype=torch.half, requires_grad=True)
options = json.loads(sys.argv[1])
device = f"cuda:{sys.argv[2]}"
if sys.argv[3] == "pin":
    bk.pin(net, x, lock=options.pop("lock"), backend=bk.make_backend("tmpl-inductor", options))
    sys.exit()
torch.cuda.set_device(device)
net, x = net.to(device), x.detach().to(device).requires_grad_()
torch._inductor.config.fx_graph_cache = False

def run():
    out = torch.compile(net, backend=bk.make_backend("tmpl-inductor", options))(x)
    out.sum().backward()
    return out

out, codes = run_and_get_code(run)
number = r"cuda:\\d|index=\\d|_DeviceGuard\\(\\d\\)|set_device\\(\\d\\)|stream\\d|stream\\(\\d\\)"
text = re.sub(number, "", "".join(codes))
text = re.sub(r"^\\s*#.*$", "", text, flags=re.MULTILINE)
results = (out, x.grad, *(each.grad for each in net.parameters()))
bits = b"".join(each.detach().cpu().numpy().tobytes() for each in results)
print(json.dumps([hashlib.sha256(each).hexdigest() for each in (text.encode(), bits)] + [len(calls)]))
"""


def ran(options, way, at, tmp_path, device=0):
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    caches = {name: str(tmp_path / f"{way}{at}") for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    environment = {**ENVIRONMENT, **caches, "PYTHONPATH": path}
    # No fork: CUDA may have been asked for its devices in the process that it is of.
    command = [sys.executable, "-c", SCRIPT, json.dumps(options), str(device), way]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if way != "pin" else None


def ran_at_once(count, options, way, tmp_path):
    """Run processes on all GPUs, some at a time, and return what each printed."""
    devices = torch.cuda.device_count()
    with ThreadPoolExecutor(5) as pool:
        return list(pool.map(lambda at: tuple(ran(options, way, at, tmp_path, at % devices)), range(count)))


def test_cold_processes_agree(tmp_path):
    """Processes on each GPU time nothing and agree, forward and backward; without a lock they do not."""
    lock = {"lock": str(tmp_path / "k.lock")}
    ran({**TUNED, **lock}, "pin", 0, tmp_path)
    text = (tmp_path / "k.lock").read_text()
    assert re.search(r'\["kernels"\.', text)
    assert re.search(r'\["configurations"\.', text)
    pinned = {**TUNED, **lock, "reproducible": "pinned", "strict": True}
    results = set(ran_at_once(10, pinned, "pinned", tmp_path))
    assert len(results) == 1
    ((_, _, timed),) = results
    assert timed == 0
    plain = ran_at_once(4, TUNED, "plain", tmp_path)
    assert len({code for code, _, _ in plain} | {bits for _, bits, _ in plain}) > 2
    assert all(timed for _, _, timed in plain)


@torch.no_grad()
def test_an_unset_workspace_is_refused(tmp_path, monkeypatch):
    """Without cuBLAS's workspace nothing is pinned."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.pin(torch.sin, torch.ones(3, device="cuda"), lock=tmp_path / "k.lock", backend="tmpl-inductor")
    assert str(raised.value) == (
        "cuBLAS may compute otherwise in each run: set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process starts."
    )


@torch.no_grad()
def test_a_race_is_pinned(tmp_path, monkeypatch):
    """The decision of a race, CUDA graphs included, serves again without a race."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256)).cuda().eval()
    x = torch.randn(64, 256, device="cuda")
    serving = bk.pin(net, x, lock=tmp_path / "k.lock")
    compiled = torch.compile(net, backend=bk.make_backend(serving, strict=True))
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-3, atol=1e-3)
    (graph,) = bk.report(compiled).graphs
    assert f'"winner" = "{graph.race.winner}"' in (tmp_path / "k.lock").read_text()


def rows(x):
    return torch.softmax(x, -1)


@torch.no_grad()
def test_two_locks_in_one_process(tmp_path, monkeypatch):
    """Each lock is asked for its configurations, though the kernels' code is the same and is loaded already."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    x, one, two = torch.randn(512, 4096, device="cuda"), tmp_path / "one.lock", tmp_path / "two.lock"
    bk.pin(rows, x, lock=one, backend=bk.make_backend("tmpl-inductor", TUNED))
    assert '["configurations"' in one.read_text()
    two.write_text(one.read_text())
    asked, configuration = [], PinnedChooser.configuration

    def asking(self, *args):
        asked.append(self.pins.label)
        return configuration(self, *args)

    monkeypatch.setattr(PinnedChooser, "configuration", asking)
    for lock in (one, two):
        torch.compiler.reset()
        backend = bk.make_backend("tmpl-inductor", TUNED, reproducible="pinned", lock=str(lock), strict=True)
        torch.compile(rows, backend=backend)(x)
    assert {*asked} == {str(one), str(two)}
