"""OpenVINO: checked options, and reports of each graph that falls back."""

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.backends.openvino import torchs as openvino
from backend_kwargs.errors import BackendKwargsWarning
from backend_kwargs.report import OpenVINO

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
here = pytest.mark.skipif(not find_spec("openvino"), reason="no OpenVINO")
EXACT = {"INFERENCE_PRECISION_HINT": "f32"}  # on a CPU with bfloat16 OpenVINO uses it
BROKEN = {"NO_SUCH_PROPERTY": "1"}  # the device refuses it when it is given the model, at the first call
SETTER = "logging.getLogger('openvino.frontend.pytorch.torchdynamo.backend').setLevel(logging.DEBUG)"
NOT_RUN = (
    f"OpenVINO failed to run a partition of a graph, which runs in eager from now on; {SETTER} makes OpenVINO log why."
)
NOT_COMPILED = f"OpenVINO failed to compile a graph, which Inductor compiled instead; {SETTER} makes OpenVINO log why."


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def report_of(fn, *args, spec="openvino", **options):
    """Compile `fn`, check one call against eager, and return the report."""
    compiled = torch.compile(fn, backend=bk.make_backend(spec, {"config": EXACT, **options}))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), fn(*args), rtol=1e-4, atol=1e-4)
    return bk.report(compiled)


def ours(warned):
    return [str(each.message) for each in warned if each.category is BackendKwargsWarning]


@here
@pytest.mark.parametrize("aot", [False, True], ids=["dynamo's graph", "AOTAutograd's graph"])
def test_compiled_by_openvino(model, aot):
    """A graph that OpenVINO compiles as a whole is one partition, and passes."""
    reported = report_of(model, torch.randn(4, 8), aot_autograd=aot)
    (graph,) = reported.graphs
    assert (graph.openvino.partitions, graph.openvino.failed, graph.openvino.in_eager) == (1, 0, ())
    assert reported.ran is None
    assert "  1 partition of OpenVINO" in str(reported).splitlines()


@here
@pytest.mark.parametrize("aot", [False, True], ids=["dynamo's graph", "AOTAutograd's graph"])
@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: (x @ x.mT).relu() + 1, id="a result"),
        pytest.param(lambda x: ((x @ x.mT).relu(), x.sin() + 1), id="two results"),
        pytest.param(lambda x: ((x @ x.mT).relu() + 1).as_strided((2, 2), (2, 1)), id="a view of a result"),
    ],
)
def test_results_stay_as_they_are(fn, aot):
    """A call leaves the results of earlier calls alone, also where eager views them."""
    compiled = torch.compile(fn, backend=bk.make_backend("openvino", config=EXACT, aot_autograd=aot))
    given = [torch.randn(4, 4) for _ in range(3)]
    with torch.no_grad():
        kept = [compiled(x) for x in given]
    for result, x in zip(kept, given, strict=True):
        torch.testing.assert_close(result, fn(x), rtol=1e-4, atol=1e-4)
    assert bk.report(compiled).graphs[0].openvino.partitions


@here
def test_gradients_of_two_calls():
    """A second call leaves alone what the first keeps for its backward pass."""

    def fn(x):
        return (x * 2 + 1).relu().sum()

    compiled = torch.compile(fn, backend=bk.make_backend("openvino", aot_autograd=True, config=EXACT))
    x, y = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    first, _ = compiled(x), compiled(y)
    torch.testing.assert_close(torch.autograd.grad(first, x), torch.autograd.grad(fn(x), x))


@here
def test_a_convolution_leaves_no_guards_without_a_source():
    """OpenVINO's own backend fails there: it traces with symbols of its own in dynamo's shape environment."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), torch.randn(4, 1, 8, 8)
    reported = report_of(model, x)
    assert (reported.graphs[0].openvino.partitions, reported.ran) == (1, None)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(AssertionError, match="sources must not be empty for symbol"):
        torch.compile(model, backend="openvino")(x)


@here
@pytest.mark.parametrize("aot", [False, True], ids=["dynamo's graph", "AOTAutograd's graph"])
def test_failed_execution_is_told(model, aot):
    """If OpenVINO fails to run a partition, that call warns, and the report says that eager runs it."""
    with pytest.warns(BackendKwargsWarning) as warned:
        reported = report_of(model, torch.randn(4, 8), aot_autograd=aot, config=BROKEN)
    assert ours(warned) == [NOT_RUN]
    assert (reported.ran.status, reported.ran.what) == (
        "fell_back",
        "ran in eager: OpenVINO failed to run 1 of 1 partition",
    )
    assert f"  {reported.ran.what}" in str(reported).splitlines()


@here
def test_failed_compile_is_told(model):
    """If OpenVINO fails to compile a graph, it warns, and the report says that Inductor compiled it."""
    with pytest.warns(BackendKwargsWarning) as warned:
        reported = report_of(model, torch.randn(4, 8), disabled_ops=["no such operator"])
    assert ours(warned) == [NOT_COMPILED]
    assert (reported.ran.status, reported.ran.what) == ("fell_back", "ran by Inductor: OpenVINO failed to compile it")
    assert reported.graphs[0].codes


@here
def test_graph_of_one_operator_runs_in_eager():
    """OpenVINO leaves a single operator to eager, so the row does not pass."""
    reported = report_of(torch.sin, torch.randn(4))
    assert (reported.ran.status, reported.ran.what) == ("fell_back", "ran in eager: no partition of OpenVINO")
    assert "  0 partitions of OpenVINO; in eager: aten.sin.default" in str(reported).splitlines()


@here
@pytest.mark.parametrize("op", [torch.ops.aten.relu.default, "torch.ops.aten.relu.default"], ids=["operator", "text"])
def test_disabled_operator_runs_in_eager(model, op):
    """An operator that is disabled, by its torch name or OpenVINO's, is reported to run in eager."""
    (graph,) = report_of(model, torch.randn(4, 8), disabled_ops=[op]).graphs
    assert graph.openvino.in_eager == ("aten.relu.default",)


