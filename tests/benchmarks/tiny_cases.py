"""Cases so small that a process of the suite finishes one at once, and peers that fail in it."""

import os
import signal
import time

import torch
from torch import nn

from benchmarks.execution import controls
from benchmarks.workloads.case import Case, Problem, Work


def double(x):
    return x * 2


def hang(x):
    time.sleep(600)


def crash(x):
    os.kill(os.getpid(), signal.SIGKILL)


def greedy(x):
    raise torch.OutOfMemoryError("no memory left")


def wrong(x):
    return x * 2.1


def scale_in_place(x):
    return x.mul_(3)


def several(x):
    return ((x * 2).relu() + 1).softmax(-1)  # too large for auto to skip its race


def forget_to_scale(x):
    return x * 3


def noisy(x, calls=[0]):  # noqa: B006 - it remembers on purpose
    calls[0] += 1
    return x * 10.0 ** calls[0]


def _args(device, dtype, wide=8):
    return (torch.randn(wide, wide, device=device, dtype=dtype),)


def build_double(device, dtype, scale):
    peers = {"add": lambda x: x + x, "wrong": wrong}
    return Problem(double, _args(device, dtype), Work(64, 512, "fp32"), peers)


def build_product(device, dtype, scale):
    return Problem(lambda x: x @ x.T, _args(device, dtype, 64), None)


def build_faulty(device, dtype, scale):
    return Problem(double, _args(device, dtype), None, {"hang": hang, "crash": crash, "greedy": greedy, "same": double})


def build_mutating(device, dtype, scale):
    peers = {"same": lambda x: x.mul_(3), "forgets": forget_to_scale}
    return Problem(scale_in_place, _args(device, dtype), None, peers)


def build_several(device, dtype, scale):
    return Problem(several, _args(device, dtype, 1024))


def build_noisy(device, dtype, scale):
    return Problem(noisy, _args(device, dtype))


def build_trained(device, dtype, scale):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).to(device, dtype)
    return Problem(model, _args(device, dtype), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1))


def build_held(device, dtype, scale):
    def steady(x):
        time.sleep(0.03)
        return x * 2

    planted = controls.slow_while_held(double, controls.spinning(0.24, device))
    return Problem(steady, _args(device, dtype), None, {"planted": planted})


def build_sweep(device, dtype, scale):
    args = tuple(torch.randn(rows, 4, device=device, dtype=dtype) for rows in (3, 5, 9))
    return Problem(double, args, sweep=True)


def tiny(name, build, **given):
    return Case(name, "tiny", build, dtype=torch.float32, suites=frozenset({"smoke"}), **given)


PRODUCT = tiny("product", build_product)
DOUBLE = tiny("double", build_double, modes=("fwd", "fwd_bwd"))
FAULTY = tiny("faulty", build_faulty)
SEVERAL = tiny("several", build_several)
MUTATING = tiny("mutating", build_mutating)
NOISY = tiny("noisy", build_noisy)
TRAINED = tiny("trained", build_trained, modes=("train",))
HELD = tiny("held", build_held)
SWEEP = tiny("sweep", build_sweep)
