"""Servers that are away: nobody listens, nobody answers, an answer ends in the middle, a server is frozen."""

import os
import random
import signal
import socket
import threading
from contextlib import suppress

import pytest

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.stores import objects, postgres, redis
from tests.stores.servers import free_port

DRIVERS = {
    "postgres": (postgres, "postgresql://u:pw-Zebra@127.0.0.1:{}/db"),
    "redis": (redis, "redis://:pw-Zebra@127.0.0.1:{}/0"),
    "s3": (objects, "s3://bucket/prefix"),
}
CALLS = {
    "get": lambda store: store.get("a/b"),
    "put": lambda store: store.put("a/b", b"1"),
    "list": lambda store: [*store.list("a/")],
}
drivers = pytest.mark.parametrize("kind", DRIVERS)
calls = pytest.mark.parametrize("call", CALLS)


@pytest.fixture
def opened(kind, monkeypatch, request):
    """Return a function that opens the driver's store at a port."""
    pytest.importorskip({"postgres": "psycopg", "redis": "redis", "s3": "s3fs"}[kind])
    if kind == "s3":
        request.getfixturevalue("no_file_systems")
    module, url = DRIVERS[kind]

    def at(port, limit_s=2.0):
        variables = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "pw-Zebra"}
        for name, value in variables.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        return module.open(url.format(port), limit_s)

    return at


def failed(store, call):
    """Return the error of a call: one line without a password; meanwhile nothing is drawn of `random`."""
    drawn = random.getstate()
    with pytest.raises(BackendKwargsError) as e:
        CALLS[call](store)
    assert random.getstate() == drawn
    text = str(e.value)
    assert text.startswith(f"Store {store.label!r} failed: ")
    assert "Zebra" not in text
    assert "\n" not in text
    return text


@drivers
@calls
def test_nobody_listens(opened, call):
    """A refused connection is an error."""
    failed(opened(free_port()), call)


def test_nobody_listens_where_fsspec_lists_nothing():
    """A refused connection is an error also where fsspec's `find` leaves out the folders that it cannot list."""
    pytest.importorskip("aiohttp")
    assert "Cannot connect to host" in failed(objects.open(f"http://127.0.0.1:{free_port()}/decisions"), "list")


@drivers
@calls
def test_nobody_answers(opened, call):
    """A server that accepts and never answers is given up within the limit: the test would not end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        text = failed(opened(listening.getsockname()[1], 0.3), call)
    assert "imeout" in text


@drivers
@calls
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        b"R\0\0",
        b"+PO",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        b"\xff" * 5000,
    ],
)
def test_an_answer_ends_in_the_middle(opened, call, answer):
    """A server that closes, before its answer or in it, or that speaks another language, is an error."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answers():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connection.settimeout(1.0)  # of a client that gave up before it asked
                with connection, suppress(OSError):
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=answers, daemon=True)
        thread.start()
        failed(opened(listening.getsockname()[1], 0.5), call)  # an object store is asked again until then
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("kind", ["postgres", "redis"])
@calls
def test_frozen_in_the_middle(kind, call, request):
    """A server that stops answering on an open connection is given up within the limit, and is used again later."""
    server = request.getfixturevalue({"postgres": "postgres", "redis": "redis_server"}[kind])
    store = DRIVERS[kind][0].open(server.url(), 2.0)
    store.put("a/b", b"1")
    stopped = [store._client.info.backend_pid] if kind == "postgres" else [server.process.pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        failed(store, call)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert store.get("a/b") == b"1"
    store.close()
