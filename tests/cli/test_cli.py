"""The command line: its output is compared with golden files; ACCEPT=1 rewrites them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import backend_kwargs as bk
from backend_kwargs.cli import REMOVED, app
from backend_kwargs.cli.console import lines_to_paste, print_table
from backend_kwargs.cli.measured import print_comparison
from backend_kwargs.compare import Comparison, Row, fastest
from backend_kwargs.harness.models import importable
from backend_kwargs.page import read_document
from backend_kwargs.pipeline import OWN
from backend_kwargs.trial import Interval
from tests import forks

FLAGS = 60  # of all commands together; it only falls
GOLDEN = Path(__file__).parent / "golden"


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return forks.run(
        "-m",
        "backend_kwargs",
        *arguments,
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
            [
                "explain",
                "tmpl-inductor:max_autotune+aten",
                "--option",
                "mode=reduce-overhead",
                "--option",
                "epilogue-fusion=false",
            ],
            id="layers",
        ),
        pytest.param("explain_other", ["explain", "aot_eager"], id="another backend"),
        pytest.param("options_tma", ["explain", "inductor", "*persistent_tma*"], id="options by glob"),
    ],
)
def test_output(name, arguments):
    """A command prints its golden file and exits with 0."""
    ran = run(*arguments)
    assert ran.returncode == 0, ran.stderr
    check_golden(name, ran.stdout)


def test_list_names_every_template():
    """`list --json` has a row for each template, with its summary and whether it works here; each backend once."""
    listed = json.loads(run("list", "--json").stdout)
    rows = {row["name"]: row for row in listed["templates"]}
    assert rows["cpp_wrapper"]["works"] == "works"
    assert (rows["tma"]["works"], rows["tma"]["why"]) == ("cannot", "no CUDA GPU is visible")
    names = [row["name"] for row in listed["backends"]]
    assert not [name for name in names if "TESTING" in name]
    assert not {*names} & {name.removeprefix("tmpl-") for name in names if name.startswith("tmpl-")}
    assert all(row["summary"] for row in rows.values())


def test_list_and_doctor_load_no_dynamo():
    """Nor a plug-in; the options that they read are those of Inductor's config, which then loads as ever."""
    code = """
import sys
from typer.testing import CliRunner
from backend_kwargs.backend import find_backend
from backend_kwargs.cli import app
from backend_kwargs.cli.commands import options_alone
from backend_kwargs.options.catalogue import inductor_options, usual_options

assert [CliRunner().invoke(app, [name]).exit_code for name in ("list", "doctor")] == [0, 0]
with options_alone():
    read = {name: (each.default, str(each.type)) for name, each in inductor_options().items()}
print(*({"torch._dynamo", "torch._inductor", "torch._inductor.config", "openvino"} & {*sys.modules}))
import torch._inductor
assert read == {name: (each.default, str(each.type)) for name, each in inductor_options().items()}
assert usual_options().items() <= inductor_options().items(), "their types are those of classes that are gone"
assert torch._inductor.config.max_autotune is find_backend("inductor").option("max_autotune").default
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("\n", "")


@pytest.mark.parametrize("command", ["compare", "tune", "pin", "bundle build -o b"])
def test_a_factory_that_is_not_there_is_told_before_torch_loads(command):
    """As a typo of a command or an option is."""
    code = f"""
import sys
from typer.testing import CliRunner
from backend_kwargs.cli import app

