"""A store of decisions in a browser: six read-only routes of a local server.

It listens on loopback unless told otherwise. Other users of the machine reach loopback too, so that each address has a
random token; and pages of other sites reach it by a name of theirs that resolves to loopback, so that `Host` is
checked. Nothing is changed, nothing is read but the store.
"""

import hmac
import json
import secrets
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from backend_kwargs.errors import BackendKwargsError, error_text, printable
from backend_kwargs.facts.decision import Decision
from backend_kwargs.page.document import Document, schema_text
from backend_kwargs.page.writing import list_page, policy, to_html, to_json

if TYPE_CHECKING:
    from backend_kwargs.auto.store import Catalogue

LOOPBACK = "127.0.0.1"
NAMES_OF_LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY = ("0.0.0.0", "::")  # noqa: S104 - compared with
SLOWEST_S = 10.0  # to send a request
LONGEST_KEY = 200

DocumentOf = Callable[[Sequence[Decision]], Document]


class Answer(NamedTuple):
    """What a route returns."""

    content: str | bytes
    kind: str = "text/html; charset=utf-8"


JSON = "application/json"


def serve(
    store: "Catalogue",
    document_of: DocumentOf,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    say: Callable[[str], object] = print,
) -> None:
    """Serve the decisions of `store` until Ctrl-C; `say` gets the address, which is secret."""
    with Server(store, document_of, host, port) as server:
        try:
            say(f"Serving {store.label} at {server.url} until Ctrl-C.")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("Stopped.")


class Server(ThreadingMixIn, TCPServer):
    """The server of one store, with a `url` that contains its token; raises BackendKwargsError if it cannot listen.

    Not an HTTPServer, which looks the name of its address up, perhaps for seconds.
    """

    daemon_threads = True  # Ctrl-C waits for no request
    allow_reuse_address = True

    def __init__(self, store: "Catalogue", document_of: DocumentOf, host: str = LOOPBACK, port: int = 0) -> None:
        self.store, self.document_of, self.host = store, document_of, host
        self.token = secrets.token_urlsafe(24)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError, TypeError, ValueError) as error:  # the last two for text that is no name
            raise BackendKwargsError(
                f"Cannot listen on {printable(host)}:{port}: {error_text(error)}. Name another."
            ) from None

    @property
    def url(self) -> str:
        """The address of the list of decisions."""
        return f"http://{self._named(self.host)}/{self.token}/"

    def _named(self, host: str) -> str:
        port = self.server_address[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def permits(self, host: str | None) -> bool:
        """Return whether a request may name the server so."""
        if self.host in ANY:  # by whatever name others reach this machine
            return host is not None
        names = NAMES_OF_LOOPBACK if self.host in NAMES_OF_LOOPBACK else (self.host,)
        return host in {*map(self._named, names)}

    def answer(self, path: str) -> Answer | None:
        """Return the answer to a request for a path, None if there is nothing."""
        _, token, *parts = path.split("/")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        match parts:
            case [""]:
                return Answer(list_page(self.store.all()))
            case ["all"]:
                return Answer(to_html(self.document_of(self.store.all())))
            case ["decisions.json"]:
                return Answer(json.dumps([_entry(each) for each in self.store.all()]), JSON)
            case ["schema.json"]:
                return Answer(schema_text(), JSON)
            case ["decision", name] if len(name) <= LONGEST_KEY:
                return self._decision(name.removesuffix(".json"), as_json=name.endswith(".json"))
        return None

    def _decision(self, key: str, *, as_json: bool) -> Answer | None:
        found = self.store.find(key)
        if found is None:
            return None
        document = self.document_of([found])
        return Answer(to_json(document), JSON) if as_json else Answer(to_html(document))


def _entry(decision: Decision) -> dict[str, str | float]:
    return {name: getattr(decision, name) for name in ("key", "winner", "compiler", "facts", "seconds", "made")}


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    server: Server
    timeout = SLOWEST_S
    server_version, sys_version = "backend-kwargs", ""

    def do_GET(self) -> None:
        """Answer a request."""
        if not self.server.permits(self.headers.get("Host")):
            self._send(HTTPStatus.FORBIDDEN, Answer("This server has another name.\n", "text/plain"))
            return
        try:
            found = self.server.answer(unquote(urlsplit(self.path).path))
        except (BackendKwargsError, ValueError) as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, Answer(f"{error_text(error)}\n", "text/plain; charset=utf-8"))
            return
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, Answer("There is nothing here.\n", "text/plain"))
        else:
            self._send(HTTPStatus.OK, found)

    do_HEAD = do_GET  # noqa: N815 - the standard library's name

    def _send(self, status: HTTPStatus, answer: Answer) -> None:
        content = answer.content.encode() if isinstance(answer.content, str) else answer.content
        self.send_response(status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", f"{policy()}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the standard library's name
        """Log nothing: addresses contain the token."""
