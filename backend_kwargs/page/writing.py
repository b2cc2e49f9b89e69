"""A document written as a page, as a part of a notebook, and as JSON."""

from functools import cache
from typing import TYPE_CHECKING

from backend_kwargs.page.document import Document, packed

if TYPE_CHECKING:
    from jinja2 import Environment

# In JSON inside HTML: what would end the element, and line separators, which are none in JSON.
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def to_html(document: Document, *, with_code: bool = False) -> str:
    """Return the page as one HTML file; `with_code` adds the generated code, compressed."""
    template = _environment().get_template("page.html.j2")
    return template.render(document=document, data=packed(document).decode().translate(ESCAPES))


def fragment(document: Document) -> str:
    """Return the same parts for a notebook: HTML with styles that act only inside it, and no script."""
    return _environment().get_template("fragment.html.j2").render(document=document)


def to_json(document: Document, *, with_code: bool = False) -> bytes:
    """Return the data of the page alone, as `parse` reads it."""
    return packed(document)


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("backend_kwargs.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
