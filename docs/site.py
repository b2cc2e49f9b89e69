"""mkdocs hook: files of the repository that a page links to become part of the site, at the same path.

The page of the results on an H200 is made from their records.
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
H200, RECORDS = "h200.html", ROOT / "benchmarks" / "results" / "h200" / "models.jsonl"
LINK = re.compile(r"\]\(([^)#:\s]+)")  # of Markdown, within the repository


def on_files(files: Files, config: Any) -> Files:
    """Add the page of the results, and the files outside docs/ that the pages reach by links."""
    files.append(File.generated(config, H200, content=page_of_results()))
    left = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    added: set[Path] = set()
    while left:
        page = left.pop()
        for target in {(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))}:
            inside = target.is_relative_to(ROOT) and not target.is_relative_to(ROOT / "docs")
            if target.is_file() and inside and target not in added:
                added.add(target)
                left += [target] if target.suffix == ".md" else []
                files.append(File.generated(config, place(target), abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at where the site has the files."""
    source = Path(page.file.abs_src_path)
    depth = "../" * (len(Path(page.file.src_uri).parts) - 1)

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            return match[0]
        inside = target.relative_to(ROOT / "docs").as_posix() if target.is_relative_to(ROOT / "docs") else place(target)
        return f"]({depth}{inside}"

    return LINK.sub(moved, markdown)


def page_of_results() -> str:
    """Return the page of the real models on an H200."""
    sys.path.insert(0, str(ROOT))  # the suite is not installed
    try:
        from backend_kwargs.page import to_html
        from benchmarks.analysis.page import document_of
        from benchmarks.execution import records
    finally:
        sys.path.remove(str(ROOT))
    return to_html(document_of(records.read(RECORDS)))


def place(target: Path) -> str:
    """Return where a file outside docs/ lies on the site; README.md would be the page of its folder."""
    return target.relative_to(ROOT).as_posix().replace("README.md", "README_.md")
