"""Templates in TOML files."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from backend_kwargs.errors import BackendKwargsError, unknown, wrong_value
from backend_kwargs.files.plain_data import read_toml
from backend_kwargs.options.catalogue import inductor_options
from backend_kwargs.options.layers import Options
from backend_kwargs.options.templates import Template, derive, find_template

KEYS = {"base": str, "summary": str, "options": dict}


def read_templates(path: str | Path, own: Collection[str] = ()) -> dict[str, Template]:
    """Read `[templates.NAME]` tables, or `[tool.backend_kwargs.templates.NAME]` of a pyproject.toml.

    A table may have `base`, `summary` and `options`; an option's dotted name is quoted, or written as nested tables. A
    `base` may name a template that precedes it in the file. `own` are options that Inductor does not have.
    """
    if not isinstance(path, str | Path):
        raise wrong_value("A templates file", "a str or a Path", path)
    document = read_toml(path, "templates")
    tables = _inner(document, "tool", "backend_kwargs", "templates") or _inner(document, "templates")
    if not isinstance(tables, dict) or not tables:
        raise BackendKwargsError(f"{str(path)!r} has no [templates.NAME] table.")
    templates: dict[str, Template] = {}
    for name, table in tables.items():
        templates[name] = _template(name, table, templates, {*inductor_options(), *own})
    return templates


def _inner(table: object, *keys: str) -> Any:
    for key in keys:
        table = table.get(key, {}) if isinstance(table, dict) else {}
    return table


def _template(name: str, table: object, above: Mapping[str, Template], known: Collection[str]) -> Template:
    if not isinstance(table, dict):
        raise wrong_value(f"[templates.{name}]", "a table", table)
    for key, value in table.items():
        if key not in KEYS:
            raise unknown(f"key in [templates.{name}]", key, KEYS, otherwise=f"It takes {', '.join(KEYS)}.")
        if not isinstance(value, KEYS[key]):
            raise wrong_value(f"{key!r} in [templates.{name}]", KEYS[key].__name__, value)
    options = _flat(table.get("options", {}), known)
    return derive(table.get("base"), options, table.get("summary", ""), lambda n: above.get(n) or find_template(n))


def _flat(options: Options, known: Collection[str], prefix: str = "") -> dict[str, object]:
    """Flatten nested tables to dotted names, down to those that name an option."""
    flat: dict[str, object] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        nested = isinstance(value, dict) and name.replace("-", "_") not in known
        flat |= _flat(value, known, f"{name}.") if nested else {name: value}
    return flat
