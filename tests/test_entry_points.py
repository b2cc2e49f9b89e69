"""Backends that dynamo finds without importing this package."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest
import torch

from backend_kwargs import BackendKwargsError, make_backend
from backend_kwargs import entry_points as module
from backend_kwargs.backend import OURS, find_backend
from backend_kwargs.backends.tvm.settings import unfit
from backend_kwargs.options.templates import BUILT_IN
from tests import forks

INDUCTOR = "tmpl-inductor"
PUBLISHED = {
    entry.name: entry for entry in entry_points(group="torch_dynamo_backends") if entry.module == module.__name__
}
TVM = "tmpl-tvm"
NATIVE, ONNX = "tmpl-openvino-native", "tmpl-onnxruntime"
NAMES = [INDUCTOR, *(f"{INDUCTOR}:{name}" for name in BUILT_IN), TVM, NATIVE, ONNX]
REMOVED = {
    "tmpl-openvino": "write 'openvino-native', or 'openvino' for OpenVINO's own backend.",
    "tmpl-tensorrt": "write 'torch_tensorrt' for Torch-TensorRT's own backend.",
}
NEEDS_TVM = pytest.mark.skipif(bool(unfit()), reason=f"no TVM: {unfit()}")
NEEDS_OPENVINO = pytest.mark.skipif(not find_spec("openvino"), reason="no OpenVINO")
NEEDS_ONNX = pytest.mark.skipif(not find_spec("onnxruntime"), reason="no ONNX Runtime")
OPTIONAL = [
    pytest.param(TVM, marks=NEEDS_TVM),
    pytest.param(NATIVE, marks=NEEDS_OPENVINO),
    pytest.param(ONNX, marks=NEEDS_ONNX),
]

LOADS = """
import json, sys
from importlib.metadata import entry_points
backends = [entry_points(group="torch_dynamo_backends")[name].load() for name in sys.argv[1:]]
watched = (
    "torch._inductor.compile_fx", "torch._inductor.scheduler", "tvm", "tvm_ffi", "openvino", "onnxruntime",
    "backend_kwargs.trial", "typer",
)
print(json.dumps([[*map(repr, backends)], [name for name in watched if name in sys.modules]]))
"""


def test_each_template_is_published():
    """The installed metadata names our backends and each built-in template, and those of release 0.1."""
    assert set(PUBLISHED) == {*NAMES, *REMOVED}


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_backend_says_what_to_write(name):
    """A name of release 0.1 raises one line, in torch.compile, make_backend and a race's candidates."""
    with pytest.raises(BackendKwargsError) as of_torch:
        torch.compile(torch.sin, backend=name)
    with pytest.raises(BackendKwargsError) as of_ours:
        make_backend(name)
    with pytest.raises(BackendKwargsError) as of_a_race:
        make_backend("tmpl-inductor:auto", candidates=[f"{name}[x=1]"])
    assert str(of_torch.value) == str(of_ours.value) == f"Backend {name!r} was removed: {REMOVED[name]}"
    assert str(of_a_race.value) == f"Candidate {name!r} was removed: {REMOVED[name]}"


@pytest.mark.parametrize("name", [*NAMES[:-3], *OPTIONAL])
def test_entry_point_loads(name):
    """Each entry point loads the interned backend of its name."""
    assert PUBLISHED[name].load() is make_backend(name)


def test_entry_points_load_alone():
    """Loading entry points imports no compiler before there is a graph."""
    here = [each.values[0] for each in OPTIONAL if not each.marks[0].args[0]]
    names = [INDUCTOR, f"{INDUCTOR}:max_autotune", *here]
    done = subprocess.run([sys.executable, "-c", LOADS, *names], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[f"make_backend({name!r})" for name in names], []]


def test_other_attributes_are_missing():
    """The module raises AttributeError for a name that is not a template."""
    with pytest.raises(AttributeError) as e:
        module.frezing  # noqa: B018
    assert str(e.value) == "module 'backend_kwargs.entry_points' has no attribute 'frezing'"


def test_broken_plug_in_breaks_no_other(install, monkeypatch):
    """With another package whose backend fails to load, ours are found and compile."""
    install("broken", "raise ImportError('no luck')", "torch_dynamo_backends", unlucky="f")
    code = (
        "import torch\n"
        "assert 'unlucky' in torch._dynamo.list_backends()\n"
        "print(torch.compile(lambda x: x + 1, backend='tmpl-inductor:default')(torch.ones(1)).item())"
    )
    monkeypatch.setenv("PYTHONPATH", sys.path[0])
    assert forks.run("-c", code).stdout == "2.0\n"


def test_hidden_backends_of_dynamo_stay_in_reach():
    """A dynamo backend that has a name of ours is available as `dynamo:NAME`."""
    wanted = {INDUCTOR: True, "inductor": False, TVM: False, "tvm": False}
    if unfit():  # the entry point of tmpl-tvm loads where TVM is
        del wanted[TVM]
    assert set(OURS) >= {*wanted, TVM}
    assert {name: find_backend(f"dynamo:{name}").takes_inductor_options for name in wanted} == wanted
