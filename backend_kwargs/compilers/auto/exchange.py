"""Decisions as TOML: to review, ship, and read back; each winner stands in it as a template too."""

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from backend_kwargs.compilers.auto.candidates import EAGER, trusted
from backend_kwargs.compilers.auto.decisions import Decision
from backend_kwargs.errors import BackendKwargsError, said, shown
from backend_kwargs.files import write_whole

HEAD = """\
# Decisions of tmpl-inductor:auto. `backend-kwargs decisions import` puts them into a store;
# `load_templates` reads each winner as a template."""
PLAIN = ("graph", "winner", "facts", "seconds", "made")


def template_name(decision: Decision) -> str:
    """Return the name under which the winner's options are exported."""
    return f"auto-{decision.key[:12]}"


def write_decisions(decisions: Iterable[Decision], path: Path) -> None:
    """Write `decisions` to a TOML file, whole or not at all."""
    write_whole(path, "\n".join([HEAD, *(line for each in decisions for line in _lines(each))]) + "\n")


def _lines(decision: Decision) -> Iterator[str]:
    if decision.winner != EAGER:
        name = f"templates.{template_name(decision)}"
        yield from _table(name, {"summary": f"{decision.winner} for {decision.facts}"})
        yield from _table(f"{name}.options", decision.options)
    yield from _table(f"decisions.{decision.key}", {name: getattr(decision, name) for name in PLAIN})
    yield from _table(f"decisions.{decision.key}.options", decision.options)
    yield from _table(f"decisions.{decision.key}.machine", decision.machine)


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n[{name}]"
    # JSON's strings, numbers and booleans are TOML's; it has no null.
    yield from (f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items() if value is not None)


def read_decisions(path: Path, options_of: Callable[[str], Mapping[str, Any]]) -> list[Decision]:
    """Return the decisions of a TOML file; raise where one asks for what no candidate sets."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendKwargsError(f"Cannot read decisions from {str(path)!r}: {said(error)}.") from None
    tables = document.get("decisions")
    if not isinstance(tables, dict) or not tables:
        raise BackendKwargsError(f"{str(path)!r} holds no [decisions.KEY] table.")
    return [_read(key, table, options_of) for key, table in tables.items()]


def _read(key: str, table: Any, options_of: Callable[[str], Mapping[str, Any]]) -> Decision:
    types: dict[str, Any] = dict.fromkeys(("graph", "winner", "facts"), str)
    types |= {"seconds": (int, float), "made": (int, float), "options": dict, "machine": dict}
    known = {field.name for field in fields(Decision)}
    if not isinstance(table, dict) or any(not isinstance(table.get(name), kind) for name, kind in types.items()):
        raise BackendKwargsError(f"[decisions.{key}] is no decision: it wants {', '.join(sorted(types))}.")
    decision = Decision(key, **{name: value for name, value in table.items() if name in known - {"key", "rows"}})
    if not trusted(decision.winner, decision.options, options_of):
        raise BackendKwargsError(
            f"[decisions.{key}] sets {shown(dict(decision.options))}, which candidate {decision.winner!r} does not set."
        )
    return decision
