"""Absolute links in the README, for the package's page on an index; everything else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PLACE = re.compile(r"(!?)(\[[^\[\]]*\]\()(?!https?:|#)([^()\s]+\))")  # of a relative link, or of an image


def absolute(readme: str, source: str, tag: str) -> str:
    """Return the text with links to files of the repository `source`, as of `tag`, in place of relative ones."""
    linked = PLACE.sub(lambda at: f"{at[1]}{at[2]}{source}/{'raw' if at[1] else 'blob'}/{tag}/{at[3]}", readme)
    return linked.replace("](#", f"]({source}/blob/{tag}/README.md#")


README = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=absolute(README, PROJECT["urls"]["Source"], f"v{PROJECT['version']}"),
    long_description_content_type="text/markdown",
)
