"""The command line `backend-kwargs`: commands that parse, call and print."""

import sys
import warnings
from importlib.metadata import version
from typing import Annotated

import typer

from backend_kwargs.cli import compare, doctor, explain, listing, options
from backend_kwargs.cli.console import complain, console
from backend_kwargs.errors import BackendKwargsError

USER_MISTAKE = 2  # as for an unknown command-line flag

app = typer.Typer(
    name="backend-kwargs",
    help="Named, configured torch.compile backends.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(listing.show)
app.command("explain")(explain.show)
app.command("options")(options.show)
app.command("compare")(compare.show)
app.command("doctor")(doctor.show)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"backend-kwargs {version('backend-kwargs')}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Named, configured torch.compile backends."""


def main() -> None:
    """Run a command; print a user's mistake as one line and exit with 2."""
    warnings.showwarning = lambda message, *_, **__: console(stderr=True).print(
        f"note: {message}", soft_wrap=True, markup=False
    )
    try:
        app()
    except BackendKwargsError as error:
        complain(str(error))
        sys.exit(USER_MISTAKE)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        sys.exit(0)
