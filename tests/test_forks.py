"""Forks behave as processes that are started."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import forks


@pytest.mark.parametrize(
    ("code", "returncode", "told"),
    [
        pytest.param("pass", 0, "", id="end"),
        pytest.param("import sys; sys.exit(3)", 3, "", id="exit code"),
        pytest.param("import sys; sys.exit('wrong')", 1, "wrong", id="exit with a text"),
        pytest.param("1 / 0", 1, "ZeroDivisionError: division by zero", id="error"),
        pytest.param("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt", id="Ctrl-C"),
        pytest.param("import os; os.abort()", -signal.SIGABRT, "", id="abort"),
    ],
)
def test_ends(code, returncode, told):
    """A fork ends with the exit code of an interpreter, and tells the same."""
    ran = forks.run("-c", code)
    assert (ran.returncode, (ran.stderr.splitlines() or [""])[-1]) == (returncode, told)


def test_has_what_it_is_given(tmp_path):
    """A fork has its own variables, folder, arguments and input."""
    code = "import os, sys; print(os.environ['HOME'], os.getcwd(), sys.argv, sys.stdin.read())"
    given = os.environ | {"HOME": "/nowhere"}
    with forks.Fork("-c", code, 1, cwd=tmp_path, env=given, stdin=subprocess.PIPE) as ran:
        assert ran.communicate("two")[0] == f"/nowhere {tmp_path} ['-c', '1'] two\n"


def test_is_killed():
    """A fork can be killed by its number while it runs."""
    with forks.Fork("-c", "import time; print('runs', flush=True); time.sleep(600)") as ran:
        assert ran.stdout.readline() == "runs\n"
        assert ran.poll() is None
        os.kill(ran.pid, signal.SIGKILL)
        assert ran.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("name", "modules"), [pytest.param("HOME", True, id="late"), pytest.param("OMP_NUM_THREADS", False, id="early")]
)
def test_a_variable_that_imports_read_has_an_interpreter(name, modules):
    """Where a variable differs that may be read during imports, nothing is imported at the start."""
    ran = forks.run("-c", "import sys; print('torch' in sys.modules)", env=forks.ENVIRONMENT | {name: "7"})
    assert ran.stdout == f"{modules}\n"


def test_what_compiling_sets_needs_no_interpreter():
    """Variables that Inductor sets when it compiles are of this process alone."""
    code = (
        "import os, torch\nfrom tests import forks\ntorch.compile(torch.sin)(torch.ones(2))\n"
        "print(set(os.environ) - set(forks.ENVIRONMENT) - forks.NOT_HANDED_ON)"
    )
    assert forks.run("-c", code, cwd=Path(forks.__file__).parents[1]).stdout == "set()\n"
