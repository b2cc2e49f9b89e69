"""Every command with hostile files and arguments: no text of theirs controls the terminal."""

import io
import json
import re
import shutil
import sys
import warnings

import pytest
import torch
import typer

import backend_kwargs as bk
from backend_kwargs import cli
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.cli.console import LONGEST_LINE, complain, print_json, print_table, say
from backend_kwargs.errors import BackendKwargsError, printable, shown, warn_once
from backend_kwargs.facts.decision import Decision, RaceRow
from tests.auto.test_auto_reporting import Terminal

KEY = "ab" * 32
# Escape sequences, line ends, a change of direction, markup of rich, and controls of eight bits.
SAID = "\x1b]0;owned\x07\x1b[2J\nfake\r\x08\x7f\u202e\u2028[bold]x[/bold]\x9b31m\x00"
NAME = SAID.replace("\x00", "").replace("/", "")  # for files and arguments
STYLE = re.compile(r"\x1b\[[0-9;]*m")
FACTORY = """
import torch, warnings

def build(**sizes):
    warnings.warn(SAID)
    torch.manual_seed(0)
    model = type(SAID.replace("\\0", ""), (torch.nn.Linear,), {"__module__": SAID})
    return model(4, 4).eval(), (torch.randn(2, 4),)

def fail(**sizes):
    raise RuntimeError(SAID)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle whose manifest has a hostile text wherever it may have any."""
    path = tmp_path_factory.mktemp("bundle") / "bundle"
    torch.manual_seed(0)
    config = bk.CompileConfig(backend="eager")
    bk.CompiledModule(config).build(torch.nn.Linear(4, 4), [torch.randn(2, 4)]).save(path)
    manifest = json.loads((path / "manifest.json").read_bytes())
    graph = {"key": KEY, "winner": SAID, "why": SAID, "options": {SAID: SAID}}
    manifest |= {"module": SAID, "made": SAID, "notes": [SAID, "n" * 2 * LONGEST_LINE], "factory": SAID, "device": SAID}
    manifest |= {"environment": {SAID: SAID}, "graphs": [*manifest["graphs"], graph]}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.fixture
def here(tmp_path, monkeypatch, bundle):
    """A folder with a hostile store, bundle, TOML file and factory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "decisions"))
    monkeypatch.setenv("CUDA_HOME", NAME)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() sets it
    shutil.copytree(bundle, tmp_path / "bundle")
    (tmp_path / "bundle" / "signatures").mkdir(exist_ok=True)
    row = RaceRow(SAID, status="fail_to_run", reason=SAID)
    made = Decision(KEY, "graph", SAID, {SAID: SAID}, (row,), {SAID: SAID}, facts=SAID, fixed={SAID: SAID})
    Catalogue(tmp_path / "decisions").add(made)
    quoted = json.dumps(SAID)
    (tmp_path / "t.toml").write_text(f"[decisions.{KEY}]\ngraph = 'g'\nwinner = {quoted}\noptions = {{{quoted} = 1}}\n")
    (tmp_path / "hostile.py").write_text(FACTORY.replace("SAID", repr(SAID)))
    return tmp_path


# For each command the arguments of some calls, each of which quotes a hostile text.
CALLS = {
    "list": [[NAME]],
    "doctor": [["--json", NAME]],
    "explain": [[NAME], ["tmpl-inductor", "--option", f"{NAME}=1"], ["inductor", NAME], [NAME, "x"]],
    "compare": [
        ["hostile.py:fail"],
        ["hostile.py:build", "--backends", "eager", "--rounds", "1"],
        ["hostile.py:build", "--backends", NAME],
        ["hostile.py:build", "-o", f"{NAME}/x.json"],
        ["hostile.py:build", "-o", NAME],
        ["hostile.py:build", "-o", "out.html", "--against", NAME],
        ["hostile.py:build", "--fail-below", f"{NAME}=1"],
        ["--from", NAME, "-o", "out.html"],
    ],
    "tune": [
        ["hostile.py:fail", "-o", "out.toml"],
        [f"{NAME}.py:f", "-o", "out.toml"],
        ["x:f", "-o", f"{NAME}/x.toml"],
    ],
    "tune-plan": [[NAME], ["t.toml"], ["t.toml", "--on", NAME, "--shard", NAME]],
    "bundle build": [
        ["hostile.py:build", "-b", "eager", "-o", NAME],
        ["hostile.py:fail", "-o", "out"],
        ["x", "-o", "out"],
    ],
    "bundle inspect": [["bundle"], [NAME], ["bundle", "--key", NAME]],
    "bundle run": [["bundle"], ["bundle", "hostile.py:build"], [NAME], ["bundle", "hostile.py:fail"]],
    "audit": [["x"], [NAME], ["bundle", "hostile.py:fail"], [f"{NAME}.py:f", "--store", "x"]],
    "pin": [["hostile.py:fail", "--lock", "k"], [f"{NAME}.py:f", "--lock", "k"], ["x:f", "--lock", f"{NAME}/x"]],
    "decisions list": [[], ["--json"], ["--store", NAME]],
    "decisions show": [["ab"], ["ab", "--json"], ["ab", "--as", "inductor-config"], [NAME]],
    "decisions export": [[NAME], ["out.toml"], ["out.toml", NAME]],
    "decisions import": [["t.toml"], [NAME], ["t.toml", "--store", NAME]],
    "decisions sync": [[f"{NAME}/x", "there"], ["here", f"{NAME}/x"], ["env:NOT_SET", "there"]],
    "decisions forget": [[NAME], ["ab", "--store", f"{NAME}/x"], []],
}


def leaves(command, name=""):
    """Yield the names of the commands that do something."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name
    for word, each in (inner or {}).items():
        yield from leaves(each, f"{name} {word}".strip())


