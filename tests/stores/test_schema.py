"""The published schema of a decision."""

import json
import os
from pathlib import Path

from backend_kwargs.auto.store import KIND, name_of
from backend_kwargs.stores.documents import Document, decoded, encoded, schema_text
from tests.auto.graphs import MADE

SCHEMA = Path(__file__).parents[2] / "docs" / "decision-schema.json"


def test_published_schema():
    """docs/decision-schema.json is the schema of today's code; ACCEPT=1 rewrites it."""
    if os.environ.get("ACCEPT"):
        SCHEMA.write_text(schema_text(KIND), encoding="utf-8")
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(KIND)


def test_a_decision_has_what_the_schema_says():
    """Each field of a document is in the schema, each required one is in the document, and it is read back."""
    content = encoded(KIND, Document(name_of(MADE), MADE))
    schema, sealed = json.loads(SCHEMA.read_text()), json.loads(content)
    for part, value in (
        ("Sealed", sealed),
        ("Document", sealed["document"]),
        ("Decision", sealed["document"]["body"]),
        ("RaceRow", sealed["document"]["body"]["rows"][0]),
    ):
        assert {*value} <= {*schema["$defs"][part]["properties"]}
        assert {*schema["$defs"][part]["required"]} <= {*value}
    assert decoded(KIND, name_of(MADE), content).body == MADE
