"""`backend-kwargs decisions`: list, show, export, import and delete the decisions of races."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from backend_kwargs.auto.decisions_toml import read_decisions, template_name, write_decisions
from backend_kwargs.auto.store import open_store
from backend_kwargs.backend import find_backend
from backend_kwargs.cli.arguments import As, AsJson
from backend_kwargs.cli.console import print_config, print_json, print_table, say
from backend_kwargs.cli.pages import Against, Html, Outputs
from backend_kwargs.cli.pasting import lines_to_paste
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts.decision import Decision
from backend_kwargs.page import Document
from backend_kwargs.registry import decided
from backend_kwargs.report.decisions import document_of

app = typer.Typer(help="The decisions of tmpl-inductor:auto, one per graph.")

Where = Annotated[str | None, typer.Option("--store", help="The file of decisions, if not the default one.")]
Key = Annotated[str, typer.Argument(help="A decision's key, or its first digits.")]
Keys = Annotated[list[str] | None, typer.Argument(help="Keys, or their first digits; all decisions if none is given.")]

Found = TypeVar("Found")


@app.command("list")
def show_all(store: Where = None, json: AsJson = False, html: Html = None, against: Against = None) -> None:
    """List the decisions, latest first."""
    outputs = Outputs.checked(html, against=against)
    database = open_store(store, strict=True)
    decisions = database.all()
    if outputs:
        outputs.write(page_of(decisions))
    rows = [
        {"key": each.key[:12], "winner": each.winner, "graph": each.facts, "made": _day(each)} for each in decisions
    ]
    if json:
        return print_json(rows)
    if not rows:
        return say(f"No decisions in {str(database.path)!r}.")
    print_table(("key", "winner", "graph", "made"), [tuple(row.values()) for row in rows])


@app.command("show")
def show_one(
    key: Key,
    store: Where = None,
    json: AsJson = False,
    as_: As = None,
    html: Html = None,
    against: Against = None,
) -> None:
    """Show one decision: the candidates, the winner and why, and the machine; or the winner's options with --as."""
    from dataclasses import asdict

    from backend_kwargs.auto.reporting import table

    outputs = Outputs.checked(html, against=against)
    (decision,) = _found(open_store(store, strict=True).all, [key], one=True)
    if outputs:
        outputs.write(page_of([decision]))
    if as_:
        return print_config(
            decided(decision.winner, decision.options, decision.fixed, decision.compiler).inductor_config(
                ahead_of_time=as_ == "aoti-config"
            )
        )
    if json:
        return print_json(asdict(decision))
    say(*table(decision).splitlines())
    compiler = {"compiler": decision.compiler} if decision.compiler else {}
    options = {**compiler, "options": decision.options, "fixed": decision.fixed}
    say(*(f"{name}: {value}" for name, value in {**options, **decision.machine, "made": _day(decision)}.items()))


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="The TOML file to write.")], keys: Keys = None, store: Where = None
) -> None:
    """Write decisions to a TOML file, where each winner can also be used as a template."""
    database = open_store(store, strict=True)
    if file.exists() and database.path.exists() and file.samefile(database.path):
        raise BackendKwargsError(f"Cannot export to {str(file)!r}: it is the store itself; name another file.")
    decisions = _found(database.all, keys) if keys else database.all()
    if not decisions:
        raise BackendKwargsError(f"No decisions in {str(database.path)!r}; compile with tmpl-inductor:auto first.")
    write_decisions(decisions, file)
    names = list(dict.fromkeys(filter(None, map(template_name, decisions))))
    kept = f"{len(names)} as templates: {', '.join(names)}" if names else "none as a template"
    rest = sum(not template_name(decision) for decision in decisions)
    eager = f" ({rest} chose eager or another compiler, which has no template)" if rest else ""
    say(f"{len(decisions)} written to {file}, {kept}{eager}.")


@app.command("import")
def import_(file: Annotated[Path, typer.Argument(help="The TOML file to read.")], store: Where = None) -> None:
    """Add the decisions in a TOML file to the store."""
    decisions = read_decisions(file, lambda name: find_backend(f"tmpl-inductor:{name}").options)
    database = open_store(store, strict=True)
    database.add(*decisions)
    say(f"{len(decisions)} added to {str(database.path)!r}.")


@app.command("forget")
def forget(
    keys: Keys = None,
    all_: Annotated[bool, typer.Option("--all", help="Forget every decision.")] = False,
    store: Where = None,
) -> None:
    """Delete decisions, so that their graphs are raced again."""
    database = open_store(store, strict=True)
    if not keys and not all_:
        raise BackendKwargsError("Name the decisions to forget, or give --all.")
    count = database.forget(_found(database.keys, keys)) if keys else database.clear()
    say(f"{count} forgotten.")


def serve(
    store: Annotated[
        str | None, typer.Argument(metavar="STORE", help="The file of decisions, if not the default one.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen: other than loopback, others on the network reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
) -> None:
    """Show a store of decisions in a browser, read-only, until Ctrl-C; the address contains a secret token."""
    from backend_kwargs.page.serve import serve as listen

    database = open_store(store, strict=True)
    database.all()  # a file that is no store is an error now
    listen(database, page_of, host=host, port=port, say=say)


def _found(find: Callable[[str], list[Found]], keys: list[str], *, one: bool = False) -> list[Found]:
    """Return what `find` finds for each of the keys; raise if it finds nothing, or several for `one`."""
    found: list[Found] = []
    for key in keys:
        matches = find(key)
        if not matches:
            raise BackendKwargsError(f"No decision's key begins with {key!r}; `decisions list` shows all.")
        if one and len(matches) > 1:
            raise BackendKwargsError(f"{len(matches)} decisions' keys begin with {key!r}; give more digits.")
        found += matches
    return found


def page_of(decisions: Sequence[Decision]) -> Document:
    """Return the page of some decisions; of one, with the lines that compile with its winner."""
    return document_of(decisions, _paste(decisions[0]) if len(decisions) == 1 else "")


def _paste(decision: Decision) -> str:
    """Return the lines that compile with the winner, "" if no text makes it."""
    with suppress(BackendKwargsError):
        backend = decided(decision.winner, decision.options, decision.fixed, decision.compiler)
        return "\n".join(lines_to_paste(backend))
    return ""


def _day(decision: Decision) -> str:
    """Return when a decision was made, in local time."""
    with suppress(ValueError, OverflowError, OSError):  # an imported file may contain any number
        return datetime.fromtimestamp(decision.made).astimezone().isoformat(sep=" ", timespec="minutes")
    return ""
