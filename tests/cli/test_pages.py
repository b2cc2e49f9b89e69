"""Pages, their data and summaries on the command line: each is written, read back, and refused where it is not one."""

import os
from pathlib import Path

import pytest

from backend_kwargs.auto.store import Catalogue
from backend_kwargs.facts.decision import Decision, RaceRow
from backend_kwargs.interval import Interval
from backend_kwargs.page import read_document, to_html, to_json
from backend_kwargs.page.document import Document, Row, Speedups
from tests import forks
from tests.auto.graphs import MADE

WRITTEN = Path(__file__).parent.parent / "written_before"
FACTORY = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), (torch.randn(4, 8),)
"""
SMALL = ("compare", "model.py:build", "--backends", "eager,aot_eager", "--rounds", "2")
ROWS = (
    RaceRow("eager", seconds=2.1e-5),
    RaceRow("default", seconds=1e-5, speedup=Interval(2.1, 2.0, 2.2), against="eager", won=True),
)
RACED = Decision("12fc" * 16, "12fc" * 4, "default", rows=ROWS, machine={"cpu": "AVX2"}, facts="4 ops, 1 reduction")
OLD = Document(
    title="old",
    speedups=(Speedups(over="eager", rows=(Row(name="eager", note="baseline"), Row(name="gone", won=True))),),
)


@pytest.fixture
def folder(tmp_path):
    """A folder with a model, a store, and an older page and its data."""
    (tmp_path / "model.py").write_text(FACTORY, encoding="utf-8")
    Catalogue(tmp_path / "store").add(MADE, RACED)
    (tmp_path / "old.html").write_text(to_html(OLD), encoding="utf-8")
    (tmp_path / "old.json").write_bytes(to_json(OLD))
    (tmp_path / "a.md").mkdir()
    return tmp_path


def run(folder, *arguments):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    return forks.run("-m", "backend_kwargs", *arguments, cwd=folder, env=environment)


# ---- compare


def test_compare_writes_a_page_its_data_and_a_summary(folder):
    """All three show the candidates; the page has the same data as the JSON, and what differs from the older one."""
    outputs = ("-o", "c.html", "-o", "c.json", "-o", "c.md", "--against", "old.json")
    ran = run(folder, *SMALL, *outputs)
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (0, "The page is c.html."), ran.stderr
    document = read_document(folder / "c.html")
    assert document == read_document(folder / "c.json")
    (group,) = document.speedups
    assert [(row.name, row.status) for row in group.rows] == [("eager", "pass"), ("aot_eager", "unknown")]
    assert [(result.name, result.candidate, result.passed) for result in document.accuracy] == [
        ("output", "eager", True),
        ("output", "aot_eager", True),
    ]
    changed = {(change.kind, change.name) for change in document.changes.changes}
    assert {("new", "aot_eager"), ("lost", "gone")} <= changed
    summary = (folder / "c.md").read_text(encoding="utf-8")
    assert summary.startswith("### `model.py:build`\n")
    assert "- `gone` is gone" in summary


def test_a_page_is_made_again_from_its_data(folder):
    """`compare --from` writes the same page from the JSON, and from a page itself."""
    assert run(folder, "compare", "--from", "old.json", "-o", "again.html").returncode == 0
    assert run(folder, "compare", "--from", "again.html", "-o", "third.html", "-o", "third.json").returncode == 0
    assert (folder / "again.html").read_bytes() == (folder / "old.html").read_bytes()
    assert (folder / "third.html").read_bytes() == (folder / "old.html").read_bytes()
    assert (folder / "third.json").read_bytes() == (folder / "old.json").read_bytes()


@pytest.mark.parametrize(
    ("asked", "code", "ends"),
    [
        pytest.param(["--fail-below", "eager=1e-6"], 0, "x] over eager: at least 1e-06x is asked for.", id="above"),
        pytest.param(["--fail-below", "eager=1e6"], 3, "x] over eager: its lower end is below 1e+06x.", id="below"),
    ],
)
def test_the_gate_judges_the_lower_end(folder, asked, code, ends):
    """The exit code is 3 if the speedup is not surely so high; the sentence is printed, and is in the summary."""
    ran = run(folder, *SMALL, *asked, "-o", "c.md")
    assert ran.returncode == code, ran.stderr
    line = ran.stdout.splitlines()[-1]
    assert line.startswith("aot_eager is ")
    assert line.endswith(ends.removeprefix("x"))
    assert line in (folder / "c.md").read_text(encoding="utf-8")


# ---- decisions


@pytest.mark.parametrize(
    ("arguments", "title", "races"),
    [
        pytest.param(["list"], "Decisions of auto", 2, id="list"),
        pytest.param(["show", "12fc"], "default for 4 ops, 1 reduction", 1, id="show"),
    ],
)
def test_decisions_write_a_page(folder, arguments, title, races):
    """A store's decisions, or one of them, as a page; what is printed stays as it is."""
    plain = run(folder, "decisions", *arguments, "--store", "store")
    ran = run(folder, "decisions", *arguments, "--store", "store", "-o", "d.html")
    assert (ran.returncode, ran.stdout) == (0, plain.stdout), ran.stderr
    document = read_document(folder / "d.html")
    assert (document.title, len(document.races)) == (title, races)


