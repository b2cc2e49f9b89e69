"""Pages and documents read back from files that may come from anyone."""

from html.parser import HTMLParser
from pathlib import Path

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.files.plain_data import read_bytes
from backend_kwargs.page.document import LONGEST, Document, parse

DATA_ID = "report-data"
DATA_TYPE = "application/json"


def from_html(content: bytes, what: str = "the page") -> Document:
    """Return the document that a page contains, or raise BackendKwargsError."""
    if len(content) > LONGEST:
        raise BackendKwargsError(f"Cannot read {what}: it is longer than {LONGEST} bytes.")
    finder = _DataFinder()
    finder.feed(content.decode(errors="replace"))
    finder.close()
    if finder.count != 1:
        raise BackendKwargsError(
            f"Cannot read {what}: it must contain one report, as a page written by --html does, and contains "
            f"{finder.count}."
        )
    return parse("".join(finder.found).encode(), what)


def read_document(path: str | Path) -> Document:
    """Return the document in a file that `--html` or `--json` wrote, or raise BackendKwargsError."""
    content = read_bytes(path, "a report", LONGEST)
    read = parse if content.lstrip()[:1] == b"{" else from_html
    return read(content, repr(str(path)))


class _DataFinder(HTMLParser):
    """Collects the text of the element that holds the data."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.count = 0
        self.found: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note whether the data begin."""
        given = dict(attrs)
        self.inside = tag == "script" and given.get("id") == DATA_ID and given.get("type") == DATA_TYPE
        self.count += self.inside

    def handle_endtag(self, tag: str) -> None:
        """Note that the data end."""
        self.inside = False

    def handle_data(self, data: str) -> None:
        """Keep the data."""
        if self.inside:
            self.found.append(data)
