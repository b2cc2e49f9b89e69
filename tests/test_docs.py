"""The docs run: README's code as it stands, and its generated tables are those of the code."""

import re
import subprocess
import sys
from importlib.util import find_spec

import docs_tables
import pytest
from docs_tables import ROOT, TABLES, filled

import backend_kwargs as bk
from backend_kwargs.compilers.auto.settings import OPTIONS
from backend_kwargs.compilers.tvm.versions import unfit

README = (ROOT / "README.md").read_text(encoding="utf-8")
TVM, OPENVINO = (
    re.search(rf"^## {name}\n.*?(?=^## )", README, re.DOTALL | re.MULTILINE)[0] for name in ("TVM", "OpenVINO")
)
PARTS = [
    pytest.param(README.replace(TVM, "").replace(OPENVINO, ""), id="all but these"),
    pytest.param(TVM, id="TVM", marks=pytest.mark.skipif(bool(unfit()), reason=f"no TVM: {unfit()}")),
    pytest.param(OPENVINO, id="OpenVINO", marks=pytest.mark.skipif(not find_spec("openvino"), reason="no OpenVINO")),
]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("text", PARTS)
def test_readme_code_runs(text, tmp_path):
    """README's Python blocks run one after another, in a process and a directory of their own; so do TVM's."""
    code = "\n".join(blocks("python", text))
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_readme_error_is_the_real_one():
    """The error that README shows is what its call raises."""
    ((call, kind, message),) = re.findall(r">>> (.*)\n(\w+): (.*)\n", "\n".join(blocks("text")))
    with pytest.raises(bk.BackendKwargsError) as raised:
        eval(call)
    assert (type(raised.value).__name__, str(raised.value)) == (kind, message)


def test_readme_toml_loads(tmp_path):
    """README's templates.toml is one that load_templates reads."""
    (tmp_path / "templates.toml").write_text(blocks("toml")[0], encoding="utf-8")
    assert bk.load_templates(tmp_path / "templates.toml") == ["serve"]


@pytest.mark.parametrize("command", re.findall(r"^(backend-kwargs (?!compare).*?) +#", README, re.MULTILINE))
def test_readme_commands_run(command):
    """README's quick command lines exit with 0."""
    arguments = [word.strip("'") for word in command.split()[1:]]
    ran = subprocess.run([sys.executable, "-m", "backend_kwargs", *arguments], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_readme_search_finds_what_a_race_may_be_told():
    """README's search among auto's options prints auto's own."""
    (command,) = re.findall(r"^backend-kwargs (options --backend \S*:auto .*?) +#", README, re.MULTILINE)
    searched = [sys.executable, "-m", "backend_kwargs", *command.split()]
    ran = subprocess.run(searched, capture_output=True, text=True, check=True)
    rows = {words[0] for line in ran.stdout.splitlines() if (words := line.split())}
    assert rows & {*OPTIONS} == {"budget_s", "process_budget_s"}


@pytest.mark.parametrize("file", TABLES)
def test_tables_are_current(file):
    """A generated table is what the code says today."""
    assert filled(file) == (ROOT / file).read_text(encoding="utf-8"), "python tests/docs_tables.py --write"


def test_check_tells_an_old_table(tmp_path, monkeypatch):
    """The check exits with the file's name where a table is out of date."""
    (tmp_path / "README.md").write_text("<!-- generated: templates -->\nold\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(docs_tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["docs_tables.py"])
    with pytest.raises(SystemExit) as exited:
        docs_tables.main()
    assert str(exited.value) == "README.md is out of date: python tests/docs_tables.py --write"
