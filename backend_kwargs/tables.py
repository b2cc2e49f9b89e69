"""Tables of results as text and as HTML, for `print` and for notebooks."""

from collections.abc import Iterable, Sequence
from html import escape

from backend_kwargs.errors import printable


def as_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows under a header, in columns."""
    lines = [tuple(printable(str(cell), keep="\n") for cell in row) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def as_html(
    header: Sequence[str], rows: Iterable[Sequence[object]], before: str = "", after: Iterable[str] = ()
) -> str:
    """Return rows as an HTML table between a heading and paragraphs; all text is escaped."""
    head = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr>"
    body = "".join(f"<tr>{''.join(f'<td>{_lines(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    heading = f"<p><b>{escape(before)}</b></p>" if before else ""
    return f"{heading}<table>{head}{body}</table>{''.join(f'<p>{_lines(line)}</p>' for line in after)}"


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")
