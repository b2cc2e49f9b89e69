"""Exit with 1, and a reason, unless a file of JUnit results is that of a run of all tests: none failed to be collected.

python -m tests.all_ran RESULTS.xml
"""

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

LEAST = 5000  # tests: many more than one module has


def why_not_all_ran(path: Path) -> str:
    """Return why the results are not those of all tests, "" if they are."""
    if not path.is_file():
        return "pytest wrote no results"
    cases = ET.parse(path).findall(".//testcase")
    errors = [each.get("name", "") for each in cases if any(e.get("message") == "collection failure" for e in each)]
    if errors:
        return f"{errors[0]} could not be collected"
    return "" if len(cases) >= LEAST else f"{len(cases)} tests were run"


if __name__ == "__main__":
    why = why_not_all_ran(Path(sys.argv[1]))
    sys.exit(why or 0)
