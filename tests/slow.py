"""Write tests/slow.txt, which `make test` leaves out, and tests/seconds.txt from the times of all tests: `make slow`.

The fastest functions that take LIMIT_S together are not slow: seven minutes on two cores, with the start. Of what is
slow, NIGHTLY is left out before a change lands too.
"""

# ruff: noqa: T201 - a command prints

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree as ET

LIST = Path(__file__).with_suffix(".txt")
SECONDS = LIST.with_name("seconds.txt")
LIMIT_S = 700.0  # of one core, all cases of each function together
LEAST_S = 1.0  # of a function that has a line of its own
# TVM's own converters and builds, samples of torch's operators, the benchmarks, and servers killed in a loop.
NIGHTLY = (
    "tests/backends/tvm/",
    "tests/backends/test_engines_opinfo.py",
    "tests/benchmarks/",
    "tests/stores/servers/test_kill.py",
)


def seconds_of(report: Path) -> Counter[str]:
    """Return how long each function took in a report of `pytest --junitxml`, by its name as pytest writes it."""
    seconds: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/")
        seconds[f"{path}.py::{case.attrib['name'].partition('[')[0]}"] += float(case.attrib["time"])
    return seconds


def slow(seconds: Mapping[str, float], limit_s: float = LIMIT_S) -> list[str]:
    """Return the functions that take longer than those which take `limit_s` together; each folder keeps its fastest."""
    left, found, folders = limit_s, [], set()
    for name in sorted(seconds, key=seconds.__getitem__):
        left -= seconds[name]
        folder = PurePosixPath(name.partition("::")[0]).parent
        if left < 0 and folder in folders:
            found.append(name)
        folders.add(folder)
    return sorted(found)


def recorded(seconds: Mapping[str, float]) -> str:
    """Return the lines of seconds.txt: each function of LEAST_S or more, and the others of a file together."""
    rows: Counter[str] = Counter()
    for name, taken in seconds.items():
        rows[name if taken >= LEAST_S else f"{name.partition('::')[0]}, the others"] += taken
    return "".join(f"{rows[name]:7.1f} {name}\n" for name in sorted(rows))


def by_folder(seconds: Mapping[str, float]) -> str:
    """Return the seconds of each folder, the longest first."""
    folders: Counter[str] = Counter()
    for name, taken in seconds.items():
        folders[str(PurePosixPath(name.partition("::")[0]).parent)] += taken
    return "\n".join(f"{taken:7.1f} s  {folder}" for folder, taken in folders.most_common())


if __name__ == "__main__":
    seconds = seconds_of(Path(sys.argv[1]))
    names = slow(seconds)
    LIST.write_text("".join(f"{name}\n" for name in names))
    SECONDS.write_text(recorded(seconds))
    print(by_folder(seconds))
    print(f"{LIST.name}: {len(names)} of {len(seconds)} functions, {sum(map(seconds.__getitem__, names)):.0f} s")
