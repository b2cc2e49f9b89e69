"""The server of a store: what it answers, and to whom."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from backend_kwargs.auto.store import Catalogue
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts.decision import Decision
from backend_kwargs.page import Document, parse
from backend_kwargs.page.document import Verdict, schema_text
from backend_kwargs.page.serve import Server
from backend_kwargs.page.writing import policy

KEY = "ab" * 32


def document_of(decisions):
    """Return a page that names the winners."""
    return Document("Decisions", verdict=Verdict(text=", ".join(each.winner for each in decisions)))


@contextmanager
def serving(store, **where):
    with Server(store, document_of, **where) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    store = Catalogue(tmp_path_factory.mktemp("store") / "decisions")
    store.add(
        Decision(KEY, "g", "freezing", facts="12 ops <b>", machine={"gpu": "NVIDIA H200"}, seconds=12.0, made=1.7e9),
        Decision("cd" * 32, "g", "eager", facts="2 ops", made=1.6e9),
    )
    with serving(store) as running:
        yield running


def ask(server, path, *, method="GET", **headers):
    """Return the status, the headers and the content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, content


def test_the_list(server):
    """The list has each decision, latest first, with a link to its page."""
    status, _, content = ask(server, f"/{server.token}/")
    assert status == 200
    assert content.index("12 ops &lt;b&gt;") < content.index("2 ops</a>")
    assert f'<a href="decision/{KEY}">' in content
    assert "NVIDIA H200" in content


def test_a_page_and_its_data(server):
    """A decision has a page, and the same as JSON."""
    status, _, page = ask(server, f"/{server.token}/decision/{KEY}")
    assert (status, '<p class="sentence">freezing</p>' in page) == (200, True)
    _, headers, data = ask(server, f"/{server.token}/decision/{KEY}.json")
    assert headers["Content-Type"] == "application/json"
    assert parse(data.encode()).verdict.text == "freezing"


def test_the_other_routes(server):
    """All decisions are on one page; the list and the schema are JSON."""
    assert "freezing, eager" in ask(server, f"/{server.token}/all")[2]
    assert json.loads(ask(server, f"/{server.token}/decisions.json")[2])[0] == {
        "key": KEY,
        "winner": "freezing",
        "compiler": "",
        "facts": "12 ops <b>",
        "seconds": 12.0,
        "made": 1.7e9,
    }
    assert ask(server, f"/{server.token}/schema.json")[2] == schema_text()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/decisions.json",
        "/wrong/",
        "/{token}",
        "/{token}/x",
        "/{token}/decision/zz",
        "/{token}/../{token}/",
        "/%2e%2e/",
    ],
)
def test_what_is_not_there(server, path):
    """Without the token nothing is told, and nothing but the six routes exists."""
    status, _, content = ask(server, path.format(token=server.token))
    assert (status, content) == (404, "There is nothing here.\n")


def test_every_answer_has_the_policy(server):
    """Headers of every answer, also of an error: the policy, nosniff, no-referrer; and no version of Python."""
    for path in (f"/{server.token}/", "/wrong/"):
        headers = ask(server, path)[1]
        assert headers["Content-Security-Policy"] == f"{policy()}; frame-ancestors 'none'"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Server"].strip() == "backend-kwargs"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1.evil.example:{port}", ""]
)
def test_another_host_is_refused(server, host):
    """A site whose name resolves to loopback reads nothing."""
    status, _, content = ask(server, f"/{server.token}/", Host=host.format(port=server.server_address[1]))
    assert (status, content) == (403, "This server has another name.\n")


def test_localhost_is_this_host(server):
    """The server may be named localhost."""
    assert ask(server, f"/{server.token}/", Host=f"localhost:{server.server_address[1]}")[0] == 200


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_loopback_of_ipv6(tmp_path):
    """The server listens on ::1 too, and is named so in its address."""
    with serving(Catalogue(tmp_path / "x"), host="::1") as server:
        assert server.url == f"http://[::1]:{server.server_address[1]}/{server.token}/"
        with urllib.request.urlopen(server.url, timeout=20) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_is_changed(server, method):
    """Only GET and HEAD are answered."""
    assert ask(server, f"/{server.token}/", method=method)[0] == 501


def test_head(server):
    """HEAD has the headers alone."""
    status, headers, content = ask(server, f"/{server.token}/", method="HEAD")
    assert (status, int(headers["Content-Length"]) > 1000, content) == (200, True, "")


def test_a_store_that_cannot_be_read(tmp_path):
    """A store that fails is an answer with the reason."""
    store = Catalogue(tmp_path / "x")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "decisions").symlink_to("decisions")
    with serving(store) as server:
        status, _, content = ask(server, f"/{server.token}/")
    message = f"Cannot read store '{tmp_path}/x': OSError: [Errno 40] Too many levels of symbolic links: "
    assert status == 500
    assert content.startswith(f"BackendKwargsError: {message}")


def test_a_port_that_is_taken(tmp_path):
    """The error says which address cannot be used."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BackendKwargsError) as error:
            Server(Catalogue(tmp_path / "x"), document_of, port=port)
    reason = "OSError: [Errno 98] Address already in use"
    assert str(error.value) == f"Cannot listen on 127.0.0.1:{port}: {reason}. Name another."


def test_a_token_of_its_own(server, tmp_path):
    """Each server has a random token of at least 128 bits."""
    with Server(Catalogue(tmp_path / "x"), document_of) as other:
        assert other.token != server.token
        assert len(other.token) >= 22


def test_ctrl_c_ends_it(tmp_path):
    """Ctrl-C ends the server without a traceback."""
    code = (
        "from pathlib import Path; from backend_kwargs.auto.store import Catalogue;"
        "from backend_kwargs.page.serve import serve;"
        f"serve(Catalogue(Path({str(tmp_path / 'x')!r})), None, say=lambda text: print(text, flush=True))"
    )
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = running.stdout.readline()
    os.kill(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert first.startswith(f"Serving {tmp_path}/x at http://127.0.0.1:")
    assert (out, err, running.returncode) == ("Stopped.\n", "", 0)
