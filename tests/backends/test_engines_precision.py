"""OpenVINO in a lower precision: within a bound that is measured, alone, in a race and in a comparison."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import backend_kwargs as bk
from backend_kwargs.auto import process_memory, race
from backend_kwargs.auto.candidates import allowed_candidates, trusted
from backend_kwargs.auto.decisions_toml import read_decisions, write_decisions
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.backends.openvino import compiler as openvino_native
from backend_kwargs.errors import BackendKwargsError, BackendKwargsWarning
from backend_kwargs.harness.trial import Counted
from backend_kwargs.options.templates import find_template

pytest.importorskip("openvino")
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*cannot act fully here"),
]
bf16_here = pytest.mark.skipif(
    bool(openvino_native.why_not_in("bf16")), reason="OpenVINO has no bf16 kernels for this CPU"
)
f16_ignored = pytest.mark.skipif(
    "ONEDNN_MAX_CPU_ISA" in os.environ or not openvino_native.why_not_in("f16"),
    reason="OpenVINO has float16 kernels for this CPU, or looks for those that oneDNN may not use",
)
BF16 = {"precision": ("bf16",), "max_error": 0.01}
NAME = "openvino-native[precision=bf16,max_error=0.01]"
X = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).eval()


def cancelling() -> nn.Module:
    """Return a network of the same graph that subtracts large values from each other."""
    model = net()
    with torch.no_grad():
        model[0].bias.add_(100)
        model[2].weight.sub_(model[2].weight.mean(1, keepdim=True))
    return model


def error(result: torch.Tensor, model: nn.Module, x: torch.Tensor) -> float:
    precise = copy.deepcopy(model).double()(x.double())
    return ((result.double() - precise).square().mean() / precise.square().mean()).sqrt().item()


@pytest.fixture
def wins(monkeypatch, tmp_path):
    """Let the last candidate that passes win, and return the options of a race with a store of its own."""
    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: True)
    monkeypatch.setattr(race, "is_slower", lambda best, eager: False)
    process_memory.forget_process()
    yield {"freezing": True, "budget_s": 300.0, "store": str(tmp_path / "decisions")}
    process_memory.forget_process()


@bf16_here
@pytest.mark.parametrize("precision", ["bf16", ("bf16",), ["bf16"]], ids=["text", "tuple", "list"])
@torch.no_grad()
def test_within_the_bound(precision):
    """OpenVINO computes in bf16, and the report has the error that was measured."""
    model = net()
    compiled = torch.compile(model, backend=bk.make_backend("openvino-native", precision=precision, max_error=0.01))
    result = compiled(X)
    assert 1e-3 < error(result, model, X) < 0.01
    used = bk.report(compiled).graphs[0].precision
    assert used.error == pytest.approx(error(result, model, X), rel=0.01)
    assert str(used) == f"precision bf16: error {used.error:.2g}, max_error=0.01"


@bf16_here
@torch.no_grad()
def test_beyond_the_bound_it_computes_in_float32():
    """If the error exceeds the bound, the graph is compiled in float32, with a warning."""
    model = net()
    compiled = torch.compile(model, backend=bk.make_backend("openvino-native", precision="bf16", max_error=1e-5))
    with pytest.warns(BackendKwargsWarning, match=r"^A graph is compiled without precision 'bf16': output\[0\]: error"):
        result = compiled(X)
    assert error(result, model, X) < 1e-6
    graph = bk.report(compiled).graphs[0]
    assert graph.precision.reason.endswith("above max_error=1e-05")
    assert len(graph.engine.partitions) == 1


@bf16_here
@torch.no_grad()
def test_another_module_is_measured_anew():
    """Weights are constants, so another module is compiled again and its own error is measured."""
    compiled = torch.compile(net(), backend=bk.make_backend("openvino-native", BF16))
    compiled(X)
    worse = cancelling()
    compiled = torch.compile(worse, backend=bk.make_backend("openvino-native", BF16))
    with pytest.warns(BackendKwargsWarning, match="A graph is compiled without precision 'bf16'"):
        assert error(compiled(X), worse, X) < 1e-4


@bf16_here
@torch.no_grad()
def test_sizes_stay_symbols():
    """A graph of symbolic sizes is measured at the sizes of its first call."""
    model = net()
    compiled = torch.compile(model, backend=bk.make_backend("openvino-native", BF16), dynamic=True)
    for rows in (120, 7, 5):
        assert error(compiled(X[:rows]), model, X[:rows]) < 0.01
    assert len(bk.report(compiled).graphs) == 1


def test_with_gradients_it_is_eager(monkeypatch):
    """A graph that records gradients runs in eager, and the report says that no precision is used."""
    without(monkeypatch, "FP16")
    compiled = torch.compile(net(), backend=bk.make_backend("openvino-native", BF16))
    with pytest.warns(BackendKwargsWarning, match="compiles for inference only"):
        compiled(X).sum().backward()
    assert bk.report(compiled).graphs[0].precision.reason.startswith("all of it runs in eager")


@torch.no_grad()
def test_a_graph_without_a_reference_computes_in_float32(monkeypatch):
    """A graph that draws random numbers has no error that can be measured."""
    without(monkeypatch, "FP16")

    def fn(x):
        return torch.relu(torch.relu(x * 2 + 1) + torch.rand_like(x)) * 3

    compiled = torch.compile(fn, backend=bk.make_backend("openvino-native", BF16, min_block_size=1))
    with pytest.warns(BackendKwargsWarning, match="its error cannot be measured: it draws random numbers"):
        compiled(X)


def without(monkeypatch, kind):
    """Let OpenVINO lack kernels in `kind`."""
    monkeypatch.setattr(openvino_native, "_of_cpu", lambda _: {"FP32", "BF16", "FP16"} - {kind})


@torch.no_grad()
def test_what_was_measured_serves(monkeypatch):
    """On any processor, with float32 under another name: its error is in the report, and it is not compiled again."""
    without(monkeypatch, "FP16")
    monkeypatch.setattr(openvino_native, "HINTS", {"bf16": "f32"})
    model = net()
    compiled = torch.compile(model, backend=bk.make_backend("openvino-native", BF16))
    assert error(compiled(X), model, X) < 1e-6
    graph = bk.report(compiled).graphs[0]
    assert (graph.precision.reason, graph.precision.max_error, len(graph.engine.partitions)) == ("", 0.01, 1)
    assert graph.precision.error < 1e-6


WRONG = {
    "no bound": (
        {"precision": "bf16"},
        (
            "Option 'precision' needs 'max_error', the largest relative error of an output that you accept: for "
            "example, pass max_error=1e-2."
        ),
    ),
    "unknown": ({"precision": "bf17", "max_error": 0.1}, "Unknown precision 'bf17'. Did you mean 'bf16'?"),
    "not OpenVINO's": (
        {"precision": "int8-weight", "max_error": 0.1},
        "OpenVINO option 'precision' must be tuple['bf16' | 'fp16', ...], got ('int8-weight',) (tuple).",
    ),
    "two": (
        {"precision": "bf16,fp16", "max_error": 0.1},
        (
            "Option 'precision' names 2 (bf16, fp16), but 'openvino-native' computes in one: name one, or "
            "race it under tmpl-inductor:auto."
        ),
    ),
    "both": (
        {"precision": "bf16", "max_error": 0.1, "inference_precision": "bf16"},
        "Options 'inference_precision' and 'precision' cannot be combined: the second one has a bound; leave one out.",
    ),
    "not here": (
        {"precision": "fp16", "max_error": 0.1},
        (
            "Precision 'fp16' of 'openvino-native' cannot work here: OpenVINO has no FP16 kernels for this CPU, only "
            "BF16, FP32; leave it out."
        ),
    ),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_precision_raises_at_once(options, message, monkeypatch):
    """Wrong and missing options raise before there is a graph."""
    without(monkeypatch, "FP16")
    with pytest.raises(BackendKwargsError) as raised:
        bk.make_backend("openvino-native", options)
    assert str(raised.value) == message


@f16_ignored
@torch.no_grad()
def test_a_hint_that_openvino_ignores_is_reported():
    """Where OpenVINO computes in another precision than its hint says, the report says so."""
    compiled = torch.compile(net(), backend=bk.make_backend("openvino-native", inference_precision="f16"))
    with pytest.warns(BackendKwargsWarning, match="inference_precision='f16' cannot act fully here"):
        compiled(X)
    (graph,) = bk.report(compiled).graphs
    assert graph.engine.notes[0].startswith("OpenVINO computes in ")
    assert graph.engine.notes[0] in str(bk.report(compiled))


def test_a_limit_of_onednn_is_openvinos():
    """Its kernels are oneDNN's: a precision that these may not compute in is none of OpenVINO's."""
    code = "from backend_kwargs.backends.openvino import compiler; print(compiler.why_not_in('bf16'))"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "avx2"}
    said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert said.startswith("OpenVINO has no BF16 kernels for this CPU, only FP32")


@f16_ignored
@torch.no_grad()
def test_an_ignored_hint_is_not_a_precision(monkeypatch):
    """A precision that OpenVINO replaces by another one is not used, whatever its error."""
    monkeypatch.setattr(openvino_native, "_of_cpu", lambda _: {"FP32", "BF16", "FP16"})
    model = net()
    compiled = torch.compile(model, backend=bk.make_backend("openvino-native", precision="fp16", max_error=0.1))
    with pytest.warns(BackendKwargsWarning, match=r"without precision 'fp16': OpenVINO computes in .*, not in f16\.$"):
        assert error(compiled(X), model, X) < 1e-6


@f16_ignored
@torch.no_grad()
def test_where_the_caller_measures_an_ignored_hint_is_refused(monkeypatch):
    """A race or a comparison would time float32 under the name of the precision."""
    monkeypatch.setattr(openvino_native, "_of_cpu", lambda _: {"FP32", "BF16", "FP16"})
    backend = bk.make_backend("openvino-native", precision="fp16", max_error=0.1)
    compiled = torch.compile(net(), backend=Counted(backend, error_is_measured=True))
    refused = r"Precision 'fp16' is refused: OpenVINO computes in .*, not in f16\."
    with pytest.raises(BackendCompilerFailed, match=refused):
        compiled(X)


@bf16_here
@torch.no_grad()
def test_in_a_race_it_is_held_to_the_bound(wins):
    """Under auto, consent to bf16 races OpenVINO in bf16 too, and its row, decision and report have the error."""
    model = net()
    backend = bk.make_backend("tmpl-inductor:auto", candidates=["openvino-native"], **BF16, **wins)
    compiled = torch.compile(model, backend=backend)
    result = compiled(X)
    (graph,) = bk.report(compiled).graphs
    rows = {row.name: row for row in graph.race.rows}
    row = rows[NAME]
    assert [*rows][-3:] == ["openvino-native", "bf16", NAME]
    assert (row.compiler, row.won, row.max_error) == ("openvino-native", True, 0.01)
    assert row.error == pytest.approx(error(result, model, X), rel=0.1)
    assert (graph.precision.error, graph.precision.max_error) == (row.error, 0.01)
    assert rows["openvino-native"].error is None


@bf16_here
@torch.no_grad()
def test_beyond_the_bound_it_never_wins(wins):
    """A candidate beyond the bound is timed and dropped."""
    backend = bk.make_backend(
        "tmpl-inductor:auto", candidates=["openvino-native"], precision="bf16", max_error=1e-5, **wins
    )
    model = net()
    compiled = torch.compile(model, backend=backend)
    assert error(compiled(X), model, X) < 1e-5
    row = bk.report(compiled).graphs[0].race.rows[-1]
    assert (row.name, row.status, row.won) == (
        "openvino-native[precision=bf16,max_error=1e-05]",
        "fail_accuracy",
        False,
    )
    assert row.seconds > 0


@torch.no_grad()
def test_a_race_says_what_openvino_lacks(wins, monkeypatch):
    """Without kernels in the precision its row is skipped with the reason."""
    without(monkeypatch, "BF16")
    backend = bk.make_backend("tmpl-inductor:auto", candidates=["openvino-native"], **BF16, **wins)
    compiled = torch.compile(net(), backend=backend)
    compiled(X)
    row = next(row for row in bk.report(compiled).graphs[0].race.rows if row.name == NAME)
    assert (row.status, row.reason) == ("skipped", "OpenVINO has no BF16 kernels for this CPU, only FP16, FP32")


@bf16_here
@torch.no_grad()
def test_a_stored_winner_is_measured_anew(wins, tmp_path):
    """A later process compiles the stored winner; where its error exceeds the bound, in float32."""
    options = {"candidates": ["openvino-native"], **BF16, **wins}
    torch.compile(net(), backend=bk.make_backend("tmpl-inductor:auto", options))(X)
    (decision,) = Catalogue(tmp_path / "decisions").all()
    write_decisions([decision], tmp_path / "decisions.toml")
    (read,) = read_decisions(tmp_path / "decisions.toml", lambda name: find_template(name).options)
    assert (read.winner, read.options) == (NAME, {"precision": ["bf16"], "max_error": 0.01})
    for worse in (False, True):
        torch._dynamo.reset()
        process_memory.forget_process()
        model = cancelling() if worse else net()
        compiled = torch.compile(model, backend=bk.make_backend("tmpl-inductor:auto", {**options, "race": "never"}))
        if worse:
            with pytest.warns(BackendKwargsWarning, match="A graph is compiled without precision 'bf16'"):
                compiled(X)
        else:
            assert 1e-3 < error(compiled(X), model, X) < 0.01
        assert bk.report(compiled).graphs[0].race.winner == NAME


@pytest.mark.parametrize(
    ("precisions", "max_error", "listed", "wanted"),
    [
        pytest.param(("bf16",), 0.01, ("openvino-native",), True, id="consent"),
        pytest.param((), None, ("openvino-native",), False, id="no consent"),
        pytest.param(("bf16",), 0.001, ("openvino-native",), False, id="another bound"),
        pytest.param(("bf16",), 0.01, ("cpp_wrapper",), False, id="another compiler"),
        pytest.param((), None, (NAME,), True, id="listed itself"),
    ],
)
def test_a_store_cannot_lower_the_precision(precisions, max_error, listed, wanted):
    """A stored winner in a lower precision is used only where the request consents to it within that bound."""
    allowed = allowed_candidates(
        RaceSettings(candidates=listed, precision=precisions, max_error=max_error), lambda name: {}
    )
    options = {"precision": ["bf16"], "max_error": 0.01}
    assert trusted(NAME, options, "openvino-native", allowed) is wanted


@torch.no_grad()
def test_lists_in_options_are_stored(wins):
    """A candidate whose options contain a list is found again in the store."""
    listed = ['openvino-native[aten_ops=["gelu"]]']
    options = {"candidates": listed, **wins}
    for race_ in ("missing", "never"):
        torch._dynamo.reset()
        process_memory.forget_process()
        compiled = torch.compile(net(), backend=bk.make_backend("tmpl-inductor:auto", {**options, "race": race_}))
        compiled(X)
        assert bk.report(compiled).graphs[0].race.winner == listed[0]
