"""Print the tests of what differs from a branch, for `make quick`: `python tests/changed.py [main]`.

Tests lie as the package's folders do: those of backend_kwargs/auto/race.py in tests/auto, and those of
backend_kwargs/backend.py are tests/test_backend*.py.
"""

# ruff: noqa: T201 - a command prints

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
ALWAYS = "tests/test_architecture.py"
DOCUMENTS = ("tests/test_docs.py",)


def covering(files: Iterable[str]) -> list[str]:
    """Return the folders and files with the tests of these files, which are relative to the checkout."""
    found = {ALWAYS}.union(*(_covering(PurePosixPath(file)) for file in files))
    return sorted(test for test in found if not found & {str(parent) for parent in PurePosixPath(test).parents})


def _covering(file: PurePosixPath) -> Iterable[str]:
    top, *folders = file.parts[:-1] or ("",)
    if file.suffix == ".md":
        return DOCUMENTS
    if top == "tests" and file.name.startswith("test_"):
        return [str(file)] if (ROOT / file).exists() else []
    if top == "benchmarks":
        return ["tests/benchmarks"]
    if top not in ("backend_kwargs", "tests"):
        return []
    while folders and not (ROOT / "tests" / Path(*folders)).is_dir():
        folders.pop()
    if folders:
        return [str(PurePosixPath("tests", *folders))]
    return [path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"tests/test_{file.stem.strip('_')}*.py")]


def changed_since(branch: str) -> list[str]:
    """Return the files that differ from where this branch left another one, and those that git does not know yet."""
    commands = (f"diff --name-only --merge-base {branch}", "ls-files --others --exclude-standard")
    return [
        file
        for command in commands
        for file in subprocess.check_output(["git", *command.split()], cwd=ROOT, text=True).splitlines()
    ]


if __name__ == "__main__":
    print(*covering(changed_since(*sys.argv[1:] or ["main"])))
