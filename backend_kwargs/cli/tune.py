"""`backend-kwargs tune`: race one model at the sizes that it will serve, and write the decisions to a file."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from backend_kwargs.cli.console import Model, Outputs, assigned, backend_from_text, output_option
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.fleet.board import AUTO, BUDGET_S

DECISIONS = ".toml"
# Options that the command sets itself, and how.
SET_HERE: Mapping[str, str] = {
    "auto": "always races",
    "race": "always races",
    "process_budget_s": "races every size",
    "most_races": "races every size",
}


Output = Annotated[
    list[Path] | None,
    output_option("Write the decisions (.toml), and a page (.html), its data (.json) or a summary (.md)."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(help="Sizes to race one after the other, such as batch=1,8,32; may be given several times."),
]
Further = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help=f"An option of auto, such as effort=full, candidates=a,b, freezing=true, or budget_s={BUDGET_S:g} "
        "(the default, since no call waits for it); may be given several times.",
    ),
]


def show(model: Model, output: Output = None, shapes: Shapes = None, option: Further = None) -> None:
    """Race a model for inference at each of the sizes, print what won, and write a file of decisions to ship.

    Ctrl-C keeps the sizes that were raced before it. `backend-kwargs decisions import FILE` puts the file into the
    store of the machine that serves.
    """
    outputs = Outputs.checked(output, [DECISIONS])
    given = assigned(option)
    for name in filter(SET_HERE.__contains__, given):
        raise BackendKwargsError(f"--option {name} has no effect, since tune {SET_HERE[name]}.")
    backend = backend_from_text(AUTO, given)
    backend.verify()
    budget_s = backend.options.get("budget_s", BUDGET_S)
    files = outputs.ending(DECISIONS)
    if len(files) != 1:
        raise BackendKwargsError("Name one file for the decisions: -o FILE.toml.")
    from backend_kwargs.cli.tuned import tune  # loads torch, for which no --help should wait

    tune(model, sizes_of(shapes or []), backend, budget_s, files[0], outputs)


def sizes_of(shapes: list[str]) -> list[dict[str, int]]:
    """Return every combination of sizes such as "name=1,8,32", and one empty combination without any."""
    named: dict[str, dict[int, None]] = {}
    for text in shapes:
        name, equals, values = text.partition("=")
        numbers = [value.strip() for value in values.split(",")]
        if not equals or not name.strip().isidentifier() or not all(n.isdecimal() and int(n) > 0 for n in numbers):
            raise BackendKwargsError(f"Option '--shapes' must be name=1,2,3 with whole numbers above 0, got {text!r}.")
        named.setdefault(name.strip(), {}).update(dict.fromkeys(map(int, numbers)))
    return [dict(zip(named, each, strict=True)) for each in product(*named.values())]