print(CliRunner().invoke(app, {[*command.split(), "nothing_here.py:build"]}).exception, "torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "No file 'nothing_here.py'. False\n"


def test_options_searches_words_of_the_doc():
    """A word that occurs only in an option's doc finds the option."""
    rows = json.loads(run("explain", "inductor", "heuristic-based partitioning", "--json").stdout or "[]")
    words = json.loads(run("explain", "inductor", "tiling select heuristic", "--json").stdout)
    assert ([row["option"] for row in words], rows) == (["cpp.enable_tiling_heuristics"], [])


@pytest.mark.parametrize("spec", ["tmpl-inductor", "tmpl-inductor:auto", "tmpl-inductor:freezing+aten"])
def test_options_show_ours_first(spec):
    """This package's options, which every template accepts, come before Inductor's: type, default and doc."""
    rows = json.loads(run("explain", spec, "*", "--json").stdout)
    ours = rows[: len(OWN)]
    assert [row["option"] for row in ours] == list(OWN)
    assert all(row["doc"] for row in ours)
    assert {
        "option": "most_races",
        "type": "int of at least 1",
        "default": "3",
        "environment": "",
        "doc": OWN["most_races"].doc,
    } in ours
    assert "max_autotune" in [row["option"] for row in rows[len(OWN) :]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["eager", "*"], "Backend 'eager' takes no options.\n", id="none"),
        pytest.param(["boxes:f", "*"], "Backend 'boxes:f' takes anything in `options`, unchecked.\n", id="a mapping"),
        pytest.param(["boxes:g", "zzz"], "Backend 'boxes:g' takes any keyword argument, unchecked.\n", id="keywords"),
    ],
)
def test_options_that_nobody_checks(arguments, expected, tmp_path):
    """`explain` with a pattern shows what a backend accepts unchecked, or that it accepts nothing."""
    text = "def f(gm, inputs, options=None): ...\ndef g(gm, inputs, *, level=1, **kwargs): ...\n"
    (tmp_path / "boxes.py").write_text(text, encoding="utf-8")
    ran = run("explain", *arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, expected), ran.stderr


def test_explain_json():
    """`explain --json` shows each option's value, layer, default, status and what it overrides."""
    explained = json.loads(
        run("explain", "tmpl-inductor:cpp_wrapper", "--option", "cpp-wrapper=false", "--json").stdout
    )
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


def test_an_infinite_number_is_a_text_in_json():
    """`explain --json` writes an infinite number as a text, since JSON has none."""
    explained = run("explain", "tmpl-inductor:auto", "--option", "budget_s=inf", "--json").stdout
    values = {row["option"]: row["value"] for row in json.loads(explained)["effects"]}
    assert values == {"auto": True, "budget_s": "Infinity"}


