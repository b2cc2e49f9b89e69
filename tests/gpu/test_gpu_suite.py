"""The suite on a GPU: a loop that holds its results is timed as it runs, before and after the device's clock."""

from statistics import median

import pytest
import torch
from torch import nn

from benchmarks.execution.worker import Job, time_group
from benchmarks.workloads.case import Case, Problem

PEERS = ("eager", "default", "reduce-overhead", "tmpl-inductor:cudagraphs")
LAUNCH_BOUND = PEERS[2:]
FIELDS = ("wall_s", "dropped_s")


def build(device, dtype, scale):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))).to(device, dtype)
    return Problem(model, (torch.randn(64, 256, device=device, dtype=dtype),), None)


def build_sweep(device, dtype, scale):
    args = tuple(torch.randn(rows, 256, device=device, dtype=dtype) for rows in (16, 32, 64))
    return Problem(build(device, dtype, scale).fn, args, None, sweep=True)


@pytest.fixture
def timed(tmp_path):
    """Return a function that times a case on both clocks and gives its cells by peer."""
    import torch._dynamo.config

    folder, grad = torch._dynamo.config.debug_dir_root, torch.is_grad_enabled()

    def run(make, mode):
        case = Case("mlp", "test", make, modes=(mode,))
        job = Job(case, mode, torch.bfloat16, "cuda", "full", tmp_path / "cache", PEERS, "g", rounds=10)
        return {cell.peer: cell for cell in time_group(lambda step: None, job)}

    yield run
    torch._dynamo.config.debug_dir_root = folder
    torch.set_grad_enabled(grad)


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd", "train"])
def test_results_that_are_held_are_not_recorded_anew(timed, mode, evidence):
    """A CUDA graph takes as long with its last result alive as without, the second time too: nothing marked a step."""
    from torch._inductor.cudagraph_trees import MarkStepBox

    for _ in range(2):
        cells = timed(build, mode)
        assert {cells[peer].status for peer in PEERS} == {"pass"}, [cell.reason for cell in cells.values()]
        held, dropped = ({peer: median(getattr(cells[peer], of)) for peer in PEERS} for of in FIELDS)
        evidence("suite", f"MLP 8 x 256, {mode}", held=held, dropped=dropped)
        for peer in LAUNCH_BOUND:
            assert held[peer] < 1.5 * dropped[peer]
        assert mode != "fwd" or max(held[peer] for peer in LAUNCH_BOUND) < held["eager"]
    assert MarkStepBox.mark_step_counter == 0


def test_a_sweep_is_checked_though_each_call_overwrites_the_last(timed):
    """Under CUDA graphs the results of a sweep are copied as they come."""
    cells = timed(build_sweep, "fwd")
    assert {peer: (cells[peer].status, cells[peer].reason) for peer in PEERS} == dict.fromkeys(PEERS, ("pass", ""))
