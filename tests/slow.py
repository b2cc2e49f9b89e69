"""Write tests/slow.txt, which `make test` leaves out, from the times of all tests: `make slow`.

The fastest functions that take LIMIT_S together are not slow: seven minutes on two cores, with the start.
"""

# ruff: noqa: T201 - a command prints

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree as ET

LIST = Path(__file__).with_suffix(".txt")
LIMIT_S = 700.0  # of one core, all cases of each function together


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


if __name__ == "__main__":
    seconds = seconds_of(Path(sys.argv[1]))
    names = slow(seconds)
    LIST.write_text("".join(f"{name}\n" for name in names))
    print(f"{LIST.name}: {len(names)} of {len(seconds)} functions, {sum(map(seconds.__getitem__, names)):.0f} s")
