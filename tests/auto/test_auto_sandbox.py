"""A race leaves inputs and the state of the process unchanged."""

import contextlib
import os

import pytest
import torch
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from backend_kwargs.auto.sandbox import LIBDEVICE, own_libdevice, sandboxed
from backend_kwargs.graphs import replay as workload
from backend_kwargs.graphs.replay import Inputs, Task

SQUARE = torch.arange(1.0, 17.0).reshape(4, 4)
LAYOUTS = {
    "rows": SQUARE,
    "column": SQUARE[:, 0],
    "narrow column": SQUARE[:, :1],
    "every other": torch.arange(1.0, 11.0)[::2],
    "integers": torch.arange(1, 17).reshape(4, 4)[:, 0],
    "diagonal": SQUARE.diagonal(),
    "number": torch.tensor(2.0),
    "empty": torch.empty(0, 3),
    "nan": torch.full((3,), torch.nan),
    "bool": torch.ones(3, dtype=torch.bool),
    "bfloat16": SQUARE.bfloat16()[:, 1],
    "float8": SQUARE.to(torch.float8_e4m3fn),
    "complex": torch.complex(SQUARE, SQUARE)[:, 0],
    "conjugate": torch.complex(SQUARE, SQUARE).conj(),
    "real part": torch.complex(SQUARE, SQUARE).real,
    "imaginary part": torch.complex(SQUARE, SQUARE).conj().imag,
}


def seen(fn, x):
    """Return which inputs are found to be written although dynamo's fakes count no write."""
    gm = torch.fx.symbolic_trace(fn)
    (placeholder,) = gm.graph.find_nodes(op="placeholder")
    placeholder.meta["example_value"] = torch.empty_like(x, device="meta")
    return Inputs.of(gm, [x]).written


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_read_is_not_copied(layout):
    """An input that a graph only reads does not count as written, whatever its dtype and layout."""
    assert seen(lambda x: (x.clone(),), LAYOUTS[layout]) == frozenset()


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "empty"])
def test_what_is_written_is_seen(layout):
    """A write that the fakes do not count is found by comparing values, and the input itself stays unchanged."""
    x = LAYOUTS[layout]
    assert seen(lambda x: (x.zero_(),), x) == {0}
    assert x.to(torch.complex64).abs().sum() != 0


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda base: torch.view_as_complex(base.view(-1, 2)), id="complex"),
        pytest.param(lambda base: torch.view_as_real(torch.view_as_complex(base.view(-1, 2))), id="real"),
    ],
)
def test_a_view_of_another_dtype_becomes_one_of_the_copy(view):
    """Copies of inputs that share memory with different dtypes share memory too."""
    base = torch.arange(1.0, 9.0)
    copies = {}
    made, whole = workload._copied_with_views(view(base), copies), workload._copied_with_views(base, copies)
    assert (made.dtype, made.shape) == (view(base).dtype, view(base).shape)
    assert made.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert torch.equal(made, view(base))


def test_cotangents_are_drawn_once(monkeypatch):
    """Timed calls reuse the first call's cotangents, since drawing them waits for the device."""
    draw, drawn = workload.cotangents, []
    monkeypatch.setattr(workload, "cotangents", lambda ends: drawn.extend(ends) or draw(ends))
    x = torch.randn(4, 8, requires_grad=True)
    task = Task(torch.fx.symbolic_trace(torch.nn.Tanh()), Inputs([x], frozenset()), training=True)
    call = task.caller(lambda x: (x.tanh(), x.exp()))
    first, second = call()["gradient"][0], call()["gradient"][0]
    assert len(drawn) == 2
    assert torch.equal(first, second)


def test_what_is_observed_is_a_copy():
    """Results that a later call overwrites stay as they were; what is no tensor is returned as it is."""
    x, buffer = torch.randn(4, 8), torch.zeros(4, 8)
    task = Task(torch.fx.symbolic_trace(torch.nn.Tanh()), Inputs([x], frozenset()), training=False)
    seen = task.observe(lambda x: (buffer.copy_(x.tanh()), 3))["output"]
    buffer.zero_()
    assert torch.equal(seen[0], x.tanh())
    assert seen[1] == 3


def test_the_libdevice_is_put_back(monkeypatch):
    """A candidate's libdevice settings are removed after it, also in Triton's knobs."""
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.delenv(LIBDEVICE, raising=False)
    with own_libdevice():
        os.environ[LIBDEVICE] = knobs.nvidia.libdevice_path = "planted.bc"
    assert (LIBDEVICE in os.environ, knobs.nvidia.libdevice_path) == (False, None)


def test_a_libdevice_of_the_users_stays(monkeypatch):
    """A libdevice path that the user set is kept."""
    monkeypatch.setenv(LIBDEVICE, "mine.bc")
    with own_libdevice():
        pass
    assert os.environ[LIBDEVICE] == "mine.bc"


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt], ids=str)
def test_a_size_that_a_candidate_fixed_is_a_symbol_again(error):
    """After a candidate specialised a size, also one that failed, the size has no value and no guard."""
    fakes = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    (size,) = fakes.from_tensor(torch.zeros(5), symbolic_context=dynamic).shape
    next_size = size.node.expr + 1
    suppressed = contextlib.suppress(RuntimeError, KeyboardInterrupt)
    with tracing(TracingContext(fakes)), suppressed, sandboxed(torch.fx.symbolic_trace(torch.nn.Identity())):
        assert size == 5
        assert fakes.shape_env.simplify(next_size) == 6
        if error:
            raise error
    assert fakes.shape_env.simplify(next_size) == next_size
    assert fakes.shape_env.guards == []
