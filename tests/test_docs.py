"""The docs run: the code of README and of each page; generated tables agree with the code."""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

import backend_kwargs as bk
from backend_kwargs.auto.settings import OPTIONS
from backend_kwargs.backends.tvm.settings import unfit
from backend_kwargs.cli import app
from tests import docs_tables, forks
from tests.docs_tables import ROOT, TABLES, filled

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMANDS = "\n".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *PAGES])
FOLDERS = ("backend_kwargs", "benchmarks", "docs", "examples")
FROM_INDEX = re.compile(r"pip install[^\n#]*[ \"']backend[-_]kwargs\b")
REQUIRED = {
    "tvm.md": pytest.mark.skipif(bool(unfit()), reason=f"no TVM: {unfit()}"),
    "other-backends.md": pytest.mark.skipif(not find_spec("openvino"), reason="no OpenVINO"),
}


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=REQUIRED.get(page.name, ()))
        for page in PAGES
        # tests/frameworks/ runs the snippets of frameworks.md, each with its package; test_declared_alone.py README's.
        if blocks("python", page.read_text(encoding="utf-8")) and page.name != "frameworks.md"
    ],
)
def test_code_runs(page, tmp_path):
    """The Python blocks of a page run in order, in their own process and directory, with the files that it names."""
    text = page.read_text(encoding="utf-8")
    for name, content in re.findall(
        r"^Save this as `(\w+\.py)`[^`]*```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
    code = "\n".join(["import sys; sys.path.insert(0, '')", *blocks("python", text)])
    ran = forks.run("-c", code, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_readme_error_is_the_real_one():
    """The README's error is the one that its call raises."""
    ((call, kind, message),) = re.findall(r">>> (.*)\n(\w+): (.*)\n", "\n".join(blocks("text")))
    with pytest.raises(bk.BackendKwargsError) as raised:
        eval(call)
    assert (type(raised.value).__name__, str(raised.value)) == (kind, message)


def test_toml_of_the_docs_loads(tmp_path):
    """load_templates reads the templates.toml of the docs."""
    text = (ROOT / "docs" / "templates.md").read_text(encoding="utf-8")
    (tmp_path / "templates.toml").write_text(blocks("toml", text)[0], encoding="utf-8")
    assert bk.load_templates(tmp_path / "templates.toml") == ["serve"]


@pytest.mark.parametrize(
    "command",
    dict.fromkeys(
        re.findall(
            r"^(backend-kwargs (?!compare|tune|audit|decisions (?:import|sync|forget)|.*.toml).*?) +#",
            COMMANDS,
            re.MULTILINE,
        )
    ),
)
def test_commands_of_the_docs_run(command, tmp_path, monkeypatch):
    """The quick command lines of README and the docs exit with 0."""
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path))
    ran = CliRunner().invoke(app, [word.strip("'") for word in command.split()[1:]])
    assert ran.exit_code == 0, ran.output


def written_commands():
    """Return the command lines of the docs, of the examples and of the Makefile, without comments."""
    made = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    text = "\n".join([COMMANDS, made, *(path.read_text(encoding="utf-8") for path in ROOT.glob("examples/*.*"))])
    text = text.replace("\\\n", " ")
    return sorted({*re.findall(r"(?<![^\s`])(?:\S*/)?backend-kwargs (?!and )([a-z][^#\n|>`]*)", text)})


@pytest.mark.parametrize("command", written_commands())
def test_written_commands_have_no_other_flags(command):
    """What a page, an example or the Makefile tells a command is among its arguments; nothing runs."""
    ran = CliRunner().invoke(app, [*shlex.split(command), "--help"])
    assert ran.exit_code == 0, ran.output


def test_search_of_the_docs_finds_options_of_auto():
    """The docs' search for auto's options finds them."""
    (command,) = re.findall(r"^backend-kwargs (explain \S*:auto \w+) +#", COMMANDS, re.MULTILINE)
    ran = CliRunner().invoke(app, command.split())
    rows = {words[0] for line in ran.output.splitlines() if (words := line.split())}
    assert rows & {*OPTIONS} == {"budget_s", "process_budget_s"}


@pytest.mark.parametrize("file", TABLES)
def test_tables_are_current(file):
    """Every generated table agrees with the code."""
    assert filled(file) == (ROOT / file).read_text(encoding="utf-8"), "python -m tests.docs_tables --write"


def test_check_tells_an_old_table(tmp_path, monkeypatch):
    """The check exits with the name of a file whose table is out of date."""
    (tmp_path / "docs").mkdir()
    for file in TABLES:
        (tmp_path / file).write_text("<!-- generated: templates -->\nold\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(docs_tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["docs_tables.py"])
    with pytest.raises(SystemExit) as exited:
        docs_tables.main()
    assert str(exited.value) == "docs/templates.md is out of date: python -m tests.docs_tables --write"


@pytest.mark.skipif(not find_spec("mkdocs"), reason="no mkdocs: pip install -e .[docs]")
def test_site_builds_and_its_links_lead_somewhere(tmp_path):
    """mkdocs builds the site, without warnings about missing links or anchors."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    ran = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_pages_are_short_enough_to_be_read():
    """README has at most 110 lines, auto.md 1,200 words, and all pages of docs/ together 16,000."""
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert len(README.splitlines()) <= 110
    assert words["auto.md"] <= 1200
    assert sum(words.values()) <= 16000


def test_nothing_is_installed_by_this_packages_name():
    """No page, message or example installs `backend-kwargs` from the index, where anyone could claim the name."""
    places = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    texts = {path: path.read_text(encoding="utf-8") for path in places if path.suffix in {".md", ".py", ".toml"}}
    assert [str(path) for path, text in texts.items() if FROM_INDEX.search(text)] == []