def test_explain_shows_the_environment():
    """Options of the environment variable are shown with their layer, converted by type."""
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
            ["explain", "tmpl-inductor", "--option", "max_autotune=maybe"],
            "Inductor option 'max_autotune' must be bool, got 'maybe' (str).",
            id="value",
        ),
        pytest.param(
            ["explain", "tmpl-inductor", "--option", "max_autotune"],
            "Cannot read option 'max_autotune'; write it 'name=value'.",
            id="assignment",
        ),
        pytest.param(
            ["explain", "inductor", "qqq"],
            "No option of inductor matches 'qqq'; try a shorter word or a glob such as '*tma*'.",
            id="no match",
        ),
        pytest.param(
            ["compare", "nothing_here.py:build"],
            "No file 'nothing_here.py'.",
            id="no file",
        ),
        pytest.param(
            ["compare", "nothing_here:build"],
            "Cannot import 'nothing_here': ModuleNotFoundError: No module named 'nothing_here'.",
            id="no module",
        ),
        pytest.param(
            ["compare", "nothing_here:build", "-o", "out.zzz"],
            "Option '--output' must be a file that ends in .html, .json or .md, got 'out.zzz' (str).",
            id="output's ending",
        ),
        pytest.param(
            ["compare", "nothing_here:build", "-o", "/nodir/out.json"],
            "Cannot write '/nodir/out.json': there is no directory '/nodir'.",
            id="JSON's directory",
        ),
        pytest.param(
            ["compare", "nothing_here:build", "--backends", "eager,inductor[freezin=1]"],
            "Unknown Inductor option 'freezin'. Did you mean 'freezing'?",
            id="option of a candidate",
        ),
        pytest.param(
            ["compare"], "Name what to compare: MODEL, or --from FILE, an earlier page or its data.", id="no model"
        ),
        pytest.param(
            ["compare", "--from", "page.html", "--rounds", "3"],
            "--rounds has no effect with --from, which compares nothing.",
            id="timing of what was timed",
        ),
        pytest.param(
            ["compare", "build"],
            "FACTORY must be 'package.module:function' or 'file.py:function', got 'build': write a function that "
            "returns (model, example_inputs), such as build in my_model.py, and pass my_model.py:build.",
            id="no factory",
        ),
    ],
)
def test_mistakes(arguments, message, tmp_path):
    """A user's mistake is one line on standard error, without a traceback, and exit code 2."""
    ran = run(*arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize(
    ("arguments", "start", "end"),
    [
        pytest.param(["compare", "f.py:f", "--mode", "zz"], "Invalid value for '--mode': ", "compare ", id="choice"),
        pytest.param(["compare", "f.py:f", "--rounds", "0"], "Invalid value for '--rounds': ", "compare ", id="range"),
        pytest.param(["explain"], "Missing argument '", "explain ", id="argument"),
        pytest.param(["lst"], "No such command 'lst'.", "", id="command"),
        pytest.param(["decisions"], "Missing command.", "decisions ", id="subcommand"),
        pytest.param(["list", "--jso"], "No such option", "list ", id="flag"),
        pytest.param(["explain", "tvm", "--option"], "Option '--option' requires an argument", "", id="no value"),
    ],
)
def test_usage(arguments, start, end):
    """A mistake in the arguments is one line; the words in its middle are typer's and vary between releases."""
    ran = run(*arguments)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith(f"error: {start}")
    assert ran.stderr.endswith((f". See 'backend-kwargs {end}--help'.\n", f"? See 'backend-kwargs {end}--help'.\n"))


def test_bare_command():
    """Without arguments the help is printed on standard output, with exit code 0."""
    ran = run()
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "Usage: backend-kwargs [OPTIONS] COMMAND" in ran.stdout


def child(*arguments: str, stdout: Any) -> forks.Fork:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    return forks.Fork("-m", "backend_kwargs", *arguments, stdout=stdout, env=environment)


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["table", "JSON"])
def test_reader_that_leaves(flags):
    """If a reader such as `head -1` closes the pipe, the exit code is 0 and nothing is printed."""
    with child("explain", "inductor", "*", *flags, stdout=subprocess.PIPE) as ran:
        ran.stdout.close()
        assert (ran.stderr.read(), ran.wait()) == ("", 0)


def test_output_fits_the_encoding(monkeypatch):
    """On a stream whose encoding lacks a character of a table, it is printed as a question mark."""
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    with child("explain", "tmpl-inductor:tma", stdout=subprocess.PIPE) as ran:
        assert ran.stdout is not None
        assert ran.stderr is not None
        assert "?????" in ran.stdout.read()
        assert (ran.stderr.read(), ran.wait()) == ("", 0)


def test_narrow_terminal_shows_names_whole(monkeypatch, capsys):
    """A name wider than its column continues on the next line, so no character of it is lost."""
    monkeypatch.setattr(sys.modules[print_table.__module__], "PIPE_WIDTH", 20)
    print_table(("name", "summary"), [("tmpl-inductor:max_autotune", "three short words")])
    rows = [line.partition("   ")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert "tmpl-inductor:max_autotune" in "".join(rows)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["--version"]], ids=" ".join)
def test_full_disk(arguments):
    """Output that cannot be written is one line and exit code 2."""
    with Path("/dev/full").open("w") as full, child(*arguments, stdout=full) as ran:
        printed = ran.stderr.read()
    message = "error: Cannot write to standard output: No space left on device; send it elsewhere.\n"
    assert (ran.returncode, printed) == (2, message)


def test_closed_standard_error():
    """A mistake gives exit code 2 even if its message cannot be printed."""
    with child("explain", "tmpl-inductor:tm", stdout=subprocess.PIPE) as ran:
        ran.stderr.close()
        assert (ran.stdout.read(), ran.wait()) == ("", 2)


