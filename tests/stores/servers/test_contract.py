"""What every driver does alike."""

import time

import pytest

from backend_kwargs.stores import Claims
from backend_kwargs.stores.documents import LARGEST, RefusedError
from backend_kwargs.stores.opening import place_in_variable

ALL = ["folder", "postgres", "pgbouncer", "redis", "s3", "memory", "file"]
THAT_CLAIM = ["postgres", "pgbouncer", "redis"]


@pytest.fixture
def store(url, monkeypatch):
    monkeypatch.setenv("STORE", url)
    opened = place_in_variable("STORE").open()
    yield opened
    if close := getattr(opened, "close", None):
        close()


every = pytest.mark.parametrize("kind", ALL)
claiming = pytest.mark.parametrize("kind", THAT_CLAIM)


@every
def test_an_empty_store(store):
    """A store that nobody has written to has nothing, and forgetting what is not there is no error."""
    assert store.get("decisions/x.json") is None
    assert [*store.list("")] == []
    store.forget("decisions/x.json")


@every
def test_put_get_list_forget(store):
    """What is put is found until it is forgotten; a later one takes its place."""
    store.put("decisions/h100/a.json", b"1")
    store.put("decisions/h100/a.json", b"2")
    store.put("decisions/a10/b.json", b"3")
    assert store.get("decisions/h100/a.json") == b"2"
    assert dict(store.list("")) == {"decisions/h100/a.json": b"2", "decisions/a10/b.json": b"3"}
    store.forget("decisions/h100/a.json")
    assert store.get("decisions/h100/a.json") is None
    assert [*store.list("decisions/")] == [("decisions/a10/b.json", b"3")]


@every
@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        pytest.param("d/", ["d/a", "d/a-b/c", "d/a.b", "d/ab/c", "d/a_b", "d/z"], id="folder"),
        pytest.param("d/a", ["d/a", "d/a-b/c", "d/a.b", "d/ab/c", "d/a_b"], id="within-a-folder"),
        pytest.param("d/a_", ["d/a_b"], id="not-a-pattern"),
        pytest.param("d", ["d/a", "d/a-b/c", "d/a.b", "d/ab/c", "d/a_b", "d/z", "d2/a"], id="part-of-a-folder"),
        pytest.param("e/", [], id="nothing"),
    ],
)
def test_prefix(store, prefix, names):
    """A list has exactly the names that begin with the prefix."""
    for name in ("d/a", "d/a-b/c", "d/a.b", "d/ab/c", "d/a_b", "d/z", "d2/a"):
        store.put(name, name.encode())
    assert dict(store.list(prefix)) == {name: name.encode() for name in names}


@every
def test_the_longest_name_and_the_largest_document(store):
    """A name of 200 characters and a document of all bytes and of the largest size come back as they were."""
    name, document = f"{'a' * 99}/{'b' * 100}", bytes(range(256)) * (LARGEST // 256)
    store.put(name, document)
    assert store.get(name) == document
    assert dict(store.list("a")) == {name: document}


@every
@pytest.mark.parametrize(
    "name", ["", "a", "../a", "a/../b", "/a/b", "a//b", "a/b/", "a/.b", "A/b", "a/b\n", "a/b*", "a/" + "b" * 199]
)
def test_a_name_that_is_none(store, name):
    """Every driver refuses the same names, before anything is asked."""
    for do in (store.get, store.forget, lambda name: store.put(name, b"1")):
        with pytest.raises(RefusedError) as e:
            do(name)
        assert str(e.value) == f"{name[:200]!r} is not the name of a document"


@every
@pytest.mark.parametrize("prefix", ["../", "/", "a//", ".", "A", "a%", "a*"])
def test_a_prefix_that_is_none(store, prefix):
    """A prefix that leads out of the store, or is a pattern, is refused."""
    with pytest.raises(RefusedError) as e:
        [*store.list(prefix)]
    assert str(e.value) == f"{prefix!r} is not the beginning of a document's name"


@every
@pytest.mark.parametrize("size", [0, LARGEST + 1])
def test_a_document_without_bytes_or_with_too_many(store, size):
    """Neither is put."""
    with pytest.raises(RefusedError) as e:
        store.put("a/b", b"0" * size)
    assert str(e.value) == f"a document has 1 to 1048576 bytes, this one {size}"


@every
def test_many_documents(store):
    """A list is whole where a driver asks for it in parts."""
    wanted = {f"many/{number:03}": str(number).encode() for number in range(130)}
    for name, document in wanted.items():
        store.put(name, document)
    assert dict(store.list("many/")) == wanted


@every
def test_a_list_is_fetched_in_parts(store):
    """What is removed while the first part is read is not there: the whole is never in memory."""
    names = [f"parts/{number:03}" for number in range(200)]
    for name in names:
        store.put(name, b"1")
    listed = store.list("parts/")
    first, _ = next(listed)
    store.forget(names[-1])
    assert [first, *(name for name, _ in listed)] == names[:-1]


@every
def test_is_named_without_what_is_secret(store, url):
    """Neither the label nor the repr has a password or a user."""
    for text in (store.label, repr(store)):
        assert "Zebra" not in text
        assert "owner" not in text


@pytest.mark.parametrize("kind", ["folder", "s3", "memory", "file"])
def test_claims_nothing(store):
    """A driver whose server has no clock for it does not claim."""
    assert not isinstance(store, Claims)


@claiming
def test_one_claims(store):
    """A name is given to one, again to the same one, and to another after it was forgotten."""
    assert isinstance(store, Claims)
    assert store.claim("units/a", b"first", 60)
    assert not store.claim("units/a", b"second", 60)
    assert store.claim("units/a", b"first", 60)
    assert store.get("units/a") == b"first"
    assert dict(store.list("units/")) == {"units/a": b"first"}
    store.forget("units/a")
    assert store.claim("units/a", b"second", 60)


@claiming
def test_what_was_put_is_not_claimed(store):
    """A document without a lease is never claimed, and one that is put over a claim stays."""
    store.put("units/a", b"done")
    assert not store.claim("units/a", b"done", 60)
    assert not store.renew("units/a", b"done", 0.001)
    assert store.claim("units/b", b"mine", 0.2)
    store.put("units/b", b"done")
    time.sleep(0.3)
    assert dict(store.list("units/")) == {"units/a": b"done", "units/b": b"done"}


@claiming
def test_a_lease_ends(store):
    """A claim whose lease has ended is gone for everybody, until another one claims."""
    assert store.claim("units/a", b"first", 0.1)
    time.sleep(0.2)
    assert store.get("units/a") is None
    assert [*store.list("")] == []
    assert not store.renew("units/a", b"first", 60)
    assert store.claim("units/a", b"second", 60)
    assert not store.renew("units/a", b"first", 60)
    assert dict(store.list("")) == {"units/a": b"second"}


@claiming
def test_a_renewed_lease_lasts(store):
    """A renewal counts from the time of it."""
    assert store.claim("units/a", b"first", 3)
    assert store.renew("units/a", b"first", 60)
    time.sleep(3.1)
    assert store.get("units/a") == b"first"
