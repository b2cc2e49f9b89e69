"""A TVM backend is a value, like every backend, and TVM is imported for the first graph."""

import copy
import json
import pickle
import signal
import subprocess
import sys

import pytest

from backend_kwargs import Backend, BackendKwargsError, make_backend
from backend_kwargs.backend import find_backend
from backend_kwargs.backends.tvm.settings import import_tvm, unfit
from backend_kwargs.options.machine import CannotWorkError
from backend_kwargs.options.option import convert

if unfit():  # the tables below hold backends
    pytest.skip(f"no TVM: {unfit()}", allow_module_level=True)

VALUES = [
    pytest.param("tmpl-tvm", {}, id="plain"),
    pytest.param("tvm", {"scheduler": "meta_schedule", "trials": 64, "target": {"kind": "llvm"}}, id="search"),
    pytest.param(
        "tmpl-tvm",
        {
            "target": {"kind": "cuda", "arch": "sm_90", "host": {"kind": "llvm"}},
            "pass_config": {"tirx.noalias": True, "tirx.UnrollLoop": {"auto_max_step": 8}},
        },
        id="nested",
    ),
    pytest.param("tvm", {"aten_ops": ("mm", "convolution"), "freeze": True, "seed": None}, id="tuple"),
]


@pytest.mark.parametrize(("spec", "options"), VALUES)
def test_ways_back(spec, options):
    """repr, pickle, a copy and a config give an equal value with the same hash."""
    b = make_backend(spec, options)
    again = [
        eval(repr(b)),
        pickle.loads(pickle.dumps(b)),
        copy.deepcopy(b),
        Backend.from_config(b.to_config(), trust=True),
        Backend.from_config(json.dumps(b.to_config()), trust=True),
    ]
    assert again == [b] * 5
    assert {hash(each) for each in again} == {hash(b)}
    assert {each.key() for each in again} == {b.key()}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(make_backend("tvm", freeze=False), id="another value"),
        pytest.param(make_backend("tvm", {"freeze": True, "verify": False}), id="one more"),
        pytest.param(make_backend("tmpl-tvm", freeze=True), id="another name"),
        pytest.param(make_backend("inductor", freezing=True), id="another compiler"),
    ],
)
def test_unequal(other):
    """Other options or another name make an unequal value."""
    assert make_backend("tvm", freeze=True) != other


def test_order_does_not_matter():
    """The order of options is not part of the value."""
    assert make_backend("tvm", freeze=True, seed=1) == make_backend("tvm", seed=1, freeze=True)


def test_the_callers_target_stays_theirs():
    """A target is copied, so changing it later changes no backend."""
    target = {"kind": "llvm"}
    b = make_backend("tvm", target=target)
    target["num-cores"] = 2
    assert b.options == {"target": {"kind": "llvm"}}


@pytest.mark.parametrize(
    "write", [pytest.param(pickle.dumps, id="pickle"), pytest.param(Backend.to_config, id="config")]
)
def test_a_pass_is_not_written(write):
    """A pass cannot be saved, since it compares by identity and would not be read back equal."""
    tvm = import_tvm()
    own = tvm.transform.Sequential([])
    assert make_backend("tvm", pipeline=own) == make_backend("tvm", pipeline=own)
    assert make_backend("tvm", pipeline=own) != make_backend("tvm", pipeline=tvm.transform.Sequential([]))
    with pytest.raises(BackendKwargsError) as e:
        write(make_backend("tvm", pipeline=own))
    assert str(e.value).startswith("Option 'pipeline' cannot be written: ")
    assert str(e.value).endswith(" (Sequential) would not read back equal.")


def test_text_becomes_options():
    """Options from a config's JSON become the types that TVM needs."""
    config = {"backend": "tvm", "aten_ops": ["mm"], "target": {"kind": "llvm"}, "seed": 3}
    made = make_backend("tvm", aten_ops=("mm",), target={"kind": "llvm"}, seed=3)
    assert Backend.from_config(config, trust=True) == made


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        pytest.param("target", '{"kind": "llvm", "num-cores": 2}', {"kind": "llvm", "num-cores": 2}, id="JSON"),
        pytest.param("target", "llvm", "llvm", id="word"),
        pytest.param("aten-ops", '["mm", "bmm"]', ("mm", "bmm"), id="tuple"),
        pytest.param("scheduler", "none", None, id="none"),
        pytest.param("scheduler", "dlight", "dlight", id="choice"),
        pytest.param("freeze", "yes", True, id="flag"),
        pytest.param("max_trials_per_task", "8", 8, id="number"),
    ],
)
def test_text_of_the_command_line(name, text, value):
    """Text becomes the option's type."""
    bound = find_backend("tvm").bind("command line", {name: text}, convert)
    assert list(bound.options.values()) == [value]


def test_name_that_dynamo_knows():
    """dynamo's wrappers get the entry point's name, since its own "tvm" is another backend."""
    assert {make_backend(name).compiler_name for name in ("tvm", "tmpl-tvm")} == {"tmpl-tvm"}


def test_the_one_of_dynamo_stays_in_reach():
    """`dynamo:tvm` is torch's own backend, which says why it cannot work with this TVM."""
    assert find_backend("dynamo:tvm") != find_backend("tvm")
    with pytest.raises(CannotWorkError) as raised:
        make_backend("dynamo:tvm", opt_level=2)
    assert str(raised.value) == (
        "Backend 'dynamo:tvm' cannot work here: torch's own tvm backend imports tvm.relay, which the installed TVM "
        "does not have; take 'tmpl-tvm'."
    )


def test_config_is_every_option():
    """get_compiler_config returns the final value of each option."""
    config = make_backend("tvm", seed=7).get_compiler_config()
    assert (config["seed"], config["fallback"]) == (7, "partition")


IMPORTS = """
import ctypes, json, signal, sys
import torch
import backend_kwargs as bk

def action():
    held = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).sigaction(signal.SIGSEGV, None, held)
    return held.raw[: ctypes.sizeof(ctypes.c_void_p)]  # the handler: what follows is the C library's own

hook, before = sys.excepthook, action()
compiled = torch.compile(lambda x: x * 2 + 1, backend=bk.make_backend("tvm"))
waited = "tvm" not in sys.modules
result = compiled(torch.ones(3)).tolist()
print(json.dumps([waited, "tvm" in sys.modules, sys.excepthook is hook, action() == before, result]))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no sigaction")
def test_tvm_comes_with_the_first_graph_and_leaves_the_hooks():
    """The first graph imports TVM; sys.excepthook and the SIGSEGV handler stay as they were."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [True, True, True, True, [3.0, 3.0, 3.0]]
