"""The last line of `compare`: wherever it is pasted, it compiles what was measured."""

from pathlib import Path

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.backends.tvm.versions import unfit
from backend_kwargs.cli.pasting import lines_to_paste
from tests import forks


def ort(gm, example_inputs, *, level: int = 1, tune=None):
    return gm.forward


def here(*lines):
    return ["import backend_kwargs as bk", "", *lines]


BACKENDS = [
    pytest.param("inductor", {}, ['torch.compile(model, backend="inductor")'], id="torch's own"),
    pytest.param("eager", {}, ['torch.compile(model, backend="eager")'], id="another of torch's"),
    pytest.param("tmpl-inductor:aten", {}, ['torch.compile(model, backend="tmpl-inductor:aten")'], id="a template"),
    pytest.param(
        "tmpl-inductor:aten+fast_compile",
        {},
        here("torch.compile(model, backend=bk.make_backend('tmpl-inductor:aten+fast_compile'))"),
        id="templates together",
    ),
    pytest.param(
        "tmpl-inductor",
        {"epilogue_fusion": False},
        here("torch.compile(model, backend=bk.make_backend('tmpl-inductor', {'epilogue_fusion': False}))"),
        id="options",
    ),
    pytest.param(
        "tvm",
        {},
        here("torch.compile(model, backend=bk.make_backend('tvm'))"),
        id="a name that torch has for another",
        marks=pytest.mark.skipif(bool(unfit()), reason=f"no TVM: {unfit()}"),
    ),
    pytest.param(
        f"{__name__}:ort",
        {"level": 2},
        here(f"torch.compile(model, backend=bk.make_backend('{__name__}:ort', {{'level': 2}}))"),
        id="a function",
    ),
]


@pytest.mark.parametrize(("spec", "options", "lines"), BACKENDS)
def test_line_compiles_what_was_measured(spec, options, lines, fresh_dynamo):
    """The printed line runs, and passes dynamo the backend that was measured."""
    backend = bk.make_backend(spec, options)
    assert lines_to_paste(backend) == lines
    scope = {"torch": torch, "model": lambda x: x.sin() + 1}
    exec("\n".join(lines[:-1]), scope)
    compiled = eval(lines[-1], scope)
    assert compiled(torch.zeros(2)).tolist() == [1, 1]
    if "make_backend" in lines[-1] or spec.startswith("tmpl"):
        (graph,) = bk.report(compiled).graphs
        assert (graph.backend, graph.options) == (backend.spec, backend.options)


def test_lines_work_in_a_new_process():
    """torch accepts each line in a process that has imported only torch."""
    lines = [line for each in BACKENDS if not each.marks or not unfit() for line in each.values[2]]
    code = "\n".join(["import torch", "model = torch.nn.ReLU()", *lines])
    ran = forks.run("-c", code, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(bk.make_backend(lambda gm, inputs: gm.forward), id="a function inside another"),
        pytest.param(bk.make_backend(ort, tune=ort), id="an option whose repr is no code"),
    ],
)
def test_what_no_text_stands_for_has_no_line(backend):
    """No line is printed if it would fail."""
    assert lines_to_paste(backend) == []