def test_a_decision_has_the_line_to_paste(folder):
    """The page of one decision ends its verdict with the code that compiles with the winner."""
    run(folder, "decisions", "show", "12fc", "--store", "store", "-o", "d.html")
    verdict = read_document(folder / "d.html").verdict
    assert (verdict.winner, verdict.paste) == ("default", 'torch.compile(model, backend="tmpl-inductor")')
    assert [(each.over, round(each.ratio.median, 2)) for each in verdict.speedups] == [("eager", 2.1)]


# ---- mistakes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "it must contain one report, as a page that -o wrote, and contains 0.", id="empty"),
        pytest.param(
            b"<p>hello</p>", "it must contain one report, as a page that -o wrote, and contains 0.", id="page"
        ),
        pytest.param(b"{", "DecodeError: Input data was truncated.", id="cut off"),
        pytest.param(
            b'{"version": 2, "title": "x"}',
            "its layout has version 2, this release reads 1: make it again.",
            id="version",
        ),
        pytest.param(
            b'{"version": 1, "title": "x", "samples": []}',
            "ValidationError: Object contains unknown field `samples`.",
            id="field",
        ),
        pytest.param(
            b'{"version": 1, "title": "x", "notes": ["' + b"a" * 9000 + b'"]}',
            "ValidationError: Expected `str` of length <= 8000 - at `$.notes[0]`.",
            id="long",
        ),
    ],
)
def test_a_hostile_older_report_is_refused_at_once(folder, content, message):
    """`--against` reads its file as anybody's: one line, exit code 2, before the model is made."""
    (folder / "hostile").write_bytes(content)
    (folder / "model.py").write_text("build = exit('imported')", encoding="utf-8")
    ran = run(folder, *SMALL, "-o", "c.html", "--against", "hostile")
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"error: Cannot read 'hostile': {message}\n")
    assert not (folder / "c.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            [*SMALL, "-o", "nowhere/c.html"],
            "Cannot write 'nowhere/c.html': there is no directory 'nowhere'.",
            id="HTML's directory",
        ),
        pytest.param([*SMALL, "-o", "a.md"], "Cannot write 'a.md': it is a directory.", id="Markdown is a directory"),
        pytest.param(
            [*SMALL, "-o", "c.html", "--against", "nothing.html"],
            "Cannot read a report from 'nothing.html': FileNotFoundError: [Errno 2] No such file or directory: "
            "'nothing.html'.",
            id="no older report",
        ),
        pytest.param(
            [*SMALL, "--against", "old.html"],
            "--against needs a file to show the changes in: -o OUT.html, say.",
            id="changes nowhere",
        ),
        pytest.param(
            [*SMALL, "--fail-below", "inductr=1.05"],
            "Unknown name of --fail-below 'inductr'. It is one of --backends, or 'default'.",
            id="over another",
        ),
        pytest.param(
            [*SMALL, "--fail-below", "0"],
            "Option '--fail-below' must be a ratio above 0, such as 1.05, or eager=1.05, got '0' (str).",
            id="no ratio",
        ),
        pytest.param(
            ["compare", "--from", "old.json"],
            "Name what to write: -o OUT.html, OUT.json or OUT.md.",
            id="nothing to write",
        ),
        pytest.param(
            ["compare", "--from", "model.py", "-o", "c.html"],
            "Cannot read 'model.py': it must contain one report, as a page that -o wrote, and contains 0.",
            id="no report",
        ),
    ],
)
def test_mistakes(folder, arguments, message):
    """A mistake is one line on standard error and exit code 2, before anything is compiled."""
    ran = run(folder, *arguments)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"error: {message}\n")
