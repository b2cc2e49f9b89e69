"""README in an environment of its own, which has what pyproject.toml declares and nothing else: no numpy, say."""

import os
import re
import subprocess
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_docs import README, ROOT, blocks

NAME = "backend-kwargs"
BUNDLE = """
bk.CompiledModule().build(model, [x]).save("bundle/")
loaded = bk.CompiledModule.load("bundle/", model, trust=True)
loaded.deploy()
print(loaded(x).shape == model(x).shape)
"""


def declared(name: str) -> dict[str, Distribution]:
    """Return the installed packages that `name` requires without its extras, directly or not, and itself."""
    found, left = {}, [name]
    while left:
        if (each := re.sub(r"[-_.]+", "-", left.pop()).lower()) in found:
            continue
        try:
            found[each] = distribution(each)
        except PackageNotFoundError:  # such as CUDA's packages under a build of torch for CPUs
            continue
        needs = map(Requirement, found[each].requires or ())
        left += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def top_level(package: Distribution) -> Iterator[Path]:
    """Yield the files and folders that a package has at the top of site-packages."""
    tops = {path.parts[0] for path in package.files or () if path.parts[0] not in ("..", "__pycache__")}
    if package.metadata["Name"] == NAME:  # an editable one is the checkout, whose path is added below
        tops = {top for top in tops if top.endswith(".dist-info")}
    yield from (Path(str(package.locate_file(top))) for top in tops)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs Python in that environment, whose packages are links: it takes no second to make."""
    env = tmp_path_factory.mktemp("declared")
    venv.create(env, symlinks=True)
    (site_packages,) = env.glob("lib/python*/site-packages")
    for place in {place for package in declared(NAME).values() for place in top_level(package)}:
        (site_packages / place.name).symlink_to(place)
    (site_packages / "checkout.pth").write_text(str(ROOT))
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run_python(*args: str, cwd: Path) -> str:
        command = [env / "bin" / "python", *args]
        done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_python


def test_environment_has_nothing_undeclared(run, tmp_path):
    """The environment lacks numpy and pytest, on which the tests below rely, and has this checkout."""
    code = (
        "import importlib.util as u, backend_kwargs as bk; print(*map(u.find_spec, ('numpy', 'pytest')), bk.__file__)"
    )
    assert run("-W", "ignore", "-c", code, cwd=tmp_path).split() == [
        "None",
        "None",
        f"{ROOT}/backend_kwargs/__init__.py",
    ]


def test_readme_runs(run, tmp_path):
    """README's Python blocks run in order; a bundle is built, saved and loaded too."""
    code = "\n".join([*blocks("python", README), BUNDLE])
    assert run("-W", "ignore", "-c", code, cwd=tmp_path).splitlines()[-1] == "True"


@pytest.mark.parametrize("command", ["list", "doctor"])
def test_commands_run(run, tmp_path, command):
    """README's commands that need no model run."""
    assert run("-m", "backend_kwargs", *command.split(), cwd=tmp_path)
