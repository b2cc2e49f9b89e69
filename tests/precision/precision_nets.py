"""A network, a call and an error for the tests of lower precision."""

import copy

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.options.machine import installed_version

MARKS = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*cannot act fully here"),
]
torchao = pytest.mark.skipif(installed_version("torchao") is None, reason="torchao is not installed")


def _int8_saturates() -> bool:
    """Whether this CPU adds pairs of int8 products in 16 bits, as it does without VNNI, or kept from it."""
    most = torch.full((32, 32), 127, dtype=torch.int8)
    return int(torch._int_mm(most, most).max()) != 32 * 127**2


exact_int8 = pytest.mark.skipif(_int8_saturates(), reason="int8 products saturate on this CPU: it has no VNNI")
INT8 = [
    pytest.param("int8-dynamic", marks=[torchao, exact_int8]),
    pytest.param("int8-weight", marks=torchao),
]
CASTS = ["bf16", "fp16"]
BOUND = 0.05


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).eval()


def rows(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1))


def in_precision(model, precision: str, max_error: float = BOUND, spec: str = "tmpl-inductor", **options):
    backend = bk.make_backend(spec, precision=precision, max_error=max_error, **options)
    return torch.compile(model, backend=backend)


def error(result: torch.Tensor, model: nn.Module, *inputs: torch.Tensor) -> float:
    with torch.no_grad():
        precise = copy.deepcopy(model).double()(*(each.double() for each in inputs))
    return ((result.double() - precise).square().mean() / precise.square().mean()).sqrt().item()


def used(compiled):
    return bk.report(compiled).graphs[0].precision


def code(compiled) -> str:
    return "".join(each.source for graph in bk.report(compiled).graphs for each in graph.codes)


def refusals(warned) -> list[str]:
    """Return the warnings about graphs; a processor without bfloat16 has one of its own."""
    return [text for each in warned if (text := str(each.message)).startswith("A graph ")]
