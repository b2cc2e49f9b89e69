"""The wheel built from the source distribution, installed without the sources."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlparse
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
METADATA = f"backend_kwargs-{version('backend-kwargs')}.dist-info"
SOURCES = ("backend_kwargs", "benchmarks", "docs", "examples", "tests")
TWO_LINES = """
import torch
print(torch.compile(torch.nn.Linear(4, 4), backend="tmpl-inductor:aten")(torch.ones(1, 4)).shape)
"""


class Installed(NamedTuple):
    sdist: Path
    wheel: Path
    bin: Path
    site_packages: Path

    def metadata(self, name: str) -> str:
        """Return a file of the wheel's metadata."""
        return ZipFile(self.wheel).read(f"{METADATA}/{name}").decode()

    def run(self, program: str, *args: str | Path) -> str:
        """Return the program's output, run outside the checkout and without PYTHONPATH."""
        done = subprocess.run([self.bin / program, *args], cwd=self.bin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def pip(*args: str | Path) -> None:
    # With PYTHONPATH, pip would take the checkout for an installed package.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "pip", "-q", *args], env=own, check=True)


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
    yield Installed(sdist, wheel, env / "bin", site_packages)
    shutil.rmtree(home)


@pytest.fixture(autouse=True)
def _no_help_from_outside(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)


def files(*folders: str) -> set[str]:
    """Return the paths of all files that belong to these folders of the checkout."""
    found = (path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path) for path in found if "__pycache__" not in path.parts and not path.name.startswith(".")}


def test_the_wheel_holds_each_file_of_the_package_and_nothing_beside_it(installed):
    """Its modules, `py.typed`, and the templates of pages."""
    names = ZipFile(installed.wheel).namelist()
    assert {name for name in names if name.startswith("backend_kwargs/")} == files("backend_kwargs")
    assert {name.split("/")[0] for name in names} == {"backend_kwargs", METADATA}


def test_the_wheel_has_the_license_and_every_name(installed):
    """Its metadata holds the license's text, and the command and backends that pyproject.toml names."""
    entries = PROJECT["entry-points"]["torch_dynamo_backends"] | PROJECT["scripts"]
    lines = installed.metadata("entry_points.txt").splitlines()
    assert installed.metadata("licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert {line for line in lines if " = " in line} == {f"{name} = {value}" for name, value in entries.items()}


def test_links_on_the_page_of_an_index_are_absolute_and_lead_to_files(installed):
    """README's relative links lead to the repository, at the tag of this release."""
    links = re.findall(r"\]\(([^()\s]+)\)", installed.metadata("METADATA"))
    repository = re.compile(
        rf"{re.escape(PROJECT['urls']['Source'])}/(?:blob|raw)/v{re.escape(PROJECT['version'])}/(.+)"
    )
    paths = [found[1].partition("#")[0] for link in links if (found := repository.fullmatch(link))]
    assert len(paths) > 20
    assert [link for link in links if urlparse(link).scheme != "https"] == []
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_citation_names_the_repository_of_the_package():
    """Where the public repository is stands in two files, which agree."""
    source = re.search(r"^repository-code: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert source is not None
    assert source[1] == PROJECT["urls"]["Source"]


def test_the_source_distribution_holds_its_tests_and_what_they_read(installed):
    """Whoever packages it again can test it."""
    with tarfile.open(installed.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    top = {path.name for path in ROOT.iterdir() if path.suffix in {".md", ".cff", ".toml", ".txt", ".yml", ".in"}}
    assert (files(*SOURCES) | top | {"LICENSE", "Makefile"}) - names == set()


def test_the_tests_of_the_source_distribution_run(installed, tmp_path):
    """Beside the installed wheel, without the checkout."""
    with tarfile.open(installed.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    options = ("-p", "no:cacheprovider", "-c", unpacked / "pyproject.toml")
    assert "passed" in installed.run("python", "-m", "pytest", "-q", *options, unpacked / "tests" / "test_errors.py")


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
