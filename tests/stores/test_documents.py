"""Documents: what is kept of a body, and which of them are not used."""

import json
import time
from dataclasses import dataclass, replace

import pytest

from backend_kwargs.stores.documents import (
    LARGEST,
    NEWEST,
    Document,
    Kind,
    RefusedError,
    decoded,
    encoded,
    heading,
    readable,
)
from tests.auto.graphs import seal


@dataclass
class Body:
    """What a test keeps."""

    text: str = ""
    number: float = 0.0


KIND = Kind("unit", Body)
NAME = "units/a.json"
MADE = Document(NAME, Body("ä\n", 0.1), 3, 1.5, "team")


@pytest.fixture
def keys():
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    return [ed25519.Ed25519PrivateKey.generate() for _ in range(2)]


def refused(content, kind=KIND, name=NAME, **given):
    with pytest.raises(RefusedError) as e:
        decoded(kind, name, content, **given)
    return str(e.value)


def test_a_document_is_read_back():
    """Its body, generation, date and label are those that were written."""
    read = decoded(KIND, NAME, encoded(KIND, MADE))
    assert replace(read, sha256="") == MADE
    assert heading(encoded(KIND, MADE)).order == read.order


def test_a_tombstone_has_no_body():
    """What was forgotten is known by its name, and is newer than what it stands for."""
    content = encoded(KIND, Document(NAME, None).after(MADE))
    assert readable(content).body is None
    assert readable(encoded(KIND, MADE)).body is not None
    read = decoded(KIND, NAME, content)
    assert (read.body, read.generation) == (None, 4)


def test_the_newer_of_two():
    """A later generation wins; of one generation the later, and the same one on every machine."""
    later = replace(MADE, generation=4, made=0.0)
    assert later.order > MADE.order
    assert replace(MADE, made=2.0).order > MADE.order
    forgotten = Document(NAME, None, 3, 0.0)
    assert forgotten.order > MADE.order
    assert heading(encoded(KIND, forgotten)).order > heading(encoded(KIND, MADE)).order
    assert Document(NAME, None).after(None).generation == 1
    assert replace(MADE, generation=9).after(MADE).generation == 9


def test_no_generation_is_the_last():
    """A document that claims the largest generation can still be replaced by a valid one."""
    last = replace(MADE, generation=NEWEST)
    again = replace(MADE, made=9.0).after(last)
    assert decoded(KIND, NAME, encoded(KIND, again)).order > decoded(KIND, NAME, encoded(KIND, last)).order


def inner(**changed):
    return json.dumps(json.loads(encoded(KIND, MADE))["document"] | changed).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(inner(name="units/b.json"), "it is unit 'units/b.json'", id="another name"),
        pytest.param(inner(kind="decision"), "it is decision 'units/a.json'", id="another kind"),
        pytest.param(
            inner(schema=2), "a newer release of backend-kwargs wrote it (schema 2); update this one", id="newer"
        ),
        pytest.param(
            inner(generation=0), "it is not a document: ValidationError: Expected `int` >= 1", id="generation"
        ),
        pytest.param(inner(generation=2**64), "it is not a document: ValidationError: ", id="endless generation"),
        pytest.param(
            inner(made=time.time() + 1e5),
            "it was made more than a day after now, by its maker's clock or this one's",
            id="of the future",
        ),
        pytest.param(inner(body={"text": 3}), "its unit is not valid: ValidationError: Expected `str`", id="body"),
        pytest.param(inner(body=None), "its unit is not valid: ValidationError: Expected `object`", id="no body"),
        pytest.param(inner(label="x" * 201), "it is not a document: ValidationError: ", id="label"),
        pytest.param(inner().replace(b"0.1", b"NaN"), "it is not a document: ", id="NaN"),
        pytest.param(inner().replace(b"0.1", b"1e999"), "its unit is not valid: ", id="infinite"),
        pytest.param(inner().replace(b"0.1", b"[" * 10**5), "it is not a document: ", id="deep"),
        pytest.param(inner(more="x" * LARGEST), f"it has more than {LARGEST} bytes", id="huge"),
    ],
)
def test_what_is_not_used(tmp_path, content, why):
    """A document that is another, of a later release, malformed or too long is refused with the reason."""
    seal(tmp_path / "a", content)
    assert refused((tmp_path / "a").read_bytes()).startswith(why)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"{}", b"[]", b"null", b'{"sha256": "", "document": {}}', b"x" * (LARGEST + 1), b"[" * 10**5],
)
def test_what_is_no_document(content):
    """Anything else is refused, and is no tombstone."""
    refused(content)
    assert readable(content) is None


