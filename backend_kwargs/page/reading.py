"""Pages and documents read back from files that may come from anyone.

The standard library's parser of HTML takes time quadratic in the length of a hostile page: a minute for 80 kB of "<a ".
So pages are read by a grammar of what `writing` writes, and a file with anything else is no page.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.files.plain_data import read_bytes
from backend_kwargs.page.document import LONGEST, Document, parse

DATA = 'type="application/json" id="report-data"'
# Each part matches in one way only, so that the time is linear.
TAG = re.compile(
    r"[^<]*+<(?P<closing>/?+)(?P<name>!?+[A-Za-z][A-Za-z0-9]*+)"
    r"(?P<attributes>(?:\s++[A-Za-z][\w:-]*+(?:=\"[^\"<]*+\")?+)*+)\s*+/?+>"
)
RAW = ("script", "style")  # their text ends at their own closing tag


def from_html(content: bytes, what: str = "the page") -> Document:
    """Return the document that a page contains, or raise BackendKwargsError."""
    if len(content) > LONGEST:
        raise BackendKwargsError(f"Cannot read {what}: it is longer than {LONGEST} bytes.")
    found = [*_data_of(content.decode(errors="replace"), what)]
    if len(found) != 1:
        raise BackendKwargsError(
            f"Cannot read {what}: it must contain one report, as a page that -o wrote, and contains {len(found)}."
        )
    return parse(found[0].encode(), what)


def read_document(path: str | Path) -> Document:
    """Return the document in a file that `-o` wrote, or raise BackendKwargsError."""
    content = read_bytes(path, "a report", LONGEST)
    read = parse if content.lstrip()[:1] == b"{" else from_html
    return read(content, repr(str(path)))


def _data_of(page: str, what: str) -> Iterator[str]:
    """Yield the text of each element that holds the data of a page."""
    at = 0
    while page.find("<", at) >= 0:
        tag = TAG.match(page, at)
        if tag is None:
            raise BackendKwargsError(f"Cannot read {what}: it is not a page that -o wrote, from character {at} on.")
        at = tag.end()
        if tag["name"] in RAW and not tag["closing"]:
            end = page.find(f"</{tag['name']}>", at)
            if end < 0:
                raise BackendKwargsError(f"Cannot read {what}: its <{tag['name']}> has no end.")
            if tag["attributes"].strip() == DATA:
                yield page[at:end]
            at = end
