"""`backend-kwargs audit`: race stored decisions again, and say which are still right; exit with 1 if one has lost."""

from pathlib import Path
from typing import Annotated

import typer

from backend_kwargs.cli.console import Outputs, assigned, backend_from_text, output_option
from backend_kwargs.cli.decisions import Where, store_of
from backend_kwargs.cli.tune import sizes_of
from backend_kwargs.fleet.board import AUTO

MANIFEST = "manifest.json"  # of a bundle
Subject = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL|BUNDLE]",
        help="What makes the graphs: FILE_OR_MODULE:FACTORY, timm:NAME, transformers:CLASS. Or a bundle that was built "
        "under auto. None: the models that the store's documents name.",
    ),
]
Maker = Annotated[
    str | None, typer.Argument(metavar="[FACTORY]", help="What makes a bundle's model: FILE_OR_MODULE:FACTORY.")
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import the models that a store's documents name; use code in a bundle's config."),
]
Made = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="An option that the decisions were made with, such as effort=full or candidates=a,b; may be given several "
        "times.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="No fresh races, and a fifth of the rounds.")]
Update = Annotated[
    bool, typer.Option("--update", help="Store what was found: today's times, and the best where one has lost.")
]
Output = Annotated[
    list[Path] | None,
    output_option("Write the findings (.json: docs/audit-schema.json), a page (.html) or a summary (.md)."),
]


def show(
    subject: Subject = None,
    factory: Maker = None,
    store: Where = None,
    trust: Trust = False,
    shapes: Annotated[list[str] | None, typer.Option(help="Sizes of the model, as for tune: batch=1,8,32.")] = None,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Also the graph whose sizes vary: with those of --shapes.")
    ] = False,
    option: Made = None,
    quick: Quick = False,
    update: Update = False,
    output: Output = None,
) -> None:
    """Time stored decisions beside default, the runner-up and what fresh races choose, in turn and at length.

    It says of each whether it is still right. Exits with 1 if one has surely lost by more than 2 %, or fails.
    """
    outputs = Outputs.checked(output)
    backend = backend_from_text(AUTO, assigned(option))
    backend.verify()
    asked = bool(shapes or dynamic or option)
    sizes = sizes_of(shapes or [])
    from backend_kwargs.cli import audited  # loads torch, for which no --help should wait

    if subject is not None and (Path(subject) / MANIFEST).is_file():
        chosen = audited.of_bundle(subject, factory, store, trust, asked)
    else:
        model = audited.model_named(subject, factory)
        chosen = audited.of_store(model, store_of(store), backend, sizes, trust, asked=asked, dynamic=dynamic)
    audited.audit(chosen, outputs, quick=quick, update=update)
