"""Errors if TVM is missing or has another version."""

import json
import subprocess
import sys
from textwrap import dedent

import pytest

INSTALL = 'pip install "apache-tvm==0.27.*" "apache-tvm-ffi<0.1.15,>=0.1.14.post0"'
# By distribution, the version that the child shall see; one that is not named is not installed.
WHAT = {"absent": {}, "old": {"apache-tvm": "0.25.0", "apache-tvm-ffi": "0.1.15"}}
WHAT["other_ffi"] = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.15"}
WHAT["no_ffi"] = {"apache-tvm": "0.27.0"}
REASONS = {
    "absent": "apache-tvm 0.27 is not installed",
    "old": "apache-tvm is 0.25.0 and 0.27 is wanted",
    "other_ffi": "apache-tvm-ffi is 0.1.15 and 0.1.14 is wanted",
    "no_ffi": "apache-tvm-ffi 0.1.14 is not installed",
}
# Installed distributions and modules of TVM are hidden; stand-ins with these names are in our own folder.
WITHOUT = """
import importlib.metadata, importlib.util, json, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tvm", "tvm_ffi"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    def find_distributions(self, context=None):
        return ()
sys.meta_path.insert(0, Hidden())
theirs, versions = importlib.metadata.version, json.loads(sys.argv[1])
def version(name):
    if not name.startswith("apache-tvm"):
        return theirs(name)
    if name not in versions:
        raise importlib.metadata.PackageNotFoundError(name)
    return versions[name]
importlib.metadata.version = version
spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "tvm" else spec(name, *rest)
"""


def run(code, which, tmp_path):
    """Run `code` outside the checkout in a process that finds the TVM of `which`."""
    arguments = [sys.executable, "-c", WITHOUT + dedent(code), json.dumps(WHAT[which])]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("which", WHAT)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        pytest.param("bk.make_backend('tvm', freeze=True)", "tvm", id="make_backend"),
        pytest.param("bk.explain('tmpl-tvm')", "tmpl-tvm", id="explain"),
        pytest.param("bk.Backend.from_config({'backend': 'tvm'}).verify()", "tvm", id="verify"),
        pytest.param("torch.compile(lambda x: x, backend='tmpl-tvm')", "tmpl-tvm", id="torch.compile"),
    ],
)
def test_told_at_once(which, call, name, tmp_path):
    """One line says what is missing or wrong and what to install, before anything compiles."""
    code = f"""
        import torch, backend_kwargs as bk
        try:
            {call}
        except bk.BackendKwargsError as error:
            print(error)
    """
    assert run(code, which, tmp_path) == f"Backend {name!r} cannot work here: {REASONS[which]}; {INSTALL}."


def test_list_and_doctor_go_on(tmp_path):
    """`list` and `doctor` have a row for TVM, with the reason and the remedy."""
    code = """
        from typer.testing import CliRunner
        from backend_kwargs.cli import app
        listed, found = (json.loads(CliRunner().invoke(app, [c, "--json"]).stdout) for c in ("list", "doctor"))
        row = next(row for row in listed["backends"] if row["name"] == "tmpl-tvm")
        print(json.dumps([row["works"], row["why"], found["backends"]["tmpl-tvm"], found["machine"]["TVM"]]))
    """
    assert json.loads(run(code, "old", tmp_path)) == [
        "cannot",
        REASONS["old"],
        {"word": "cannot", "reason": REASONS["old"], "remedy": INSTALL},
        "apache-tvm 0.25.0, apache-tvm-ffi 0.1.15, without CUDA",
    ]


VALUE = """
    import backend_kwargs as bk
    b = bk.Backend.from_config({"backend": "tvm", "seed": 3})
    print(b, b.to_config()["options"])
"""
EXPLAINED = """
    from typer.testing import CliRunner
    from backend_kwargs.cli import app
    rows = json.loads(CliRunner().invoke(app, ["explain", "tvm", "trials", "--json"]).stdout)
    print([row["option"] for row in rows])
"""
OTHERS = """
    import torch
    print(torch.compile(lambda x: x + 1, backend="tmpl-inductor:default")(torch.ones(1)).item())
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        pytest.param(VALUE, "make_backend('tvm', {'seed': 3}) {'seed': 3}", id="a value"),
        pytest.param(EXPLAINED, "['trials', 'max_trials_per_task', 'num_trials_per_iter']", id="explain"),
        pytest.param(OTHERS, "2.0", id="other backends"),
    ],
)
def test_what_needs_no_tvm(tmp_path, code, printed):
    """Without TVM a backend is read from a config, printed, saved and explained; others compile as usual."""
    assert run(code, "absent", tmp_path) == printed
