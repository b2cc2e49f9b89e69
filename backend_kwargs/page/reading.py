"""Pages and documents read back from files that may come from anyone: their data, which the schema then checks."""

from pathlib import Path

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.files.plain_data import read_bytes
from backend_kwargs.page.document import LONGEST, Document, parse

BEGIN, END = '<script type="application/json" id="report-data">', "</script>"  # `writing` writes no "<" between them


def from_html(content: bytes, what: str = "the page") -> Document:
    """Return the document that a page contains, or raise BackendKwargsError."""
    if len(content) > LONGEST:
        raise BackendKwargsError(f"Cannot read {what}: it is longer than {LONGEST} bytes.")
    _, *found = content.decode(errors="replace").split(BEGIN)
    if len(found) != 1 or END not in found[0]:
        raise BackendKwargsError(
            f"Cannot read {what}: it must contain one report, as a page that -o wrote, and contains {len(found)}."
        )
    return parse(found[0].partition(END)[0].encode(), what)


def read_document(path: str | Path) -> Document:
    """Return the document in a file that `-o` wrote, or raise BackendKwargsError."""
    content = read_bytes(path, "a report", LONGEST)
    read = parse if content.lstrip()[:1] == b"{" else from_html
    return read(content, repr(str(path)))
