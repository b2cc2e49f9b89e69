"""`backend-kwargs options`: search Inductor's options."""

from fnmatch import fnmatchcase
from typing import Annotated

import typer

from backend_kwargs.catalogue import documented, inductor_options
from backend_kwargs.cli.arguments import AsJson
from backend_kwargs.cli.console import print_json, print_table
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.options import Option, describe


def show(
    pattern: Annotated[str, typer.Argument(help="A glob of names, or a word of a name or a doc.")] = "*",
    json: AsJson = False,
) -> None:
    """Search Inductor's options on the installed torch: type, default, doc."""
    found = [option for name in sorted(inductor_options()) if _matches(pattern, option := _documented(name))]
    if not found:
        raise BackendKwargsError(
            f"No Inductor option matches {pattern!r}; try a shorter word or a glob such as '*tma*'."
        )
    if json:
        return print_json([_row(option) for option in found])
    header = ("option", "type", "default", "environment", "doc")
    print_table(header, [tuple(_row(option).values()) for option in found])


def _documented(name: str) -> Option:
    return documented(inductor_options()[name])


def _matches(pattern: str, option: Option) -> bool:
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(option.name, pattern.replace("-", "_"))
    return pattern.lower() in option.name.lower() or pattern.lower() in option.doc.lower()


def _warnings(option: Option) -> list[str]:
    alias = [f"Another name of {option.alias}."] if option.alias else []
    return [*([f"Deprecated: {option.deprecated}."] if option.deprecated else []), *alias]


def _row(option: Option) -> dict[str, str]:
    return {
        "option": option.name,
        "type": describe(option.type),
        "default": repr(option.default),
        "environment": " ".join((*option.env, *(f"{name} (forces)" for name in option.env_force))),
        "doc": " ".join([*_warnings(option), *option.doc.split()]),
    }