def test_every_command_is_attacked():
    """A new command needs its calls in the table."""
    assert sorted(leaves(typer.main.get_command(cli.app))) == sorted(CALLS)


def controls(text):
    return [each for each in text if not each.isprintable() and each != "\n"]


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("name", CALLS)
def test_no_command_prints_control_characters(name, terminal, here, monkeypatch, capsys):
    """Output contains a line end only after each of its own lines, and of escape sequences rich's colours."""
    everything = ""
    for arguments in CALLS[name]:
        out = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "argv", ["backend-kwargs", *name.split(), *arguments])
        warn_once.cache_clear()
        with pytest.raises(SystemExit):
            cli.main()
        printed = out.getvalue() + capsys.readouterr().err
        assert not controls(STYLE.sub("", printed) if terminal else printed), arguments
        assert not [line for line in printed.splitlines() if line.startswith("fake")], arguments
        everything += printed
        assert max(map(len, printed.splitlines()), default=0) < 4 * LONGEST_LINE
    assert "owned" in everything


# ---- the functions that print


@pytest.mark.parametrize("text", [SAID, "\ud800", "\u2066a\u2069", "\x85", "\x1b[31m"], ids=ascii)
def test_what_prints_escapes(text, capsys):
    """Lines, cells, errors, notes and JSON are printable, whatever they quote."""
    say(text, f"after {text}")
    complain(text)
    print_table(("name",), [(text,)], "title")
    print_json({text: text})
    printed = capsys.readouterr()
    assert not controls(printed.out + printed.err)
    assert str(BackendKwargsError(text)).isprintable()
    assert shown(text).isprintable()
    with pytest.warns(bk.errors.BackendKwargsWarning) as warned:
        warn_once(f"{text} once")
    assert str(warned[0].message).isprintable()


def test_what_is_printable_stays(capsys):
    """Letters of all scripts, signs and rich's markup are printed as they are; JSON reads back equal."""
    text = "µ — 模型 [bold]x[/bold] \\ 1.00x"
    say(text)
    assert capsys.readouterr().out == f"{text}\n"
    assert printable(printable(SAID)) == printable(SAID)
    print_json({SAID: [SAID]})
    assert json.loads(capsys.readouterr().out) == {SAID: [SAID]}


def test_a_long_line_is_cut(capsys):
    """A text of megabytes is one line of limited length."""
    say("n" * 1_000_000)
    assert capsys.readouterr().out == f"{'n' * (LONGEST_LINE - 3)}...\n"


@pytest.mark.parametrize("value", [1 << 100_000, [[...]]], ids=["digits", "nesting"])
def test_a_value_without_a_repr_is_shown_by_its_type(value):
    """Python raises for the repr of such values; an error about them does not."""
    for _ in range(100_000 if isinstance(value, list) else 0):
        value = [value]
    assert shown(value) == f"<{type(value).__name__}>"