@here
def test_trains(model):
    """With aot_autograd OpenVINO also compiles the backward graph, and gradients equal eager's."""
    backend = bk.make_backend("openvino", aot_autograd=True, config=EXACT)
    x = torch.randn(4, 8, requires_grad=True)
    compiled = torch.compile(lambda x: (x * 2 + 1).relu().sum(), backend=backend)
    (got,) = torch.autograd.grad(compiled(x), x)
    (wanted,) = torch.autograd.grad((x * 2 + 1).relu().sum(), x)
    torch.testing.assert_close(got, wanted)
    assert bk.report(compiled).graphs[0].openvino.partitions == 2


@here
def test_found_by_name(model):
    """dynamo finds tmpl-openvino by name, and passes on torch.compile's options."""
    compiled = torch.compile(model, backend="tmpl-openvino", options={"config": EXACT})
    with torch.no_grad():
        compiled(torch.randn(4, 8))
    assert bk.report(compiled).graphs[0].options == {"config": EXACT}


@here
def test_model_from_a_file(tmp_path):
    """A model that an earlier compile saved runs entirely on OpenVINO."""
    for _ in range(2):
        torch._dynamo.reset()
        reported = report_of(lambda x: x.sin() * 2, torch.randn(4), model_caching=True, cache_dir=str(tmp_path))
    assert reported.graphs[0].openvino == OpenVINO(partitions=1, failed=0, by_inductor=0, in_eager=())
    assert reported.ran is None


@here
def test_options_end_with_their_backend(model):
    """With aot_autograd OpenVINO keeps options for the whole process, but no other backend of ours gets them."""
    module = openvino._backend()
    theirs = bk.make_backend("dynamo:openvino", aot_autograd=True, config=BROKEN)
    try:
        torch.compile(lambda x: x.sin() + 1, backend=theirs)(torch.randn(3))
        assert report_of(model, torch.randn(4, 8)).ran is None
        assert module.openvino_options == {"aot_autograd": True, "config": BROKEN}
    finally:
        module.openvino_options = {}
    assert report_of(lambda x: x.sin() * 2, torch.randn(3), aot_autograd=True).ran is None
    assert module.openvino_options == {}


@here
def test_dynamo_config_is_left_alone():
    """Loading OpenVINO's backend does not change dynamo's config, and does not warn."""
    code = (
        "import torch, torch._dynamo as dynamo, backend_kwargs as bk\n"
        "x, before = torch.randn(3), dynamo.config.get_config_copy()\n"
        "print(torch.compile(lambda x: x.sin() + 1, backend=bk.make_backend('openvino'))(x).shape)\n"
        "assert dynamo.config.get_config_copy() == before"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@here
def test_schema_has_what_openvino_reads():
    """Every option that OpenVINO reads is declared, except one for its own tests."""
    from openvino.frontend.pytorch.torchdynamo import backend_utils

    read = set(re.findall(r'"(\w+)" in options', inspect.getsource(backend_utils)))
    assert read == {*openvino.OPTIONS, "testing"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"devic": "CPU"}, "Unknown OpenVINO option 'devic'. Did you mean 'device'?", id="near"),
        pytest.param(
            {"qqq": 1},
            "Unknown OpenVINO option 'qqq'. `backend-kwargs options --backend openvino` shows all.",
            id="unknown",
        ),
        pytest.param({"device": 1}, "OpenVINO option 'device' must be str, got 1 (int).", id="type"),
        pytest.param(
            {"disabled_ops": "aten.sin"},
            "OpenVINO option 'disabled_ops' must be list[str | callable], got 'aten.sin' (str).",
            id="list",
        ),
        pytest.param({"template": "aten"}, "Backend 'openvino' has no templates, got 'aten'.", id="template"),
        pytest.param(
            {"device": "GPU.9"},
            "Backend 'openvino' cannot work here: OpenVINO finds no device 'GPU.9', only 'CPU'; "
            "name one of them as 'device'.",
            id="device",
            marks=here,
        ),
    ],
)
def test_refuses(options, message):
    """A wrong option, value or device raises at once."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.make_backend("openvino", options)
    assert " ".join(map(str, raised.value.args)) == message


def test_absent():
    """If OpenVINO is not installed, the error comes at once and says what to install."""
    code = "import sys; sys.modules['openvino'] = None; import backend_kwargs as bk; bk.make_backend('tmpl-openvino')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    message = (
        "Backend 'tmpl-openvino' cannot work here: openvino is not importable; "
        'pip install "backend-kwargs[openvino]".'
    )
    assert ran.stderr.splitlines()[-1].partition(": ")[2] == message


def test_explain_tells_an_idle_cache_dir():
    """`explain` says that cache_dir has no effect without model_caching."""
    status = {effect.option: effect.status for effect in bk.explain("openvino", cache_dir="x").effects}
    assert status == {"cache_dir": "inert because it is read only under model_caching=True"}
