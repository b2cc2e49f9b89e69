"""Small models, compiled with frozen weights."""

import re
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from backend_kwargs import make_backend

freezing_backend = make_backend("tmpl-inductor:freezing")


def compiled(fn: Any, **kwargs: Any) -> Any:
    return torch.compile(fn, backend=freezing_backend, **kwargs)


def graphs_compiled() -> int:
    return counters["stats"]["unique_graphs"]


def code_and_result(fn: Any, *args: Any) -> tuple[list[str], Any]:
    result, codes = run_and_get_code(compiled(fn), *args)
    return codes, result


def inputs_of(code: str) -> int:
    """Count the inputs that the generated code unpacks."""
    unpacking = re.search(r"^\s*((?:\w+, )*\w+),? = args$", code, re.MULTILINE)
    return unpacking.group(1).count(",") + 1 if unpacking else 0


def conv_net() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    net[1].running_mean.uniform_()
    net[1].running_var.uniform_(0.5, 2)
    return net


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