FACTORY = """
import os
import signal
import sys
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), (torch.randn(4, 8),)

def relu():
    return (lambda x: torch.relu(x)), (torch.randn(4),)

def compiled():
    return torch.compile(torch.nn.Linear(4, 4)), (torch.randn(4),)

def fail():
    raise RuntimeError("no weights\\nno biases")

def leave():
    sys.exit("which data?")

def interrupt():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.raise_signal(signal.SIGINT)
"""
NINE = (
    "inductor,tmpl-inductor,tmpl-inductor:default,tmpl-inductor:aten,tmpl-inductor:freezing,tmpl-inductor:fast_compile,"
    "tmpl-inductor:eager_numerics,tmpl-inductor[epilogue_fusion=false],aot_eager"
)


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "factory.py").write_text(FACTORY, encoding="utf-8")
    return tmp_path


def test_compare_compiles_nine(factory):
    """Nine backends give nine compiled rows, although dynamo stops at eight variants of one function."""
    flags = ("--quick", "--rounds", "2", "-o", "out.json")
    ran = run("compare", "factory.py:build", "--backends", NINE, *flags, cwd=factory)
    assert ran.returncode == 0, ran.stderr
    rows = read_document(factory / "out.json").speedups[0].rows
    assert [(row.status, row.graphs) for row in rows] == [*[("pass", 1)] * 8, ("unknown", 1)]


def test_compare_takes_candidates_with_options(factory):
    """A candidate has its options in brackets; --quick uses Inductor's cache as it is."""
    listed = "eager,aot_eager,tmpl-inductor[epilogue-fusion=false]"
    ran = run("compare", "factory.py:build", "--backends", listed, "--quick", "--rounds", "2", cwd=factory)
    assert ran.returncode == 0, ran.stderr
    assert "tmpl-inductor[epilogue-fusion=false]" in ran.stdout
    assert "with Inductor's cache as it was" in ran.stdout


def test_compare_fails_where_none_ran(factory):
    """If no candidate ran the exit code is 1, and each row shows its reason."""
    ran = run("compare", "factory.py:relu", "--backends", "relu_compile_error_TESTING_ONLY", cwd=factory)
    assert ran.returncode == 1
    assert "fail_to_run" in ran.stdout
    assert ran.stdout.endswith("Nothing to use yet: no candidate ran, for the reasons in the table.\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("fail", "Factory 'factory.py:fail' failed: RuntimeError: no weights no biases.", id="raises"),
        pytest.param("leave", "Factory 'factory.py:leave' failed: SystemExit: which data?.", id="leaves"),
        pytest.param(
            "compiled",
            "The model of factory 'factory.py:compiled' is compiled: return it without torch.compile.",
            id="compiles",
        ),
        pytest.param("gone", "'factory.py' has no function 'gone'.", id="is not there"),
        pytest.param("__name__", "'factory.py' has no function '__name__'.", id="is text"),
        pytest.param("rellu", "'factory.py' has no function 'rellu'. Did you mean 'relu'?", id="is misspelled"),
    ],
)
def test_compare_tells_a_failing_factory(factory, name, message):
    """A factory that raises or exits is reported in one line as the user's mistake."""
    ran = run("compare", f"factory.py:{name}", cwd=factory)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"error: {message}\n")


