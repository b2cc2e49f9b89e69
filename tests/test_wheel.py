"""The wheel built from the source distribution, installed without the sources."""

import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
TWO_LINES = """
import torch
print(torch.compile(torch.nn.Linear(4, 4), backend="tmpl-inductor:cpp_wrapper")(torch.ones(1, 4)).shape)
"""


class Installed(NamedTuple):
    wheel: Path
    bin: Path
    site_packages: Path

    def run(self, program: str, *args: str) -> str:
        """Return the program's output, run outside the checkout and without PYTHONPATH."""
        done = subprocess.run([self.bin / program, *args], cwd=self.bin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def pip(*args: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *args], check=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    home = tmp_path_factory.mktemp("wheel")
    source, env = home / "source", home / "venv"
    # A copy, because setuptools leaves a build folder whose stale files get into the next wheel.
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__"))
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(home)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    shutil.rmtree(source)
    (sdist,) = home.glob("*.tar.gz")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", home, sdist)
    (wheel,) = home.glob("*.whl")

    venv.create(env, symlinks=True)
    (site_packages,) = env.glob("lib/python*/site-packages")
    pip("--python", env / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    # Makes torch and the rest available without a download. An editable install is not: it needs its own .pth,
    # and a .pth file is read only in its own environment.
    lent = [path for path in sys.path if path.endswith("-packages")]
    (site_packages / "lent.pth").write_text("\n".join(lent))
    yield Installed(wheel, env / "bin", site_packages)
    shutil.rmtree(home)


@pytest.fixture(autouse=True)
def _no_help_from_outside(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)


def test_the_wheel_holds_each_module_and_nothing_beside_the_package(installed):
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("backend_kwargs/**/*.py")}
    names = ZipFile(installed.wheel).namelist()
    metadata = f"backend_kwargs-{version('backend-kwargs')}.dist-info"
    assert {name for name in names if name.endswith(".py")} == sources
    assert {name.split("/")[0] for name in names} == {"backend_kwargs", metadata}


def test_the_wheel_is_typed(installed):
    assert "backend_kwargs/py.typed" in ZipFile(installed.wheel).namelist()


def test_the_wheel_makes_pages(installed):
    """The templates of pages are in the wheel."""
    code = "from backend_kwargs.page import *; print(from_html(to_html(Document('A title')).encode()).title)"
    assert installed.run("python", "-c", code) == "A title"


def test_python_imports_the_wheel(installed):
    """Python imports the installed wheel, on which the tests below rely."""
    path = installed.run("python", "-c", "import backend_kwargs; print(backend_kwargs.__file__)")
    assert Path(path).is_relative_to(installed.site_packages)


def test_the_command_tells_its_version(installed):
    assert version("backend-kwargs") in installed.run("backend-kwargs", "--version")


def test_dynamo_finds_the_backend_without_an_import(installed):
    assert installed.run("python", "-c", TWO_LINES) == "torch.Size([1, 4])"
