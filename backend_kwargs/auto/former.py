"""The file of decisions of earlier releases, read as plain data: SQLite is asked for the columns of one table."""

import sqlite3
from contextlib import closing
from pathlib import Path

from backend_kwargs.auto.decision import COLUMNS, unpacked
from backend_kwargs.errors import BackendKwargsError, error_text, warn_once
from backend_kwargs.facts.decision import Decision

TABLE = "SELECT type FROM sqlite_master WHERE name = 'decisions'"
MOST = 100_000  # decisions
LONGEST = 1 << 20  # bytes of a value
STEPS = 50_000_000  # of SQLite's virtual machine


def read_former(path: Path) -> list[Decision]:
    """Return the decisions in a file of an earlier release; raise if it is no such file."""
    try:
        # "immutable": nothing is written, no lock is taken, and no journal of a killed process is rolled back.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.text_factory = bytes
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
            connection.set_progress_handler(lambda: 1, STEPS)
            if connection.execute(TABLE).fetchall() != [(b"table",)]:  # a view could compute anything
                raise BackendKwargsError(f"Cannot read decisions from {str(path)!r}: it has no table of decisions.")
            found = [name.decode() for _, name, *_ in connection.execute("PRAGMA table_info(decisions)")]
            names = [name for name in COLUMNS if name in found]
            select = f"SELECT {', '.join(names)} FROM decisions LIMIT {MOST}"  # noqa: S608 - of our own words
            rows = [dict(zip(names, row, strict=True)) for row in connection.execute(select)]
    except (sqlite3.Error, OSError, ValueError) as error:
        if isinstance(error, BackendKwargsError):
            raise
        raise BackendKwargsError(f"Cannot read decisions from {str(path)!r}: {error_text(error)}.") from None
    return [decision for row in rows if (decision := _read(row, path))]


def _read(row: dict[str, object], path: Path) -> Decision | None:
    try:
        return unpacked(row)
    except ValueError as error:
        warn_once(f"A decision in {str(path)!r} cannot be read: {error}.")
        return None
