"""Cells as a run writes them, from a seeded generator with noise like that of wall time."""

import torch

from benchmarks.execution import records
from benchmarks.execution.records import AGAIN, Cell, Compile

ROUNDS = 30
MODES = ("default", "max-autotune")
ENVIRONMENT = {
    "record": "environment",
    "version": records.VERSION,
    "device_name": "NVIDIA H200",
    "torch": "2.11.0",
    "command": "python -m benchmarks run --suite full",
}


def figure(value, unit):
    return {"value": value, "low": value / 1.01, "high": value * 1.01, "unit": unit, "attempt": "test"}


CEILINGS = {
    "record": "ceilings",
    "device": "NVIDIA H200",
    "l2_bytes": 60 * 10**6,
    "figures": {
        **{name: figure(4e12, "B/s") for name in ("copy", "read", "write")},
        "bf16": figure(800e12, "FLOP/s"),
        "launch": figure(2e-6, "s"),
    },
}


def noisy(seconds, seed, noise=0.01, rounds=ROUNDS):
    """Return samples with a long tail to the right."""
    tail = torch.empty(rounds, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(seed))
    return (seconds * (1 + noise * tail)).tolist()


def cell(peer, seconds=1e-3, *, seed=None, case="gemm", status="pass", device=True, group="g", **kwargs):
    """Return a cell whose device time is `seconds` and whose wall time is 20 µs more."""
    seed = sum(map(ord, peer + case + group)) if seed is None else seed
    kinds = {"eager": "eager", AGAIN: "control", "+5 %": "control", "auto": "auto"}
    kind = "mode" if peer in MODES else kinds.get(peer, "template")
    passed = status == "pass"
    compiled = kind in ("mode", "template", "auto")
    about = {
        "case_version": 1,
        "mode": "fwd",
        "dtype": "bfloat16",
        "kind": kind,
        "numerics": "bf16",
        "work": {"flops": 400e9, "bytes": 1e9, "unit": "bf16"},
        "compile": Compile(cold_s=5.0, warm_s=1.0, peak_bytes=2**20, fresh=True) if compiled else Compile(),
    }
    return Cell(
        case=case,
        peer=peer,
        group_id=f"{group} {case}",
        status=status,
        wall_s=noisy(seconds + 2e-5, seed) if passed else [],
        device_s=noisy(seconds, seed + 1) if passed and device else [],
        **about | kwargs,
    )


def write(path, cells, **environment):
    """Write cells as `run` does, and return the path."""
    groups = sorted({each.group_id for each in cells})
    lines = [ENVIRONMENT | environment, CEILINGS, *map(records.line_of, cells), records.group_line("key", groups)]
    records.append(path, lines)
    return path
