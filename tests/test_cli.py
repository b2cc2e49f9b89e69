"""The command line: what it prints, in golden files; ACCEPT=1 accepts what is printed now."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "backend_kwargs", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        # As on a machine without a GPU, and with no colours of a terminal that runs the tests.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1", **environment},
    )


def check_golden(name: str, text: str) -> None:
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("ACCEPT"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param("explain_tma", ["explain", "tmpl-inductor:tma"], id="inert, and why"),
        pytest.param(
            "explain_layers",
            ["explain", "tmpl-inductor:max_autotune+aten", "-o", "mode=reduce-overhead", "-o", "epilogue-fusion=false"],
            id="layers",
        ),
        pytest.param("explain_other", ["explain", "aot_eager"], id="another backend"),
        pytest.param("options_tma", ["options", "*persistent_tma*"], id="options by glob"),
    ],
)
def test_output(name, arguments):
    """A command prints what its golden file holds, and exits with 0."""
    ran = run(*arguments)
    assert ran.returncode == 0, ran.stderr
    check_golden(name, ran.stdout)


def test_list_names_every_template():
    """`list --json` has a row for each template, with whether it works here and a summary."""
    listed = json.loads(run("list", "--json").stdout)
    rows = {row["name"]: row for row in listed["templates"]}
    assert rows["cpp_wrapper"]["works here"] == "works"
    assert rows["tma"]["works here"] == "cannot: no CUDA GPU is visible"
    assert all(row["summary"] for row in rows.values())


def test_options_searches_words_of_the_doc():
    """A word that stands only in an option's doc finds the option."""
    rows = json.loads(run("options", "heuristic-based partitioning", "--json").stdout or "[]")
    words = json.loads(run("options", "tiling select heuristic", "--json").stdout)
    assert ([row["option"] for row in words], rows) == (["cpp.enable_tiling_heuristics"], [])


def test_explain_json():
    """`explain --json` gives each option's value, layer, default, status and what it overrides."""
    explained = json.loads(run("explain", "tmpl-inductor:cpp_wrapper", "-o", "cpp-wrapper=false", "--json").stdout)
    assert explained["effects"] == [
        {
            "option": "cpp_wrapper",
            "value": False,
            "layer": "command line",
            "default": False,
            "status": "same as default",
            "overrides": [["template cpp_wrapper", True]],
        }
    ]


def test_explain_shows_the_environment():
    """Options of the environment variable appear with their layer, converted by type."""
    explained = run("explain", "tmpl-inductor", "--json", BACKEND_KWARGS_OPTIONS='{"epilogue_fusion": "false"}')
    (effect,) = json.loads(explained.stdout)["effects"]
    assert (effect["option"], effect["value"], effect["layer"]) == ("epilogue_fusion", False, "environment")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["explain", "tmpl-inductor:max_autotun"],
            "Unknown template 'max_autotun'. Did you mean 'max_autotune'?",
            id="template",
        ),
        pytest.param(
            ["explain", "tmpl-inductor", "-o", "max_autotune=maybe"],
            "Inductor option 'max_autotune' wants bool, got 'maybe' (str).",
            id="value",
        ),
        pytest.param(
            ["explain", "tmpl-inductor", "-o", "max_autotune"],
            "Cannot read option 'max_autotune'; write it 'name=value'.",
            id="assignment",
        ),
        pytest.param(
            ["options", "qqq"],
            "No Inductor option matches 'qqq'; try a shorter word or a glob such as '*tma*'.",
            id="no match",
        ),
        pytest.param(
            ["compare", "nothing_here.py:build"],
            "Cannot import 'nothing_here.py': ModuleNotFoundError: No module named 'nothing_here'.",
            id="no file",
        ),
        pytest.param(
            ["compare", "build"],
            "FACTORY wants 'package.module:function' or 'file.py:function', got 'build' (str).",
            id="no factory",
        ),
    ],
)
def test_mistakes(arguments, message, tmp_path):
    """A user's mistake is one line on standard error, without a traceback, and exit code 2."""
    ran = run(*arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"error: {message}\n")


FACTORY = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), (torch.randn(4, 8),)

def relu():
    return (lambda x: torch.relu(x)), (torch.randn(4),)

def fail():
    raise RuntimeError("no weights")
"""
TWELVE = (
    "inductor,tmpl-inductor,tmpl-inductor:default,tmpl-inductor:cudagraphs,tmpl-inductor:max_autotune,"
    "tmpl-inductor:coordinate_descent,tmpl-inductor:aten,tmpl-inductor:freezing,tmpl-inductor:fast_compile,"
    "tmpl-inductor:eager_numerics,tmpl-inductor[epilogue_fusion=false],aot_eager"
)


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "factory.py").write_text(FACTORY, encoding="utf-8")
    return tmp_path


def test_compare_compiles_twelve(factory):
    """Twelve backends are twelve compiled rows, though dynamo stops at eight variants of one function."""
    ran = run("compare", "factory.py:build", "--backends", TWELVE, "--rounds", "2", "--json", "out.json", cwd=factory)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((factory / "out.json").read_text(encoding="utf-8"))["candidates"]
    assert [(row["status"], row["graphs"]) for row in rows] == [("pass", 1)] * 12


def test_compare_applies_options_to_inductor_alone(factory):
    """`-o` reaches Inductor's candidates; the report, the plot and a config's candidate come when asked for."""
    ran = run(
        *("compare", "factory.py:build", "--backends", "eager,aot_eager,tmpl-inductor", "-o", "epilogue-fusion=false"),
        *(
            "--rounds",
            "2",
            "--report",
            "--plot",
            "out.png",
            "--config",
            '{"template": "aten", "backend": "tmpl-inductor"}',
        ),
        cwd=factory,
    )
    assert ran.returncode == 0, ran.stderr
    assert "epilogue_fusion=False" in ran.stdout
    assert "tmpl-inductor:aten of --config" in ran.stdout
    assert (factory / "out.png").read_bytes().startswith(b"\x89PNG")


def test_compare_fails_where_none_ran(factory):
    """Where no candidate ran the exit code is 1, and each row tells its reason."""
    ran = run("compare", "factory.py:relu", "--backends", "relu_compile_error_TESTING_ONLY", cwd=factory)
    assert ran.returncode == 1
    assert "fail_to_run" in ran.stdout
    assert ran.stdout.endswith("No candidate ran.\n")


def test_compare_tells_a_failing_factory(factory):
    """A factory that raises is the user's mistake, in one line."""
    ran = run("compare", "factory.py:fail", cwd=factory)
    assert (ran.returncode, ran.stderr) == (2, "error: Factory 'factory.py:fail' failed: RuntimeError: 'no weights'.\n")
