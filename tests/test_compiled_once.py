"""compiled_once.sh, the g++ of the tests: what it copies, and what it compiles each time."""

import subprocess

import pytest

from tests.slow import LIST

SOURCES = {"a.cpp": "one", "b.cpp": "one", "other.cpp": "two", "header.cpp": '#include "a.h"', "fails.cpp": ""}
# Says that it runs, and writes the source as the library; where that is empty, it fails.
COMPILER = """#!/bin/sh
echo runs
for each; do case $each in *.cpp) source=$each ;; esac; done
while [ "$1" != -o ]; do shift; done
grep . "$source" >"$2"
"""


@pytest.mark.parametrize(
    ("one", "other", "ends"),
    [
        pytest.param("-O3 a.cpp", "-O3 b.cpp", (0, "", "one"), id="the same source"),
        pytest.param("-O3 a.cpp", "-O3 other.cpp", (0, "runs", "two"), id="another source"),
        pytest.param("-O3 a.cpp", "-O1 a.cpp", (0, "runs", "one"), id="another argument"),
        pytest.param("a.cpp part.o", "a.cpp part.o", (0, "runs", "one"), id="an object"),
        pytest.param("header.cpp", "header.cpp", (0, "runs", SOURCES["header.cpp"]), id="a header beside it"),
        pytest.param("fails.cpp", "fails.cpp", (1, "runs", ""), id="failing"),
    ],
)
def test_what_is_compiled_once(tmp_path, one, other, ends):
    """A second command is a copy if it has the same source, alone, and arguments; else the compiler runs again."""
    (tmp_path / "g++").symlink_to(LIST.with_name("compiled_once.sh"))
    for name, text in {"real": COMPILER, **SOURCES}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "real").chmod(0o755)
    for words in (one, other):
        command = [tmp_path / "g++", *words.split(), "-o", "made.so"]
        ran = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip(), (tmp_path / "made.so").read_text().strip()) == ends
