"""`backend-kwargs explain`: the options that a backend has, with their sources and effects, or could have."""

from fnmatch import fnmatchcase
from typing import Annotated

import typer

from backend_kwargs.backend import Backend, find_backend
from backend_kwargs.cli.console import (
    As,
    AsJson,
    Assignments,
    assigned,
    backend_from_text,
    print_config,
    print_json,
    print_table,
    say,
)
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.explain import COLUMNS, explain
from backend_kwargs.harness.models import spec_of
from backend_kwargs.options.catalogue import documented
from backend_kwargs.options.option import Option, describe

Pattern = Annotated[
    str | None,
    typer.Argument(help="Show the options that SPEC takes instead: a glob of names, or a word in a name or doc."),
]


def show(
    spec: Annotated[str, typer.Argument(help="Such as tmpl-inductor:max_autotune+freezing.")],
    pattern: Pattern = None,
    option: Assignments = None,
    json: AsJson = False,
    as_: As = None,
) -> None:
    """Show each option of a backend: its value, the layer that set it, its default, whether it has an effect here.

    With PATTERN, such as '*tma*' or '*', search the options that it takes: type, default, doc.
    """
    if pattern is not None:
        return _search(spec, find_backend(spec_of(spec)), pattern, json)
    backend = backend_from_text(spec, assigned(option))
    if as_:
        return print_config(backend.inductor_config(ahead_of_time=as_ == "aoti-config"))
    explanation = explain(backend)
    if json:
        return print_json(explanation.to_dict())
    say(explanation.backend, *([] if explanation.effects else ["No option is set."]))
    print_table(COLUMNS, explanation.rows())
    if explanation.notes:
        say(*explanation.notes)


def _search(spec: str, backend: Backend, pattern: str, json: bool) -> None:
    known, unchecked = list(backend.known_options().values()), backend.unchecked_options()
    if backend.takes_inductor_options:
        known = [documented(option) for option in known]
    matching = [option for option in known if _matches(pattern, option)]
    if known and not matching and not unchecked:
        raise BackendKwargsError(
            f"No option of {spec} matches {pattern!r}; try a shorter word or a glob such as '*tma*'."
        )
    if json:
        return print_json([_row(option) for option in matching])
    header = ("option", "type", "default", "environment", "doc")
    print_table(header, [tuple(_row(option).values()) for option in matching])
    if unchecked or not known:
        taken = f"takes {unchecked}, unchecked" if unchecked else "takes no options"
        say(f"Backend {spec!r} {taken}.")


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
