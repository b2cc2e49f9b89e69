"""Redis's own: the set of names, rights, connections."""

import os

import pytest

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.stores import redis as driver


@pytest.fixture
def server(redis_server):
    redis_server.client().flushall()
    return redis_server


@pytest.fixture
def store(server):
    opened = driver.open(server.url())
    yield opened
    opened.close()


def test_a_string_without_its_name(server, store):
    """A document whose name was lost is found by its name, and is listed again from then on."""
    store.put("a/b", b"1")
    server.client().delete(driver.NAMES)
    assert [*store.list("")] == []
    assert store.get("a/b") == b"1"
    assert dict(store.list("")) == {"a/b": b"1"}


def test_a_name_without_its_string(server, store):
    """A name whose document is gone is left out of a list, and is taken off it."""
    store.put("a/b", b"1")
    store.put("a/c", b"2")
    server.client().delete(f"{driver.DOCUMENT}a/b")
    assert dict(store.list("")) == {"a/c": b"2"}
    assert server.client().zrange(driver.NAMES, 0, -1) == [b"a/c"]


def test_what_others_wrote_is_no_document(server, store):
    """Names and values that no driver writes are left out."""
    client = server.client()
    client.zadd(driver.NAMES, {"../../etc/passwd": 0, b"\xff/x": 0, "a/long": 0, "a/b": 0})
    client.set(f"{driver.DOCUMENT}../../etc/passwd", b"1")
    client.set(f"{driver.DOCUMENT}a/long", b"1" * (1 << 21))
    client.set(f"{driver.DOCUMENT}a/b", b"1")
    assert dict(store.list("")) == {"a/b": b"1"}
    assert store.get("a/long") is None


def test_who_may_only_read(server, store):
    """A user who may only read reads, also where the set of names is out of step."""
    store.put("a/b", b"1")
    store.put("a/c", b"1")
    server.client().delete(f"{driver.DOCUMENT}a/c")
    server.client().zrem(driver.NAMES, "a/b")
    reader = driver.open(server.url("server"))
    assert reader.get("a/b") == b"1"
    assert [*reader.list("")] == []
    with pytest.raises(BackendKwargsError) as e:
        reader.put("a/b", b"2")
    assert str(e.value).startswith(f"Store '{reader.label}' failed: NoPermissionError: ")
    reader.close()


def test_a_wrong_password(server):
    """The refusal of a password does not contain it."""
    with pytest.raises(BackendKwargsError) as e:
        driver.open(f"redis://:Zebra@127.0.0.1:{server.port}/0").get("a/b")
    assert str(e.value) == (
        f"Store 'redis://127.0.0.1:{server.port}/0' failed: AuthenticationError: "
        "invalid username-password pair or user is disabled."
    )


def test_none_across_a_fork(server, store):
    """A child opens a connection of its own, and its end leaves the parent's as it was."""
    store.put("a/b", b"1")
    mine = store._client.client_id()
    child = os.fork()
    if not child:
        os._exit(0 if store.get("a/b") == b"1" and store._client.client_id() != mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store._client.client_id() == mine
