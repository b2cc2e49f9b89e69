"""`compare` on a GPU: every peer passes, with figures that can be true; frozen weights cost nothing."""

from functools import partial

import pytest
import torch
from effects import mlp, on_gpu
from torch import nn

from backend_kwargs import make_backend
from backend_kwargs.compare import Candidate, compare
from backend_kwargs.measure import interleave, ratio_interval

TEMPLATES = ("default", "cudagraphs", "max_autotune")


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_peers_of_an_mlp(mode, evidence):
    """Eager and three templates pass, CUDA graphs beat eager in launch-bound inference, and memory is counted."""
    candidates = [Candidate("eager"), *(Candidate(name, f"tmpl-inductor:{name}") for name in TEMPLATES)]
    compared = compare(mlp(), on_gpu(64, 256), candidates, mode=mode, rounds=10)
    rows = {row.label: row for row in compared.rows}
    assert {label: (row.status, row.reason) for label, row in rows.items()} == dict.fromkeys(rows, ("pass", ""))
    for row in rows.values():
        assert 1e-6 < row.latency.median < 1e-2
        assert 0 <= row.peak_bytes < 2**30
    assert mode == "training" or rows["cudagraphs"].speedup.low > 1
    assert [row.graphs for row in rows.values()] == [0, 1, 1, 1]
    evidence(
        "compare",
        f"MLP 4 x 256, {mode}",
        microseconds={label: row.latency.median * 1e6 for label, row in rows.items()},
        peak_bytes={label: row.peak_bytes for label, row in rows.items()},
    )


@torch.no_grad()
@pytest.mark.parametrize("below", ["default", "cudagraphs"])
def test_frozen_is_not_slower(below, evidence):
    """A frozen model of linear layers, whose weights would be costly to copy, is as fast as the unfrozen one."""
    net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).to("cuda", torch.bfloat16).eval()
    x = on_gpu(16, 2048)
    calls = {
        name: torch.compile(net, backend=make_backend(f"tmpl-inductor:{name}")) for name in (below, f"{below}+freezing")
    }
    samples = interleave({name: partial(call, x) for name, call in calls.items()}, rounds=30, device=x.device)
    ratio = ratio_interval(*samples.values())
    evidence(f"{below}+freezing", "4 linear layers of 2048, 16 rows", speedup_over_unfrozen=ratio)
    assert ratio.high > 0.95
