"""Which tests `make test` leaves out."""

import re
from pathlib import Path

from tests.slow import LIST, NIGHTLY, by_folder, recorded, seconds_of, slow

ROOT = Path(__file__).parent.parent


def test_each_listed_function_exists():
    """`make slow` writes the list anew."""
    for name in LIST.read_text().split():
        file, _, function = name.partition("::")
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), re.MULTILINE), name


def test_each_folder_keeps_tests():
    listed = {*LIST.read_text().split()}
    for folder in {path.parent for path in ROOT.glob("tests/**/test_*.py")}:
        names = {
            f"{path.relative_to(ROOT).as_posix()}::{function}"
            for path in folder.glob("test_*.py")
            for function in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
        }
        assert not names <= listed, folder


def test_the_longest_are_slow_but_one_of_each_folder():
    seconds = {"x/b": 3.0, "x/a": 3.0, "x/c": 1.0, "x/d": 2.0, "y/e": 9.0}
    assert slow(seconds, limit_s=3.5) == ["x/a", "x/b"]


def test_cases_count_together(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.auto.test_auto_race" name="test_x[a]" time="1.5" />'
        '<testcase classname="tests.auto.test_auto_race" name="test_x[b]" time="0.25" /></testsuite></testsuites>'
    )
    assert seconds_of(report) == {"tests/auto/test_auto_race.py::test_x": 1.75}


SECONDS = {"tests/x/test_a.py::test_b": 2.0, "tests/x/test_a.py::test_c": 0.5, "tests/y/test_d.py::test_e": 0.25}


def test_long_functions_have_lines_of_their_own():
    assert recorded(SECONDS).splitlines() == [
        "    0.5 tests/x/test_a.py, the others",
        "    2.0 tests/x/test_a.py::test_b",
        "    0.2 tests/y/test_d.py, the others",
    ]


def test_seconds_by_folder():
    assert by_folder(SECONDS).splitlines() == ["    2.5 s  tests/x", "    0.2 s  tests/y"]


def test_what_runs_nightly_exists():
    assert [path for path in NIGHTLY if not (ROOT / path).exists()] == []
