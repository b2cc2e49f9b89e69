"""Machines whose C++ compiler is missing, broken, or never answers."""

import os
import subprocess
import sys

import pytest
import torch
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import fresh_cache

import backend_kwargs as bk
from backend_kwargs.backends.inductor import compiler as inductor
from backend_kwargs.options import machine
from tests.faults.attempts import TIMES

ADVICE = "Inductor needs a C++ compiler: install g++, or set CXX to one ("
PROGRAMS = {
    "garbage": "#!/bin/sh\necho lalala\n",
    "fails": "#!/bin/sh\nexit 3\n",
    "sleeps": "#!/bin/sh\nexec sleep 1000\n",
    "not executable": "",
}
BROKEN = ["missing", ".", "not executable", "garbage", "fails"]


class Scaled(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x * 2 + 1).sum(-1)


@pytest.fixture
def compiler(tmp_path):
    """Return a function that writes a broken compiler, and returns the option that names it."""

    def write(name):
        if name in PROGRAMS:
            (tmp_path / name).write_text(PROGRAMS[name])
            (tmp_path / name).chmod(0o755 if PROGRAMS[name] else 0o644)
        return {"cpp.cxx": (str(tmp_path / name),)}

    pick_vec_isa()  # asked once in a process: else the first broken compiler would answer
    with fresh_cache():
        yield write


def shorten(monkeypatch):
    for module in (machine, inductor):
        monkeypatch.setattr(module, "CXX_LIMIT_S", 0.5)


@pytest.fixture
def never_answers(compiler, monkeypatch):
    shorten(monkeypatch)
    return compiler("sleeps")


def asleep(options):
    (path,) = options["cpp.cxx"]
    return f"Inductor needs a C++ compiler, but {path!r} did not answer --version within 0.5 s: set CXX to another one."


@pytest.mark.parametrize("name", BROKEN)
@torch.no_grad()
def test_the_error_names_the_next_step(compiler, name):
    """`torch.compile` raises one line that says what to install, whatever is wrong with the compiler."""
    compiled = torch.compile(Scaled(), backend="tmpl-inductor", options=compiler(name))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(torch.randn(8, 64))
    assert f"NoCompilerError: {ADVICE}" in str(raised.value)


@torch.no_grad()
def test_a_compiler_that_never_answers_is_not_waited_for(never_answers):
    """Inductor would wait for it without end."""
    compiled = torch.compile(Scaled(), backend="tmpl-inductor", options=never_answers)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(torch.randn(8, 64))
    assert asleep(never_answers) in str(raised.value)


@pytest.mark.parametrize("name", [*BROKEN, "sleeps"] if TIMES > 1 else ["garbage", "sleeps"])
@torch.no_grad()
def test_auto_uses_what_works_and_says_why(compiler, name, auto, warned, monkeypatch):
    """auto falls back to eager, with a warning that names the cause."""
    shorten(monkeypatch)
    x, options = torch.randn(8, 64), compiler(name)
    with warned() as messages:
        assert torch.allclose(auto(Scaled(), options=options)(x), Scaled()(x), atol=1e-5)
    why = asleep(options) if name == "sleeps" else ADVICE
    assert messages[0].startswith(f"A graph runs under eager, because default failed: {why}")


@pytest.mark.parametrize("name", [*BROKEN, "sleeps"] if TIMES > 1 else ["garbage", "sleeps"])
def test_build_names_the_next_step(compiler, name, monkeypatch):
    """`build` raises one line, and may be called again."""
    shorten(monkeypatch)
    options = compiler(name)
    made = bk.CompiledModule(bk.CompileConfig(options=options))
    with pytest.raises(bk.BackendKwargsError) as raised:
        made.build(Scaled().eval(), [torch.randn(8, 64)])
    said = str(raised.value).removeprefix("The module cannot be compiled for sample 0: ")
    assert said.startswith(asleep(options) if name == "sleeps" else ADVICE)
    assert "\n" not in said
    assert made.state.value == "init"


MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval(), (torch.randn(4, 8),)
"""
COMMANDS = {
    "build": ["bundle", "build", "model.py:build", "-o", "bundle"],
    "tune": ["tune", "model.py:build", "-o", "made.toml", "--option", "budget_s=600"],
    "compare": ["compare", "model.py:build", "--backends", "eager,tmpl-inductor", "--rounds", "2"],
    "doctor": ["doctor"],
}
SAID = {
    "build": (2, ADVICE),
    "tune": (2, "Nothing is written: provisional, so not one to ship: default could not run here."),
    "compare": (0, f"unavailable   {ADVICE}"),
    "doctor": (0, "no C++ compiler is on the PATH   install g++ or set CXX"),
}


@pytest.mark.parametrize("command", COMMANDS if TIMES > 1 else ["tune"])
def test_commands_without_a_compiler(tmp_path, command):
    """Each command ends in one line that says what is missing."""
    (tmp_path / "model.py").write_text(MODEL)
    changed = {"CXX": "/no/such/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    call = [sys.executable, "-m", "backend_kwargs", *COMMANDS[command]]
    done = subprocess.run(
        call, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path, env=os.environ | changed
    )
    code, said = SAID[command]
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr
    assert not (tmp_path / "bundle").exists()
    assert not (tmp_path / "made.toml").exists()
