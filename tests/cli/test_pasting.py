"""The last line of `compare`: wherever it is pasted, it compiles what was measured."""

from pathlib import Path

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.backends.tvm.settings import unfit
from backend_kwargs.cli.console import as_timed, lines_to_paste
from backend_kwargs.compare import Candidate, compare
from tests import forks

HERE = Path(__file__).parent


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


# ---- as it was timed


def convolution():
    """A factory as compare takes it: in train mode, which compare leaves."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    return net, torch.ones(2, 3, 16, 16)


def double():
    net, x = convolution()
    return net.double(), (x.double(),)


def function():
    return lambda *, x: (x.sin() + 1).relu(), {"x": torch.ones(64)}


@pytest.mark.parametrize(
    ("factory", "training", "device", "lines"),
    [
        pytest.param(
            convolution,
            False,
            None,
            [
                'model = model.eval().to("cpu", torch.float32)',
                "compiled = torch.compile(model)",
                "with torch.no_grad():",
                "    compiled(example_inputs)",
            ],
            id="inference",
        ),
        pytest.param(
            double,
            True,
            "cuda",
            [
                'model = model.train().to("cuda", torch.float64)',
                "compiled = torch.compile(model)",
                "compiled(*example_inputs)",
            ],
            id="training elsewhere",
        ),
        pytest.param(
            lambda: (torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).half()), torch.ones(2)),
            False,
            None,
            [
                'model = model.eval().to("cpu")',
                "compiled = torch.compile(model)",
                "with torch.no_grad():",
                "    compiled(example_inputs)",
            ],
            id="two dtypes",
        ),
        pytest.param(
            function,
            False,
            None,
            ["compiled = torch.compile(model)", "with torch.no_grad():", "    compiled(**example_inputs)"],
            id="a function with keywords",
        ),
    ],
)
def test_state_is_written_as_it_was_timed(factory, training, device, lines):
    """The lines set the mode, the device and the dtype, and turn gradients off, if compare had them so."""
    timed = as_timed(*factory(), training=training, device=device)
    written = lines_to_paste(bk.make_backend("eager"), *timed)
    assert [line.replace(', backend="eager"', "") for line in written] == lines


KINDS = [
    pytest.param("convolution", "inference", bk.make_backend("tmpl-inductor:freezing"), id="a template"),
    pytest.param("double", "inference", bk.make_backend("tmpl-inductor", {"cpp.simdlen": 1}), id="options, double"),
    pytest.param("double", "training", bk.make_backend("tmpl-inductor:aten"), id="training"),
    pytest.param("function", "inference", bk.make_backend("tmpl-inductor:cpp_wrapper"), id="a function"),
    pytest.param("function", "inference", bk.make_backend("tmpl-inductor:aten+freezing"), id="templates together"),
]


def forward_of(report):
    """Return the line of a report that names the kernels of the forward code."""
    return [line for line in report.splitlines() if line.startswith("  forward:")]


@pytest.mark.parametrize(("factory", "mode", "backend"), KINDS)
def test_pasted_lines_generate_what_was_timed(factory, mode, backend, fresh_dynamo, tmp_path):
    """In a fresh process the pasted lines generate the kernels that compare timed: frozen ones, say."""
    model, example_inputs = globals()[factory]()
    candidates = [Candidate("eager", None), Candidate("it", backend)]
    row = compare(model, example_inputs, candidates, mode=mode, rounds=1, cold=False).rows[1]
    timed = as_timed(model, example_inputs, training=mode == "training", device=None)
    lines = ["import torch", f"from {__name__} import {factory} as build", "model, example_inputs = build()"]
    lines += lines_to_paste(backend, *timed)
    lines += ["import backend_kwargs as bk", "print(bk.report(compiled))"]
    ran = forks.run("-c", "\n".join(lines), cwd=HERE.parents[1])
    assert ran.returncode == 0, ran.stderr
    assert forward_of(ran.stdout) == forward_of(row.report) != []
