"""`report` on a GPU: CUDA graphs and kernels."""

from typing import Any

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.report import Report


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).cuda()


def called(fn: Any, spec: str, *args: Any, times: int = 3, **kwargs: Any) -> Report:
    compiled = torch.compile(fn, backend=spec, **kwargs)
    for _ in range(times):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(*args)
    return bk.report(compiled)


def code(report: Report, direction: str = "forward") -> Any:
    return next(code for graph in report.graphs for code in graph.codes if code.direction == direction)


@torch.no_grad()
def test_a_recorded_graph_is_told():
    """The report of a model with CUDA graphs says that it was recorded once."""
    assert code(called(mlp(), "tmpl-inductor:cudagraphs", torch.randn(8, 256, device="cuda"))).cudagraphs == (
        "recorded once"
    )


@torch.no_grad()
def test_a_mutated_input_is_told():
    """An input changed in place is named as the reason for no CUDA graph, with advice."""
    report = called(lambda x: x.add_(1) * 2, "tmpl-inductor:cudagraphs", torch.randn(64, device="cuda"))
    assert code(report).cudagraphs.startswith("skipped: mutated inputs")
    assert any("mutated" in advice for advice in report.advice)


def test_training_records_forward_and_backward():
    """In training the report shows forward and backward separately."""
    model, x = mlp(), torch.randn(8, 256, device="cuda")
    compiled = torch.compile(model, backend="tmpl-inductor:cudagraphs")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x).sum().backward()
        model.zero_grad()
    report = bk.report(compiled)
    assert [code(report, way).cudagraphs for way in ("forward", "backward")] == ["recorded once", "recorded once"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        pytest.param("tmpl-inductor:triton", {"Triton"}, id="triton"),
        pytest.param("tmpl-inductor:aten", {"Triton", "extern"}, id="aten"),
        pytest.param("tmpl-inductor:cpp_wrapper", {"Triton", "extern"}, id="cpp_wrapper"),
    ],
)
def test_kernels_by_kind(spec, kinds):
    """The kernels of relu(mm) are counted by kind, with the Python wrapper and with the C++ one."""
    a, b = (torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    report = called(lambda a, b: torch.relu(a @ b), spec, a, b)
    assert set(code(report).kernels) == kinds, code(report).source


@torch.no_grad()
def test_a_graph_without_tensors_on_the_gpu():
    """A CPU graph with CUDA graphs requested is reported to have no tensors on a GPU."""
    report = called(lambda x: x * 2 + 1, "tmpl-inductor:cudagraphs", torch.randn(8))
    assert code(report).cudagraphs == "skipped: no tensor is on a GPU"


@torch.no_grad()
def test_recordings_of_each_shape():
    """With a dynamic shape a CUDA graph is recorded once per size."""
    compiled = torch.compile(lambda x: torch.relu(x) * 2, backend="tmpl-inductor:cudagraphs", dynamic=True)
    for size in (8, 8, 8, 16, 16, 16):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(torch.randn(size, 64, device="cuda"))
    report = bk.report(compiled)
    assert code(report).cudagraphs == "recorded twice", str(report)
