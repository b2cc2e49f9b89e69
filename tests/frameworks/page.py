"""docs/frameworks.md: its sections, and their Python blocks, which the tests run."""

import gc
import re
from pathlib import Path
from typing import Any

TEXT = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))


def snippets(section: str) -> list[str]:
    """Return the Python blocks of a section of the page."""
    return re.findall(r"^```python\n(.*?)^```$", SECTIONS[section], re.DOTALL | re.MULTILINE)


def run(section: str, which: int = 0, **names: Any) -> dict[str, Any]:
    """Run one Python block of a section with `names` defined; return all names afterwards."""
    exec(compile(snippets(section)[which], f"<docs/frameworks.md, {section!r}>", "exec"), names)
    return names


def compiled() -> list[str]:
    """Return the spec of each compiled graph that is alive."""
    from backend_kwargs.compile_records import records

    gc.collect()  # cycles of an earlier test's trainer
    return [record.spec for record in records()]
