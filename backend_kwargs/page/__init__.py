"""A report as one HTML file that opens anywhere: made from a `Document`, which it also contains as JSON.

`to_html` writes it, `fragment` the same for a notebook, `to_json` the data alone; `parse` and `from_html` read them,
whoever wrote them. All three leave out what names a user, a machine or a place.
"""

from backend_kwargs.page.document import Document, changes, is_loud, noise_of, parse, pays_back, schema, tradeoffs_of
from backend_kwargs.page.writing import fragment, from_html, read_document, to_html, to_json

__all__ = [
    "Document",
    "changes",
    "fragment",
    "from_html",
    "is_loud",
    "noise_of",
    "parse",
    "pays_back",
    "read_document",
    "schema",
    "to_html",
    "to_json",
    "tradeoffs_of",
]
