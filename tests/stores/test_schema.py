"""The published schema of a decision."""

import json
import os
from pathlib import Path

import msgspec

from backend_kwargs.auto.store import KIND, name_of
from backend_kwargs.stores.documents import Document, _Inner, _Sealed, decoded, encoded
from tests.auto.graphs import MADE

SCHEMA = Path(__file__).parents[2] / "docs" / "decision-schema.json"


def schema_text():
    """Return the JSON schema of a decision's document, as it is published."""
    (sealed, inner, body), parts = msgspec.json.schema_components((_Sealed, _Inner, KIND.body))
    parts["_Sealed"]["properties"]["document"] = inner
    parts["_Inner"]["properties"]["body"] = {"anyOf": [body, {"type": "null"}]}
    parts["_Inner"]["properties"]["kind"] = {"const": KIND.name}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"backend-kwargs {KIND.name}"}
    text = json.dumps({**head, **sealed, "$defs": parts}, indent=1, sort_keys=True)
    return text.replace("_Sealed", "Sealed").replace("_Inner", "Document") + "\n"


def test_published_schema():
    """docs/decision-schema.json is the schema of today's code; ACCEPT=1 rewrites it."""
    if os.environ.get("ACCEPT"):
        SCHEMA.write_text(schema_text(), encoding="utf-8")
    assert SCHEMA.read_text(encoding="utf-8") == schema_text()


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
