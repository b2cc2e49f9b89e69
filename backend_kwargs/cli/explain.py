"""`backend-kwargs explain`: each option of a backend, with its value, its source, and whether it has an effect here."""

from typing import Annotated

import typer

from backend_kwargs.cli.arguments import As, AsJson, Assignments, assigned, backend_from_text
from backend_kwargs.cli.console import print_config, print_json, print_table, say
from backend_kwargs.explain import COLUMNS, explain


def show(
    spec: Annotated[str, typer.Argument(help="Such as tmpl-inductor:max_autotune+freezing.")],
    options: Assignments = None,
    json: AsJson = False,
    as_: As = None,
) -> None:
    """Show each option of a backend: its value, the layer that set it, its default, whether it has an effect here."""
    backend = backend_from_text(spec, assigned(options))
    if as_:
        return print_config(backend.inductor_config(ahead_of_time=as_ == "aoti-config"))
    explanation = explain(backend)
    if json:
        return print_json(explanation.to_dict())
    say(explanation.backend, *([] if explanation.effects else ["No option is set."]))
    print_table(COLUMNS, explanation.rows())
    if explanation.notes:
        say(*explanation.notes)
