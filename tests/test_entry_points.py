"""Backends that dynamo finds without importing this package."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest

from backend_kwargs import entry_points as module
from backend_kwargs import make_backend
from backend_kwargs.backend import OURS
from backend_kwargs.backends.tvm.versions import unfit
from backend_kwargs.options.templates import BUILT_IN

INDUCTOR = "tmpl-inductor"
PUBLISHED = {
    entry.name: entry for entry in entry_points(group="torch_dynamo_backends") if entry.module == module.__name__
}
TVM = "tmpl-tvm"
OPENVINO, NATIVE, ONNX, TENSORRT = "tmpl-openvino", "tmpl-openvino-native", "tmpl-onnxruntime", "tmpl-tensorrt"
NAMES = [INDUCTOR, *(f"{INDUCTOR}:{name}" for name in BUILT_IN), TVM, OPENVINO, NATIVE, ONNX, TENSORRT]
NEEDS_TVM = pytest.mark.skipif(bool(unfit()), reason=f"no TVM: {unfit()}")
NEEDS_OPENVINO = pytest.mark.skipif(not find_spec("openvino"), reason="no OpenVINO")
NEEDS_ONNX = pytest.mark.skipif(not find_spec("onnxruntime"), reason="no ONNX Runtime")
OPTIONAL = [
    pytest.param(TVM, marks=NEEDS_TVM),
    pytest.param(OPENVINO, marks=NEEDS_OPENVINO),
    pytest.param(NATIVE, marks=NEEDS_OPENVINO),
    pytest.param(ONNX, marks=NEEDS_ONNX),
]

LOADS_ONE = """
import json, sys
from importlib.metadata import entry_points
(entry,) = entry_points(group="torch_dynamo_backends", name=sys.argv[1])
backend = entry.load()
watched = (
    "torch._inductor.compile_fx", "torch._inductor.scheduler", "tvm", "tvm_ffi", "openvino", "onnxruntime",
    "backend_kwargs.measure", "typer",
)
print(json.dumps([repr(backend), [name for name in watched if name in sys.modules]]))
"""


def test_each_template_is_published():
    """The installed metadata names our backends and each built-in template, and nothing else."""
    assert set(PUBLISHED) == set(NAMES)


@pytest.mark.parametrize("name", [*NAMES[:-5], *OPTIONAL])
def test_entry_point_loads(name):
    """Each entry point loads the interned backend of its name."""
    assert PUBLISHED[name].load() is make_backend(name)


@pytest.mark.parametrize("name", [INDUCTOR, f"{INDUCTOR}:max_autotune", *OPTIONAL])
def test_entry_point_loads_alone(name):
    """Loading an entry point imports no compiler before there is a graph."""
    done = subprocess.run([sys.executable, "-c", LOADS_ONE, name], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [f"make_backend({name!r})", []]


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2.0\n"


# OpenVINO's warning when it is loaded by its own name.
@pytest.mark.filterwarnings("ignore:torch._dynamo.config.inline_inbuilt_nn_modules is deprecated:FutureWarning")
def test_hidden_backends_of_dynamo_stay_in_reach():
    """A dynamo backend that has a name of ours is available as `dynamo:NAME`."""
    wanted = {INDUCTOR: True, "inductor": False, TVM: False, "tvm": False}
    if unfit():  # the entry point of tmpl-tvm loads where TVM is
        del wanted[TVM]
    if find_spec("openvino"):
        wanted |= {OPENVINO: False, "openvino": False}
    assert set(OURS) >= {*wanted, TVM, OPENVINO, "openvino"}
    assert {name: make_backend(f"dynamo:{name}").takes_inductor_options for name in wanted} == wanted
