"""Where the commands print: coloured on a terminal, plain and wide in a pipe."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

PIPE_WIDTH = 200


def console(stderr: bool = False) -> Console:
    """Return the console for standard output or standard error."""
    file = sys.stderr if stderr else sys.stdout
    return Console(file=file, width=None if file.isatty() else PIPE_WIDTH, highlight=False)


def complain(message: str) -> None:
    """Print one line on standard error."""
    console(stderr=True).print(f"[red]error:[/red] {escape(message)}", soft_wrap=True)


def print_table(header: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print rows under a header; numbers stand to the right."""
    rows = list(rows)
    if not rows:
        return
    table = Table(*header, box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    for line in _lines(table):
        console().print(line, soft_wrap=True, markup=False)


def print_json(data: Any) -> None:
    """Print data as JSON; what JSON has no form for, as its repr."""
    print(json.dumps(data, indent=2, default=repr))


def _lines(table: Table) -> list[str]:
    out = console()
    with out.capture() as captured:
        out.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
