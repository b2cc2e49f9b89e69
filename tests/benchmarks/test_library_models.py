"""Real models of the suite, at small sizes: each compiles as one graph."""

import copy
import sys

import pytest
import torch

from benchmarks.execution.session import select
from benchmarks.execution.worker import Job, time_group
from benchmarks.workloads.cases import CASES, libraries
from benchmarks.workloads.peers import MODELS

CPU = torch.device("cpu")
IN_TIMM = {"deit", "efficientnetv2", "regnet", "regnet_train"}


@pytest.fixture
def build(monkeypatch):
    """Return a function that builds a case, or skips the test if its library cannot be imported."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "level", 40)

    def built(name, dtype=torch.bfloat16):
        if name in IN_TIMM:
            pytest.importorskip("timm", exc_type=ImportError)
        torch.manual_seed(0)
        return CASES[name].build(CPU, dtype, "smoke")

    return built


def tensors(output):
    return output if isinstance(output, tuple) else (output,)


# From transformers' own functions, which dynamo traces.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", [case.name for case in libraries.CASES])
def test_is_one_graph(name, build, fresh_dynamo):
    """A model compiles without graph breaks, its outputs are finite, and in training it returns a loss."""
    problem, training = build(name), CASES[name].modes == ("train",)
    with torch.set_grad_enabled(training):
        expected = problem.fn(*problem.args)
        compiled = torch.compile(problem.fn, backend="eager", fullgraph=True)(*problem.args)
    torch.testing.assert_close(compiled, expected)
    assert all(tensor.isfinite().all() for tensor in tensors(expected))
    assert not training or (expected.ndim == 0 and expected.requires_grad)


def test_decode_writes_one_token(build):
    """Decoding writes one token at its position in each layer, however often it is called."""
    problem = build("mistral_decode", torch.float32)
    before = copy.deepcopy(dict(problem.fn.named_buffers()))
    with torch.no_grad():
        outputs = [problem.fn(*problem.args) for _ in range(3)]
    torch.testing.assert_close(outputs, [outputs[0]] * 3)
    position = int(problem.args[1])
    for name, tensor in problem.fn.named_buffers():
        if name.startswith(("keys", "values")):
            changed = (tensor != before[name]).any(dim=-1).any(dim=1).any(dim=0)
            assert changed.nonzero().flatten().tolist() == [position]


def test_upcast_copy_has_a_cache_of_its_own(build):
    """The float64 reference has its own cache, which starts with the same values."""
    problem = build("mistral_decode", torch.float32)
    wide = copy.deepcopy(problem.fn).double()
    with torch.no_grad():
        expected = wide(*problem.args)
        written = copy.deepcopy(dict(problem.fn.named_buffers()))
        torch.testing.assert_close(problem.fn(*problem.args), expected, check_dtype=False)
    assert wide.cache.layers[0].keys is wide.keys_0
    assert not torch.equal(written["keys_0"], problem.fn.keys_0)


@pytest.mark.parametrize("suite", ["full", "smoke", MODELS])
def test_suites(suite):
    """Real models are a separate suite, since the full suite compiles each case about twenty times."""
    chosen = {case.name for case in select(CASES, suite, [], "cuda")}
    real = {case.name for case in libraries.CASES}
    assert chosen == real if suite == MODELS else not chosen & real


@pytest.mark.parametrize(("name", "package"), [("deit", "timm"), ("gpt2", "transformers")])
def test_missing_library(name, package, monkeypatch, tmp_path):
    """The error names the package and how to install it; the suite's status is "unavailable"."""
    from backend_kwargs.errors import BackendKwargsError
    from backend_kwargs.trial import status_of

    monkeypatch.setitem(sys.modules, package, None)
    job = Job(CASES[name], "fwd", torch.bfloat16, "cpu", "smoke", tmp_path, ("eager",))
    with pytest.raises(BackendKwargsError) as error:
        time_group(lambda step: None, job)
    assert str(error.value).startswith(f"Cannot import {package!r}: ")
    assert str(error.value).endswith(f" Try: pip install {package}")
    assert status_of(error.value)[0] == "unavailable"
