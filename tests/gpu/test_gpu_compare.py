"""`compare` on a GPU: every peer passes with plausible figures."""

import pytest

from backend_kwargs.compare import Candidate, compare
from tests.gpu.effects import mlp, on_gpu

TEMPLATES = ("default", "cudagraphs", "max_autotune")


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_peers_of_an_mlp(mode, evidence):
    """Eager and three templates pass and are timed, and memory is measured."""
    candidates = [Candidate("eager"), *(Candidate(name, f"tmpl-inductor:{name}") for name in TEMPLATES)]
    compared = compare(mlp(), on_gpu(64, 256), candidates, mode=mode, rounds=10)
    rows = {row.label: row for row in compared.rows}
    assert {label: (row.status, row.reason) for label, row in rows.items()} == dict.fromkeys(rows, ("pass", ""))
    for row in rows.values():
        assert 1e-6 < row.latency.median < 1e-2
        assert 0 <= (row.peak_bytes or 0) < 2**30
    assert [row.graphs for row in rows.values()] == [0, 1, 1, 1]
    evidence(
        "compare",
        f"MLP 4 x 256, {mode}",
        microseconds={label: row.latency.median * 1e6 for label, row in rows.items()},
        peak_bytes={label: row.peak_bytes for label, row in rows.items()},
    )
