"""The names of options that editors complete."""

import subprocess
import sys
from pathlib import Path

import pytest

from backend_kwargs.options.catalogue import inductor_options
from backend_kwargs.pipeline import OWN
from tests import option_names

CODE = """
import backend_kwargs as bk
from backend_kwargs.options.inductor_names import InductorOptions
bk.make_backend("tmpl-inductor", {"triton.cudagraphs": True}, epilogue_fusion=True)
bk.make_backend(print, scheduler=3)
options: InductorOptions = {"triton.cudagraphs": True}
bk.make_backend("tmpl-inductor", options)
wrong: InductorOptions = {"triton.cudagraph": True}
"""

WITHOUT_TORCH = """
[mypy]
strict = True
incremental = False
follow_imports = silent
[mypy-torch.*]
follow_imports = skip
"""


def test_every_option_of_this_torch_is_named():
    """The mapping has every option of the installed torch and of this package, apart from private ones."""
    wanted = {name for name in (*inductor_options(), *OWN) if not name.startswith("_")}
    assert wanted <= dict(option_names.IN_FILE.findall(option_names.FILE.read_text(encoding="utf-8"))).keys()


def test_other_releases_are_kept():
    """An option that this torch lacks stays in the file, and the file is what the script writes."""
    text = option_names.FILE.read_text(encoding="utf-8")
    assert text == option_names.text(option_names.types())
    assert text != option_names.text(option_names.types(["of_another_release"]))


def test_type_checker_knows_the_names(tmp_path):
    """A type checker accepts known names and any backend's keywords, and finds a misspelled name."""
    pytest.importorskip("mypy")
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "mypy.ini").write_text(WITHOUT_TORCH)
    command = [sys.executable, "-m", "mypy", "--config-file", tmp_path / "mypy.ini", tmp_path / "code.py"]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert [line.partition(": ")[2] for line in ran.stdout.splitlines()[:-1]] == [
        'error: Extra key "triton.cudagraph" for TypedDict "InductorOptions"  [typeddict-unknown-key]'
    ]