def test_compare_tells_a_module_that_leaves(tmp_path):
    """A file that exits while it is loaded, as argparse does, is reported as such."""
    (tmp_path / "leaves.py").write_text("def build(): ...\nraise SystemExit(3)", encoding="utf-8")
    ran = run("compare", "leaves.py:build", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (2, "error: Cannot import 'leaves.py': SystemExit: 3.\n")


def test_interrupt_is_quiet(factory):
    """Ctrl-C ends a command with exit code 130 and no traceback."""
    ran = run("compare", "factory.py:interrupt", cwd=factory)
    assert (ran.returncode, ran.stderr.strip()) == (130, "")


JSON_PY = """
import torch
from neighbour import TWO

def act(x):
    return torch.relu(x) * TWO

class Model(torch.nn.Module):
    def forward(self, x):
        from late import ONE
        return act(x) + ONE

def build():
    import sys, json
    assert "dumps" not in globals() and hasattr(json, "dumps")
    return Model(), (torch.randn(8),)
"""


def test_compare_loads_the_file_itself(tmp_path):
    """A file json.py is loaded instead of the standard library's, and can import its neighbours."""
    models = tmp_path / "models"
    models.mkdir()
    for name, text in (("json", JSON_PY), ("neighbour", "TWO = 2.0"), ("late", "ONE = 1.0")):
        (models / f"{name}.py").write_text(text, encoding="utf-8")
    ran = run(
        *("compare", "models/json.py:build", "--backends", "eager,inductor", "--rounds", "2", "-o", "out.json"),
        "--quick",
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    rows = read_document(tmp_path / "out.json").speedups[0].rows
    assert [(row.status, row.graphs) for row in rows] == [("pass", None), ("pass", 1)]


BACKENDS_PY = """
import sys

def mine(gm, inputs, *, level: int = 1):
    print("a compiler talks", file=sys.stderr)
    return gm.forward

def broken(gm, inputs):
    import logging
    logging.getLogger("torch._dynamo").error("a logged traceback")
    raise RuntimeError("no luck")
"""


def test_compare_finds_a_backend_beside_the_model(tmp_path):
    """A backend is named by its file, or by its module next to the model; its output does not disturb the table."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "factory.py").write_text(FACTORY, encoding="utf-8")
    (folder / "mybackends.py").write_text(BACKENDS_PY, encoding="utf-8")
    specs = "models/mybackends.py:mine,mybackends:mine[level=2],mybackends:broken"
    ran = run(
        *("compare", "models/factory.py:relu", "--backends", specs, "--rounds", "1", "-o", "out.json"),
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr
    rows = read_document(tmp_path / "out.json").speedups[0].rows
    assert ([row.name for row in rows], rows[2].reason) == (specs.split(","), "RuntimeError")
    assert "RuntimeError: no luck" in ran.stdout  # a document that is handed on has no text of an exception
    assert ran.stderr.splitlines() == [f"compiling {spec} ({at} of 3)" for at, spec in enumerate(specs.split(","), 1)]


def test_backend_in_a_file_that_hides_behind_another_module(tmp_path):
    """A file with the name of another module cannot be pasted, so it is refused as a backend."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "json.py").write_text("def f(gm, inputs): ...", encoding="utf-8")
    ran = run("explain", "sub/json.py:f", cwd=tmp_path)
    message = "error: File 'sub/json.py' cannot be imported: another module has its name; rename it.\n"
    assert (ran.returncode, ran.stderr) == (2, message)


def test_user_files_do_not_stay_first(tmp_path, monkeypatch):
    """After the factory has run, its directory is last on the path, which compile workers inherit."""
    monkeypatch.setattr(sys, "path", ["somewhere"])
    with importable(str(tmp_path)):
        assert sys.path == [str(tmp_path), "somewhere"]
    assert sys.path == ["somewhere", str(tmp_path)]


def test_compare_output(capsys, monkeypatch):
    """The table of a comparison has a row of each kind, and the line to paste."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    own = Interval(2e-3, 2e-3, 2e-3)
    rows = [
        Row("eager", "eager", speedup=Interval(1, 1, 1), latency=own, verdict="baseline", samples=[2e-3]),
        Row(
            "tmpl-inductor:freezing[epilogue_fusion=false]",
            "make_backend('tmpl-inductor:freezing', {'epilogue_fusion': False})",
            compile_s=8.12,
            cache="cold",
            latency=Interval(1.5e-3, 1.4e-3, 1.6e-3),
            speedup=Interval(1.33, 1.25, 1.43),
            peak_bytes=3 * 2**20,
            graphs=1,
            samples=[1.5e-3],
        ),
        Row(
            "inductor",
            "inductor",
            compile_s=0.31,
            cache="warm",
            latency=Interval(1.98e-5, 1.9e-5, 2.1e-5),
            speedup=Interval(1.01, 0.98, 1.03),
            verdict="within noise",
            graphs=1,
            samples=[1.98e-3],
        ),
        Row("broken", "broken", status="fail_to_run", reason="InvalidBackend: [red] broken :smile:"),
    ]
    where = {"device_name": "a CPU", "torch": "2.13.0"}
    made = Comparison(rows, where, Interval(1.0, 0.98, 1 / 0.98), "eager", "inference", ["A note."])
    assert fastest(made) is rows[1]
    backend = bk.make_backend("tmpl-inductor:freezing", epilogue_fusion=False)
    print_comparison(made, lines_to_paste(backend))
    check_golden("compare", capsys.readouterr().out)


def test_list_output():
    """`list` prints each template, whether it works without a GPU, and its summary."""
    ran = run("list")
    assert ran.returncode == 0, ran.stderr
    # The backends above depend on what is installed.
    _, title, templates = ran.stdout.partition("templates, as ")
    check_golden("list_templates", title + templates)


def test_failed_import_shows_its_cause(tmp_path):
    """The error of a factory has the cause of an import that failed; --traceback shows all of it."""
    (tmp_path / "factory.py").write_text(
        "def build():\n    try:\n        import nothing_here\n    except ImportError as error:\n"
        "        raise RuntimeError('no model') from error\n"
    )
    cause = (
        "Factory 'factory.py:build' failed: RuntimeError: no model, because of ModuleNotFoundError: "
        "No module named 'nothing_here'."
    )
    ran = run("compare", "factory.py:build", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (2, f"error: {cause}\n")
    ran = run("compare", "factory.py:build", "--traceback", cwd=tmp_path)
    assert "Traceback (most recent call last):" in ran.stderr
    assert "import nothing_here" in ran.stderr
    assert ran.stderr.endswith(f"error: {cause}\n")


def test_shells_complete_the_commands():
    """A shell that asks how a word can end gets the commands."""
    asked = {"_BACKEND_KWARGS_COMPLETE": "complete_bash", "COMP_WORDS": "backend-kwargs ex", "COMP_CWORD": "1"}
    assert run(**asked).stdout.split() == ["explain"]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("seal", ["seal", "--from-log", "sizes.jsonl"]),
        ("page", ["page", "compare.json", "--html", "compare.html"]),
        ("run", ["run", "bundle", "model.py:build", "--no-guards"]),
        ("build", ["build", "model.py:build", "-o", "bundle", "--kind=aoti"]),
        ("tune --plan", ["tune", "--plan", "plan.toml", "--store", "kept", "--html=plan.html"]),
        ("compare --html", ["compare", "model.py:build", "--html", "compare.html"]),
        ("decisions --html", ["decisions", "list", "--html", "decisions.html"]),
    ],
)
def test_what_was_removed_says_what_to_write(name, given):
    """A command or flag of an earlier release is refused in one line that says what to write instead."""
    ran = run(*given)
    assert (ran.returncode, ran.stderr) == (2, f"error: 'backend-kwargs {name}' was removed: {REMOVED[name]}.\n")


def _flags(command: Any, name: str = "backend-kwargs") -> Iterator[tuple[str, str]]:
    """Yield the name of each command and each of its flags, but for those that typer adds to every program."""
    own = (each.opts[-1] for each in command.params if each.param_type_name == "option")
    yield from ((name, flag) for flag in own if "completion" not in flag)
    for sub, each in getattr(command, "commands", {}).items():
        yield from _flags(each, f"{name} {sub}")


def test_the_command_line_stays_small():
    """It has at most 10 commands, and no more flags than today; one that goes is in the table of what was removed."""
    command = typer.main.get_command(app)
    flags = [*_flags(command)]
    assert len(command.commands) <= 10
    assert len(flags) <= FLAGS
    assert len({flag for _, flag in flags}) <= 45
    known = {(name.removeprefix("backend-kwargs ").split()[0], flag) for name, flag in flags}
    assert not known & {tuple(name.split()) for name in REMOVED}
