"""`backend-kwargs options`: search the options of Inductor, or of another backend."""

from fnmatch import fnmatchcase
from typing import Annotated

import typer

from backend_kwargs.backend import find_backend
from backend_kwargs.cli.arguments import AsJson
from backend_kwargs.cli.console import print_json, print_table, say
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.harness.modules import spec_of
from backend_kwargs.options.catalogue import documented
from backend_kwargs.options.option import Option, describe


def show(
    pattern: Annotated[str, typer.Argument(help="A glob of option names, or a word in a name or doc.")] = "*",
    backend: Annotated[str, typer.Option(help="The backend to search, such as tvm.")] = "inductor",
    json: AsJson = False,
) -> None:
    """Search the options of a backend (default: Inductor's and this package's): type, default, doc."""
    which = find_backend(spec_of(backend))
    known, unchecked = list(which.known_options().values()), which.unchecked_options()
    if which.takes_inductor_options:
        known = [documented(option) for option in known]
    matching = [option for option in known if _matches(pattern, option)]
    if known and not matching and not unchecked:
        whose = "Inductor" if backend == "inductor" else backend
        raise BackendKwargsError(
            f"No {whose} option matches {pattern!r}; try a shorter word or a glob such as '*tma*'."
        )
    if json:
        return print_json([_row(option) for option in matching])
    header = ("option", "type", "default", "environment", "doc")
    print_table(header, [tuple(_row(option).values()) for option in matching])
    if unchecked or not known:
        taken = f"takes {unchecked}, unchecked" if unchecked else "takes no options"
        say(f"Backend {backend!r} {taken}.")


def _matches(pattern: str, option: Option) -> bool:
    if any(sign in pattern for sign in "*?["):
        return fnmatchcase(option.name, pattern.replace("-", "_"))
    return pattern.lower() in option.name.lower() or pattern.lower() in option.doc.lower()


def _row(option: Option) -> dict[str, str]:
    deprecated = [f"Deprecated: {option.deprecated}."] if option.deprecated else []
    alias = [f"Another name of {option.alias}."] if option.alias else []
    return {
        "option": option.name,
        "type": describe(option.type),
        "default": repr(option.default),
        "environment": " ".join((*option.env, *(f"{name} (forces)" for name in option.env_force))),
        "doc": " ".join([*deprecated, *alias, *option.doc.split()]),
    }
