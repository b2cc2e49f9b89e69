"""The data of a page: its schema, its version, and what is refused."""

import json
import os
from pathlib import Path

import pytest

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.page import Document, from_html, parse, read_document, to_html, to_json
from backend_kwargs.page.document import LONGEST, Result, Verdict, Warned, schema
from tests.page import examples

SCHEMA = Path(__file__).parents[2] / "docs" / "report-schema.json"


def test_published_schema():
    """docs/report-schema.json is the schema of today's code; ACCEPT=1 rewrites it, after a new VERSION."""
    text = json.dumps(schema(), indent=1, sort_keys=True) + "\n"
    if os.environ.get("ACCEPT"):
        SCHEMA.write_text(text, encoding="utf-8")
    assert SCHEMA.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("document", [examples.document(), examples.compared()], ids=["all parts", "a real compare"])
def test_a_page_can_be_made_again(document):
    """The JSON in a page gives the same page."""
    page = to_html(document)
    again = from_html(page.encode())
    assert to_html(again) == page
    assert again == parse(to_json(document))


def test_read_document_reads_both(tmp_path):
    """A file of --html and one of --json have the same document."""
    (tmp_path / "a.html").write_text(to_html(examples.document()), encoding="utf-8")
    (tmp_path / "a.json").write_bytes(to_json(examples.document()))
    assert read_document(tmp_path / "a.html") == read_document(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"", "DecodeError: Input data was truncated.", id="empty"),
        pytest.param(b"[1]", "ValidationError: Expected `object`, got `array`.", id="no object"),
        pytest.param(
            b'{"title": "x", "version": 2}',
            "its layout has version 2, this release reads 1: make it again.",
            id="another version",
        ),
        pytest.param(
            b'{"title": "x"}', "its layout has version 0, this release reads 1: make it again.", id="without version"
        ),
        pytest.param(
            b'{"title": "x", "version": 1, "extra": 1}',
            "ValidationError: Object contains unknown field `extra`.",
            id="unknown field",
        ),
        pytest.param(
            b'{"title": 1, "version": 1}', "ValidationError: Expected `str`, got `int` - at `$.title`.", id="wrong type"
        ),
        pytest.param(
            b'{"title": "%s", "version": 1}' % (b"x" * 501),
            "ValidationError: Expected `str` of length <= 500 - at `$.title`.",
            id="long name",
        ),
        pytest.param(
            json.dumps({"title": "x", "version": 1, "speedups": [{"rows": [{"name": "a"}] * 2001}]}).encode(),
            "ValidationError: Expected `array` of length <= 2000 - at `$.speedups[0].rows`.",
            id="many rows",
        ),
        pytest.param(
            b'{"title": "x", "version": 1, "verdict": {"compile_s": -1}}',
            "ValidationError: Expected `float` >= 0.0 - at `$.verdict.compile_s`.",
            id="negative time",
        ),
        pytest.param(
            b'{"title": "x", "version": 1, "verdict": {"compile_s": 1e999}}',
            "ValidationError: Number out of range - at `$.verdict.compile_s`.",
            id="infinite time",
        ),
        pytest.param(
            b'{"title": ' + b"[" * 100_000,
            "RecursionError: maximum recursion depth exceeded while deserializing an object.",
            id="nested deeply",
        ),
        pytest.param(
            b'{"title": "\xff", "version": 1}',
            "DecodeError: Invalid UTF-8 encoded string.",
            id="no UTF-8",
        ),
        pytest.param(b" " * (LONGEST + 1), f"it is longer than {LONGEST} bytes.", id="too long"),
    ],
)
def test_what_is_refused(content, why):
    """Content that is no document is refused with the reason."""
    with pytest.raises(BackendKwargsError) as error:
        parse(content)
    assert str(error.value) == f"Cannot read the report: {why}"


PAGE = to_html(Document("x"))
DATA = '<script type="application/json" id="report-data">'
NO_PAGE = "it must contain one report, as a page that -o wrote, and"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param("", f"{NO_PAGE} contains 0.", id="empty"),
        pytest.param(PAGE + PAGE, f"{NO_PAGE} contains 2.", id="two reports"),
        pytest.param("<a " * 100_000, f"{NO_PAGE} contains 0.", id="tags without an end"),
        pytest.param(f"{DATA}{{}}", f"{NO_PAGE} ends within it.", id="data without an end"),
        pytest.param(f"<p title='{DATA}'>", f"{NO_PAGE} ends within it.", id="in a title"),
        pytest.param(
            f"{DATA}<!--</script>", "DecodeError: JSON is malformed: invalid character (byte 0).", id="no JSON"
        ),
        pytest.param(
            f"{DATA}{{}}</script>", "its layout has version 0, this release reads 1: make it again.", id="no data"
        ),
    ],
)
def test_what_is_no_page(content, why):
    """A file that --html did not write is refused, in linear time."""
    with pytest.raises(BackendKwargsError) as error:
        from_html(content.encode())
    assert str(error.value) == f"Cannot read the page: {why}"


def test_a_file_that_is_not_there(tmp_path):
    """The error names the file."""
    with pytest.raises(BackendKwargsError) as error:
        read_document(tmp_path / "gone.json")
    message = f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path}/gone.json'"
    assert str(error.value) == f"Cannot read a report from '{tmp_path}/gone.json': {message}."


def test_a_long_text_costs_no_page():
    """What exceeds the schema's limits is cut on writing, and what JSON cannot say is left out."""
    document = Document(
        "x" * 600, warnings=(Warned("w" * 9000),), accuracy=(Result("r"),) * 5001, verdict=Verdict(error=float("nan"))
    )
    read = parse(to_json(document))
    assert read.title == "x" * 499 + "…"
    assert len(read.accuracy) == 5000
    assert read.warnings[0].text == "w" * 7999 + "…"
    assert read.verdict.error is None
