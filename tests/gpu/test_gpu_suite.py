"""The suite on a GPU: a loop that keeps its results is timed like a user's, before and after device timing."""

import pytest
import torch
from torch import nn

from benchmarks.execution.worker import Job, time_group
from benchmarks.workloads.case import Case, Problem

PEERS = ("eager", "default", "reduce-overhead", "tmpl-inductor:cudagraphs")
RECORDED = PEERS[2:]


def build(device, dtype, scale):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))).to(device, dtype)
    return Problem(model, (torch.randn(64, 256, device=device, dtype=dtype),), None)


def build_sweep(device, dtype, scale):
    args = tuple(torch.randn(rows, 256, device=device, dtype=dtype) for rows in (16, 32, 64))
    return Problem(build(device, dtype, scale).fn, args, None, sweep=True)


@pytest.fixture
def timed(tmp_path):
    """Return a function that times a case on both clocks and returns its cells by peer."""
    import torch._dynamo.config

    folder, grad = torch._dynamo.config.debug_dir_root, torch.is_grad_enabled()

    def run(make, mode):
        case = Case("mlp", "test", make, modes=(mode,))
        job = Job(case, mode, torch.bfloat16, "cuda", "full", tmp_path / "cache", PEERS, "g", rounds=10)
        return {cell.peer: cell for cell in time_group(lambda step: None, job)}

    yield run
    torch._dynamo.config.debug_dir_root = folder
    torch.set_grad_enabled(grad)


@pytest.fixture
def recordings(monkeypatch):
    """Return a list that grows with each CUDA graph that torch records."""
    from torch._inductor.cudagraph_trees import CUDAGraphNode

    recorded, record = [], CUDAGraphNode._record

    def counted(node, *args, **kwargs):
        recorded.append(node.id)
        return record(node, *args, **kwargs)

    monkeypatch.setattr(CUDAGraphNode, "_record", counted)
    return recorded


@pytest.mark.parametrize(("mode", "graphs"), [("fwd", 1), ("fwd_bwd", 2), ("train", 2)])
def test_results_that_are_held_are_not_recorded_anew(timed, recordings, mode, graphs, evidence):
    """Each CUDA graph is recorded for only a few states of its pool, since nothing marks a step."""
    from torch._inductor.cudagraph_trees import MarkStepBox

    for _ in range(2):
        recordings.clear()
        cells = timed(build, mode)
        assert {cells[peer].status for peer in PEERS} == {"pass"}, [cell.reason for cell in cells.values()]
        evidence("suite", f"MLP 8 x 256, {mode}", recordings=len(recordings))
        assert len(recordings) <= 4 * graphs * len(RECORDED)
    assert MarkStepBox.mark_step_counter == 0


def test_a_sweep_is_checked_though_each_call_overwrites_the_last(timed):
    """With CUDA graphs the results of a sweep are copied after each call."""
    cells = timed(build_sweep, "fwd")
    assert {peer: (cells[peer].status, cells[peer].reason) for peer in PEERS} == dict.fromkeys(PEERS, ("pass", ""))
