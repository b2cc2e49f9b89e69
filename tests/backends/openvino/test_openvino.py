"""OpenVINO's own dynamo backend, forwarded unchanged."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.report.graphs import UNKNOWN
from tests import forks

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # OpenVINO's warning when its backend is imported.
    pytest.mark.filterwarnings("ignore:torch._dynamo.config.inline_inbuilt_nn_modules is deprecated:FutureWarning"),
]
here = pytest.mark.skipif(not find_spec("openvino"), reason="no OpenVINO")
EXACT = {"INFERENCE_PRECISION_HINT": "f32"}  # on a CPU with bfloat16 OpenVINO uses it


@pytest.fixture(autouse=True)
def _no_options_kept(monkeypatch):
    """OpenVINO keeps the options of the last graph of AOTAutograd's, and uses them for all graphs after it."""
    if find_spec("openvino"):
        name = "openvino.frontend.pytorch.torchdynamo.backend.openvino_options"
        monkeypatch.setattr(name, {})


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def report_of(fn, *args, **options):
    """Compile `fn`, check one call against eager, and return the report."""
    compiled = torch.compile(fn, backend=bk.make_backend("openvino", options))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), fn(*args), rtol=1e-4, atol=1e-4)
    return bk.report(compiled)


@here
@pytest.mark.parametrize("aot", [False, True], ids=["dynamo's graph", "AOTAutograd's graph"])
def test_compiled_by_openvino(model, aot):
    """Options reach OpenVINO's backend, and the report says that what ran the graph is not known."""
    reported = report_of(model, torch.randn(4, 8), config=EXACT, aot_autograd=aot)
    (graph,) = reported.graphs
    assert (graph.backend, graph.options) == ("openvino", {"config": EXACT, "aot_autograd": aot})
    assert reported.ran == UNKNOWN
    assert f"  {UNKNOWN.what}" in str(reported).splitlines()


@here
def test_what_falls_back_to_inductor_is_seen_by_its_code(model):
    """A graph that OpenVINO hands to Inductor is reported as run by Inductor."""
    reported = report_of(model, torch.randn(4, 8), disabled_ops=["no such operator"])
    assert reported.ran.what == "ran by Inductor, which this backend is built on or falls back to"


@here
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"template": "aten"}, "", id="any option"),
        pytest.param(
            {"mode": "default"}, "Backend 'openvino' has no option 'mode'; it takes anything in `options`.", id="mode"
        ),
    ],
)
def test_keyword_arguments_are_those_of_its_signature(options, message):
    """Only a mapping `options` is an argument of OpenVINO's backend, which checks nothing in it."""
    if not message:
        assert bk.make_backend("openvino", options).options == options
        return
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.make_backend("openvino", options)
    assert str(raised.value) == message


def test_absent():
    """If OpenVINO is not installed, the error comes at once and says what to install."""
    code = (
        "import sys; sys.modules['openvino'] = None\n"
        "from backend_kwargs import backend\n"
        "backend._dynamo_names = list\n"  # its entry point stays installed
        "backend.find_backend('openvino')"
    )
    ran = forks.run("-c", code)
    message = "Backend 'openvino' cannot work here: openvino is not importable; pip install \"openvino==2026.4.*\"."
    assert ran.stderr.splitlines()[-1].partition(": ")[2] == message


def test_the_one_of_torch_tensorrt_is_asked_for_by_its_own_name():
    """The name of release 0.1 says what to write now."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.make_backend("tensorrt", min_block_size=1)
    assert str(raised.value) == (
        "Backend 'tensorrt' was removed: write 'torch_tensorrt' for Torch-TensorRT's own backend."
    )
