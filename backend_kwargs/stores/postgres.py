"""Documents in a table of PostgreSQL, also behind PgBouncer: no statement relies on an earlier one's session."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.stores.connections import LIMIT_S, Connection
from backend_kwargs.stores.documents import LARGEST, check_content, check_name, check_prefix, is_name
from backend_kwargs.stores.urls import failure, label_of

if TYPE_CHECKING:
    import psycopg

TABLE = "backend_kwargs_documents"
CREATE = f"""CREATE TABLE IF NOT EXISTS {TABLE} (
  name text COLLATE "C" PRIMARY KEY,
  document bytea NOT NULL,
  changed timestamptz NOT NULL DEFAULT now(),
  lease_until timestamptz
)"""
# A claim whose lease has ended is as if it were not there.
_LIVE = f"(lease_until IS NULL OR lease_until > clock_timestamp()) AND octet_length(document) <= {LARGEST}"
_LEASE = "clock_timestamp() + %s * interval '1 second'"
_GET = f"SELECT document FROM {TABLE} WHERE name = %s AND {_LIVE}"
_LIST = f"SELECT name, document FROM {TABLE} WHERE name >= %s AND name < %s AND {_LIVE} ORDER BY name LIMIT %s"
_FORGET = f"DELETE FROM {TABLE} WHERE name = %s"
_PUT = f"""INSERT INTO {TABLE} (name, document) VALUES (%s, %s) ON CONFLICT (name)
DO UPDATE SET document = EXCLUDED.document, changed = now(), lease_until = NULL"""
_CLAIM = f"""INSERT INTO {TABLE} AS kept (name, document, lease_until) VALUES (%s, %s, {_LEASE}) ON CONFLICT (name)
DO UPDATE SET document = EXCLUDED.document, changed = now(), lease_until = EXCLUDED.lease_until
WHERE kept.lease_until <= clock_timestamp() OR (kept.lease_until IS NOT NULL AND kept.document = EXCLUDED.document)
RETURNING name"""
_RENEW = f"""UPDATE {TABLE} SET lease_until = {_LEASE} WHERE name = %s AND document = %s
AND lease_until > clock_timestamp() RETURNING name"""
_AFTER_ALL_NAMES = "~"
_NEXT = "\x01"  # after a name: the first text that is behind it
_AT_ONCE = 100  # documents of one answer


def open(url: str, limit_s: float = LIMIT_S) -> "Postgres":  # noqa: A001 - the drivers' common name
    """Return the store at `url`, whose calls take at most `limit_s` seconds; nothing is connected yet."""
    return Postgres(url, label_of(url), limit_s)


class Postgres:
    """A store of documents in one table, which the first `put` or `claim` creates."""

    def __init__(self, url: str, label: str, limit_s: float) -> None:
        self.label = label
        self._url, self._limit_s = url, limit_s
        self._connection = Connection(self._connect, lambda connection: connection.close(), _interrupt, limit_s)

    def __repr__(self) -> str:
        return f"<Postgres {self.label}>"

    def get(self, name: str) -> bytes | None:
        """Return the document, None if there is none."""
        rows = self._rows(_GET, check_name(name))
        return rows[0][0] if rows else None

    def put(self, name: str, document: bytes) -> None:
        """Keep `document` in place of any other; it is committed when this returns."""
        self._rows(_PUT, check_name(name), check_content(document), create=True)

    def list(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Yield the names that begin with `prefix`, with their documents."""
        return self._pages(check_prefix(prefix))

    def _pages(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        begin, is_more = prefix, True
        while is_more:
            rows = self._rows(_LIST, begin, prefix + _AFTER_ALL_NAMES, _AT_ONCE)
            yield from ((name, document) for name, document in rows if is_name(name))
            is_more = len(rows) == _AT_ONCE
            begin = rows[-1][0] + _NEXT if is_more else begin

    def forget(self, name: str) -> None:
        """Remove the document if there is one."""
        self._rows(_FORGET, check_name(name))

    def claim(self, name: str, document: bytes, lease_s: float) -> bool:
        """Put `document` unless another one is there whose lease runs, by the server's clock; return whether it was."""
        return bool(self._rows(_CLAIM, check_name(name), check_content(document), lease_s, create=True))

    def renew(self, name: str, document: bytes, lease_s: float) -> bool:
        """Extend the lease if the document there is still `document`; return whether it was."""
        return bool(self._rows(_RENEW, lease_s, check_name(name), check_content(document)))

    def close(self) -> None:
        """Close the connection; a later call opens another one."""
        self._connection.close()

    def _rows(self, query: str, *values: object, create: bool = False) -> Sequence[Any]:
        """Run `query`; without the table return no rows, or create it and run `query` again."""
        import psycopg.errors

        def run(connection: "psycopg.Connection[Any]") -> Sequence[Any]:
            # For this transaction: PgBouncer would give the session, with its settings, to others.
            # Earlier than the limit here, so that the server has given up, too.
            connection.execute("SELECT set_config('statement_timeout', %s, true)", [f"{self._limit_s * 800:.0f}ms"])
            cursor = connection.execute(query, values)
            rows = cursor.fetchall() if cursor.description else ()
            connection.commit()
            return rows

        try:
            try:
                return self._connection.call(run)
            except psycopg.errors.UndefinedTable:
                if not create:
                    return []
            self._connection.call(_create)
            return self._connection.call(run)
        except Exception as error:  # noqa: BLE001 - the client's text may contain the password
            raise failure(self.label, self._url, error) from None

    def _connect(self, left_s: float) -> "psycopg.Connection[Any]":
        import psycopg

        connect_timeout = max(2, int(left_s))  # libpq's least
        return psycopg.connect(
            self._url,
            prepare_threshold=None,
            connect_timeout=connect_timeout,
            application_name="backend_kwargs",
        )


def _create(connection: "psycopg.Connection[Any]") -> None:
    import psycopg.errors

    try:
        connection.execute(CREATE)
        connection.commit()
    except (psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):
        connection.rollback()  # another process was faster
    except psycopg.errors.InsufficientPrivilege:
        raise BackendKwargsError(
            f"There is no table {TABLE}, and this user may not create it. Who may can run: {' '.join(CREATE.split())}"
        ) from None


def _interrupt(connection: "psycopg.Connection[Any]") -> None:
    with suppress(Exception), socket.socket(fileno=os.dup(connection.pgconn.socket)) as of_it:
        of_it.shutdown(socket.SHUT_RDWR)
