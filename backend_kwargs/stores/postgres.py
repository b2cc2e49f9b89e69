"""Documents in a table of PostgreSQL, also behind PgBouncer: no statement relies on an earlier one's session."""

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.stores.connections import AT_ONCE, LIMIT_S, Server
from backend_kwargs.stores.documents import LARGEST, check_content, check_name, is_name
from backend_kwargs.stores.urls import label_of

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


def open(url: str, limit_s: float = LIMIT_S) -> "Postgres":  # noqa: A001 - the drivers' common name
    """Return the store at `url`, whose calls take at most `limit_s` seconds; nothing is connected yet."""
    return Postgres(url, label_of(url), limit_s)


class Postgres(Server["psycopg.Connection[Any]"]):
    """A store of documents in one table, which the first `put` or `claim` creates."""

    def get(self, name: str) -> bytes | None:
        """Return the document, None if there is none."""
        rows = self._rows(_GET, check_name(name))
        return rows[0][0] if rows else None

    def put(self, name: str, document: bytes) -> None:
        """Keep `document` in place of any other; it is committed when this returns."""
        self._rows(_PUT, check_name(name), check_content(document), create=True)

    def forget(self, name: str) -> None:
        """Remove the document if there is one."""
        self._rows(_FORGET, check_name(name))

    def claim(self, name: str, document: bytes, lease_s: float) -> bool:
        """Put `document` unless another one is there whose lease runs, by the server's clock; return whether it was."""
        return bool(self._rows(_CLAIM, check_name(name), check_content(document), lease_s, create=True))

    def renew(self, name: str, document: bytes, lease_s: float) -> bool:
        """Extend the lease if the document there is still `document`; return whether it was."""
        return bool(self._rows(_RENEW, lease_s, check_name(name), check_content(document)))

    def _page(self, begin: str, end: str) -> tuple[Iterable[tuple[str, bytes]], str | None]:
        rows = self._rows(_LIST, begin, end, AT_ONCE)
        return [row for row in rows if is_name(row[0])], rows[-1][0] if len(rows) == AT_ONCE else None

    def _rows(self, query: str, *values: object, create: bool = False) -> Sequence[Any]:
        """Run `query`; without the table return no rows, or create it and run `query` again."""
        import psycopg.errors

        def run(connection: "psycopg.Connection[Any]") -> Sequence[Any]:
            # For this transaction: PgBouncer would give the session, with its settings, to others.
            # Earlier than the limit here, so that the server has given up, too.
            connection.execute("SELECT set_config('statement_timeout', %s, true)", [f"{self.limit_s * 800:.0f}ms"])
            cursor = connection.execute(query, values)
            rows = cursor.fetchall() if cursor.description else ()
            connection.commit()
            return rows

        def run_with_table(connection: "psycopg.Connection[Any]") -> Sequence[Any]:
            try:
                return run(connection)
            except psycopg.errors.UndefinedTable:
                connection.rollback()
            if not create:
                return []
            try:
                connection.execute(CREATE)
                connection.commit()
            except (psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable, psycopg.errors.DuplicateObject):
                connection.rollback()  # another process was faster, with the table or its type
            except psycopg.errors.InsufficientPrivilege:
                raise BackendKwargsError(
                    f"There is no table {TABLE}, and this user may not create it. Who may can run: "
                    f"{' '.join(CREATE.split())}"
                ) from None
            return run(connection)

        return self.call(run_with_table)

    def _connect(self, url: str, left_s: float) -> "psycopg.Connection[Any]":
        import psycopg

        return psycopg.connect(
            url,
            prepare_threshold=None,
            connect_timeout=max(2, int(left_s)),  # libpq's least
            application_name="backend_kwargs",
        )

    @staticmethod
    def _interrupt(client: "psycopg.Connection[Any]") -> None:
        with suppress(Exception), socket.socket(fileno=os.dup(client.pgconn.socket)) as of_it:
            of_it.shutdown(socket.SHUT_RDWR)