def test_what_was_changed_is_not_used():
    """The SHA-256 is that of the exact bytes."""
    content = encoded(KIND, MADE)
    assert refused(content.replace(b"0.1", b"0.2")) == "its SHA-256 is another: it was changed, or written in part"
    assert refused(content[:-10]).startswith("it is not a document: DecodeError: ")


def test_what_would_be_refused_is_not_written():
    """A document that nobody could read, such as one with a label that is too long, is refused when it is made."""
    with pytest.raises(RefusedError) as error:
        encoded(KIND, Document(NAME, Body(1), label="a" * 201))
    assert str(error.value) == "it is not a document: ValidationError: Expected `str` of length <= 200 - at `$.label`"


def test_what_is_too_long_is_not_written():
    """The error says how long it would be."""
    with pytest.raises(RefusedError, match=rf"^it would have \d+ bytes, more than {LARGEST}$"):
        encoded(KIND, Document(NAME, Body("x" * LARGEST)))


# ---- signatures


def test_a_signed_document_is_read_by_its_key(keys):
    """One of several keys suffices, and copies keep their signature."""
    content = encoded(KIND, MADE, keys[0])
    public = [key.public_key() for key in keys]
    assert decoded(KIND, NAME, bytes(content), trusted_keys=public).body == MADE.body
    assert decoded(KIND, NAME, content).body == MADE.body


def test_what_no_trusted_key_signed_is_not_used(keys):
    """Without a signature, with another's, and with that of another document."""
    trusted = [keys[0].public_key()]
    assert refused(encoded(KIND, MADE), trusted_keys=trusted) == "it is not signed"
    others = "it is signed by none of the trusted keys"
    assert refused(encoded(KIND, MADE, keys[1]), trusted_keys=trusted) == others
    signature = json.loads(encoded(KIND, replace(MADE, generation=9), keys[0]))["signature"]
    copied = json.loads(encoded(KIND, MADE)) | {"signature": signature}
    raw = encoded(KIND, MADE).replace(b'"signature":""', f'"signature":"{copied["signature"]}"'.encode())
    assert refused(raw, trusted_keys=trusted) == others


def test_a_body_under_another_name():
    """Where a body says its document's name, it is not read under another one."""
    kind = replace(KIND, named=lambda body: f"units/{body.number}.json")
    content = encoded(KIND, MADE)
    assert refused(content, kind) == "the unit in it is 'units/0.1.json'"
    assert decoded(replace(kind, named=lambda body: NAME), NAME, content).body == MADE.body


def test_a_signature_is_for_one_kind(keys):
    """The bytes of another kind's document, signed as such, are not this one's, nor those of a bundle."""
    other = Kind("decision", Body)
    content = encoded(other, MADE, keys[0])
    assert refused(content, trusted_keys=[keys[0].public_key()]) == "it is decision 'units/a.json'"
    from backend_kwargs.stores.documents import signer

    sealed = json.loads(content)
    raw, signature = content[content.index(b'"document":') + 11 : -1], bytes.fromhex(sealed["signature"])
    public = [keys[0].public_key()]
    assert signer("backend-kwargs decision 1", raw, signature, public) is public[0]
    for domain in ("backend-kwargs unit 1", "backend-kwargs bundle 1", ""):
        assert signer(domain, raw, signature, public) is None
