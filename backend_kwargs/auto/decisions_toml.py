"""Decisions as TOML, to review, ship and read back; each winner is also a template in the file."""

import json
import re
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from backend_kwargs.auto.candidates import OptionsOf, allowed_candidates, step_of, trusted
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.auto.store import KIND
from backend_kwargs.backends.others import is_former, is_other
from backend_kwargs.errors import BackendKwargsError, error_text, shown, warn_once
from backend_kwargs.facts.decision import DEFAULT, EAGER, Decision, has_form, parsed
from backend_kwargs.files import read_toml, write_whole
from backend_kwargs.options import precisions, with_users
from backend_kwargs.options.templates import ENTRY_POINT_GROUP, template_names
from backend_kwargs.rewrites.table import list_rewrites

HEAD = f"""\
# Decisions of tmpl-inductor:auto. `backend-kwargs decisions import` adds them to a store;
# `load_templates` reads each winner as a template.
schema = {KIND.schema}"""
KEPT = ("graph", "winner", "compiler", "facts", "seconds", "cut_s", "made", "inputs", "model", "budget_s")
KEY = re.compile("[0-9a-f]{64}")


def template_name(decision: Decision) -> str:
    """Return the name of the template with the winner's options, "" for eager and other compilers, which are none.

    It has the last digits of the key: the first are the computation's, at any sizes.
    """
    return "" if decision.winner == EAGER or decision.compiler else f"auto-{decision.key[-12:]}"


def write_decisions(decisions: Iterable[Decision], path: Path) -> list[Decision]:
    """Write `decisions` to a TOML file atomically; of several with one key, made on unlike machines, the first.

    Return those written: one that could not be read back is left out, with a warning.
    """
    written: dict[str, Decision] = {}
    texts, named = [HEAD], {""}
    for each in decisions:
        if each.key not in written and (text := _text(each, named)):
            texts.append(text)
            named.add(template_name(each))
            written[each.key] = each
    write_whole(path, "\n".join(texts) + "\n")
    return [*written.values()]


def _text(decision: Decision, named: Container[str]) -> str:
    """Return the tables of a decision, "" if they would not be read back; without a template that is `named` before."""
    unlike = [f"option {name!r} is {shown(value)}" for name, value in decision.options.items() if not has_form(value)]
    why = next(iter(unlike), "" if KEY.fullmatch(decision.key) else "its key has not 64 hexadecimal digits")
    text = "" if why else "\n".join(toml_lines(_tables(decision, named)))
    try:
        tomllib.loads(text.encode().decode())
    except (ValueError, RecursionError) as error:  # as of a number that is none, or half of a character
        why = error_text(error)
    if why:
        warn_once(f"Decision {decision.key[:20]} is left out, it cannot be written as TOML: {why}.")
    return "" if why else text


def _tables(decision: Decision, named: Container[str]) -> dict[str, Any]:
    """Return the table of a decision, and that of a template: the winner's options, and the user's merged onto them."""
    fixed = {name: value for name, value in decision.fixed.items() if has_form(value)}
    own = {name: getattr(decision, name) for name in KEPT}
    tables = {"options": decision.options, "fixed": fixed, "machine": decision.machine}
    decided = {"decisions": {decision.key: own | tables}}
    if (name := template_name(decision)) in named:
        return decided
    if left_out := [option for option in decision.fixed if option not in fixed]:
        warn_once(f"Template {name!r} leaves out {', '.join(map(repr, left_out))}, which cannot be written as TOML.")
    summary = f"{decision.winner} for {decision.facts}"
    return {"templates": {name: {"summary": summary, "options": with_users(decision.options, fixed)}}, **decided}


def toml_lines(values: Mapping[str, Any], *path: str) -> Iterator[str]:
    """Yield the lines of a TOML table and of the tables in it; None, which TOML lacks, is left out."""
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    own = {name: value for name, value in values.items() if name not in tables and value is not None}
    if path and (own or not tables):
        yield f"\n[{'.'.join(map(_written, path))}]"
    yield from (f"{_written(name)} = {_written(value)}" for name, value in own.items())
    for name, table in tables.items():
        yield from toml_lines(table, *path, name)


def _written(value: object) -> str:
    # JSON's strings, numbers and booleans are TOML too, except characters above 16 bits, which JSON splits, and DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_decisions(path: Path, options_of: OptionsOf) -> list[Decision]:
    """Return the decisions in a TOML file; raise if one has an option that no candidate sets."""
    whole = read_toml(path, "decisions")
    tables = whole.get("decisions")
    if not isinstance(tables, dict) or not tables:
        raise BackendKwargsError(f"{str(path)!r} has no [decisions.KEY] table.")
    if (schema := whole.get("schema")) != KIND.schema:
        raise BackendKwargsError(
            f"{str(path)!r} has {f'schema {shown(schema)}' if 'schema' in whole else 'no schema'}, not {KIND.schema}: "
            "another release of backend-kwargs made its keys, which no graph has here. Its winners are still templates."
        )
    return [_read(key, table, options_of) for key, table in tables.items()]


def _read(key: str, table: Mapping[str, object], options_of: OptionsOf) -> Decision:
    """Return the decision in one table; raise if it is none, or one that no candidate allows."""
    if not KEY.fullmatch(key):
        raise BackendKwargsError(f"[decisions.{shown(key)}] is not a decision: a key has 64 hexadecimal digits.")
    try:
        decision = parsed({**dict(table), "key": key, "rows": []})
    except (ValueError, TypeError, RecursionError) as error:
        raise BackendKwargsError(f"[decisions.{key}] is not a decision: {error}.") from None
    # A rewrite or a precision is used only if the request that reads the decision allows it, within the same bound.
    named, max_error = [step_of(decision.winner), *template_names()], decision.options.get("max_error")
    settings = RaceSettings(candidates=named, precision=precisions.named([*precisions.PRECISIONS]), max_error=max_error)
    allowed = allowed_candidates(settings, options_of, list_rewrites())
    if not trusted(decision.winner, decision.options, decision.compiler, allowed):
        known = {EAGER, DEFAULT, *(each.name for each in allowed)}
        raise BackendKwargsError(f"[decisions.{key}] {_why_not(decision, known, options_of)}")
    return decision


def _why_not(decision: Decision, known: Container[str], options_of: OptionsOf) -> str:
    """Return what is wrong with a decision that no candidate allows."""
    if former := [name for name in (decision.winner, decision.compiler) if is_former(name)]:
        return f"names {former[0]!r}, which was removed."
    by_inductor = not (is_other(decision.winner) or decision.compiler)
    if by_inductor and step_of(decision.winner) not in known:
        try:
            options_of(decision.winner)
        except BackendKwargsError as error:
            package = f"An installed package can provide it, by the entry-point group {ENTRY_POINT_GROUP!r}"
            return f"is for candidate {decision.winner!r}. {error} {package}."
    by = f" by {decision.compiler!r}" if decision.compiler else ""
    return f"sets {shown(dict(decision.options))}{by}, which candidate {decision.winner!r} does not set."
