"""PostgreSQL's own: rights, the table, connections."""

import os
import threading
from contextlib import suppress

import pytest

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.stores import postgres as driver
from tests.stores.servers import QUOTED

SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'counted'"  # PgBouncer keeps those of others


@pytest.fixture
def server(postgres):
    postgres.run("DROP TABLE IF EXISTS backend_kwargs_documents")
    return postgres


@pytest.fixture
def store(server):
    opened = driver.open(server.url())
    yield opened
    opened.close()


@pytest.fixture
def counted(server):
    opened = driver.open(server.url("counted"))
    yield opened
    opened.close()


@pytest.fixture
def reader(server):
    opened = driver.open(server.url("reader"))
    yield opened
    opened.close()


def test_who_may_only_read(server, store, reader):
    """The right to read the table suffices to read, and the refusal of a write says so."""
    assert [*reader.list("")] == []
    store.put("a/b", b"1")
    server.run("GRANT SELECT ON backend_kwargs_documents TO reader")
    assert reader.get("a/b") == b"1"
    assert dict(reader.list("a/")) == {"a/b": b"1"}
    with pytest.raises(BackendKwargsError) as e:
        reader.put("a/b", b"2")
    assert str(e.value) == (
        f"Store '{reader.label}' failed: InsufficientPrivilege: permission denied for table backend_kwargs_documents."
    )


def test_a_table_that_another_one_made(server, reader):
    """Who may write the table, but may create none, needs the table; an error has the statement that makes it."""
    with pytest.raises(BackendKwargsError) as e:
        reader.put("a/b", b"1")
    statement = " ".join(driver.CREATE.split())
    assert str(e.value) == (
        f"Store '{reader.label}' failed: There is no table backend_kwargs_documents, and this user may not create it. "
        f"Who may can run: {statement}."
    )
    server.run(statement, "GRANT SELECT, INSERT, UPDATE, DELETE ON backend_kwargs_documents TO reader")
    reader.put("a/b", b"1")
    assert reader.claim("a/c", b"mine", 60)
    reader.forget("a/b")
    assert dict(reader.list("")) == {"a/c": b"mine"}


def test_a_standby_can_be_read(server, store):
    """Sessions that are read-only by default suffice to read, as on a standby."""
    store.put("a/b", b"1")
    server.run("GRANT SELECT ON backend_kwargs_documents TO reader")
    server.run("ALTER ROLE reader SET default_transaction_read_only = on")
    reader = driver.open(server.url("reader"))
    try:
        assert reader.get("a/b") == b"1"
    finally:
        reader.close()
        server.run("ALTER ROLE reader RESET default_transaction_read_only")


def test_the_table_is_made_once(server):
    """Processes that write first at the same time all succeed: threads with stores of their own."""
    stores = [driver.open(server.url()) for _ in range(8)]
    start, failed = threading.Barrier(8), []

    def put(number):
        start.wait()
        try:
            stores[number].put(f"a/{number}", b"1")
        except Exception as error:  # noqa: BLE001 - the test shows it
            failed.append(str(error))

    threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [name for name, _ in stores[0].list("")] == [f"a/{number}" for number in range(8)]
    for each in stores:
        each.close()


def test_one_connection_for_four_threads(server, counted):
    """Four threads that use one store have one connection, and none waits for ever."""
    counted.put("a/b", b"1")
    seen = []

    def get():
        for _ in range(10):
            assert counted.get("a/b") == b"1"
            seen.append(server.run(SESSIONS)[0][0])

    threads = [threading.Thread(target=get) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {1}
    assert len(seen) == 40


def test_none_across_a_fork(server, store):
    """A child opens a connection of its own, and its end leaves the parent's as it was."""
    store.put("a/b", b"1")
    mine = store._client.info.backend_pid
    child = os.fork()
    if not child:
        ok = store.get("a/b") == b"1" and store._client.info.backend_pid != mine
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get("a/b") == b"1"


def test_a_wait_for_another_transaction_ends(server, store):
    """A statement that waits for a lock fails within the limit, in the server too."""
    import psycopg

    store.put("a/b", b"1")
    short = driver.open(server.url(), 1.0)
    with psycopg.connect(server.url()) as other:
        other.execute("UPDATE backend_kwargs_documents SET document = 'x'")
        with pytest.raises(BackendKwargsError) as e:
            short.put("a/b", b"2")
        other.rollback()
    wanted = f"Store '{short.label}' failed: QueryCanceled: canceling statement due to statement timeout "
    assert str(e.value).partition("CONTEXT")[0] == wanted
    assert store.get("a/b") == b"1"


def test_a_wrong_password(server):
    """The refusal of a password does not contain it."""
    wrong = server.url().replace(QUOTED, "Zebra%40wrong")
    with pytest.raises(BackendKwargsError) as e:
        driver.open(wrong).get("a/b")
    assert "password authentication failed" in str(e.value)
    assert "Zebra" not in str(e.value)
    assert e.value.__suppress_context__


@pytest.mark.parametrize("query", ["password=Zebra%2", "sslmode=Zebra", "Zebra", "options=Zebra", "port=Zebra"])
def test_parameters_that_are_wrong(server, query):
    """libpq's errors about a URL do not show the password in it."""
    with pytest.raises(BackendKwargsError) as e:
        driver.open(f"postgresql://owner:{QUOTED}@127.0.0.1:{server.port}/postgres?{query}").get("a/b")
    assert QUOTED not in str(e.value)
    assert "pw-Zebra" not in str(e.value)


def test_too_many_clients(server, store):
    """A full server is asked again until a place is free."""
    import psycopg

    store.put("a/b", b"1")
    store.close()
    others = []
    with suppress(psycopg.OperationalError):
        while True:
            others.append(psycopg.connect(server.url("reader")))  # no superuser, for whom places are kept
    server.run("GRANT SELECT ON backend_kwargs_documents TO reader")
    reader = driver.open(server.url("reader"))
    threading.Timer(0.5, lambda: [other.close() for other in others]).start()
    assert reader.get("a/b") == b"1"
    reader.close()
