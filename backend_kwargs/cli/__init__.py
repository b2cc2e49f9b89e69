"""The command line `backend-kwargs`: commands that parse, call and print."""

import io
import signal
import sys
import traceback as tracebacks
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from backend_kwargs.cli import (
    audit,
    bundles,
    compare,
    decisions,
    doctor,
    explain,
    listing,
    pin,
    tune,
    tune_plan,
)
from backend_kwargs.cli.console import complain, console, say
from backend_kwargs.cli.removed import check_removed
from backend_kwargs.errors import BackendKwargsError, BackendKwargsWarning
from backend_kwargs.files import temporary

TRACEBACK = "--traceback"
USER_MISTAKE = 2  # as for an unknown command-line flag
KILLED = 128  # what shells add to a signal's number
ENDING = ("SIGTERM", "SIGHUP")  # Windows lacks the second
# Newer releases of typer vendor click, older ones import it; the base class of either is found through a subclass.
ClickException = cast(
    "type[typer.BadParameter]", next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
)

app = typer.Typer(
    name="backend-kwargs",
    help="Named, configured torch.compile backends.",
    pretty_exceptions_enable=False,
)
app.command("list")(listing.show)
app.command("explain")(explain.show)
app.command("compare")(compare.show)
app.command("tune")(tune.show)
app.command("tune-plan")(tune_plan.show)
app.command("audit")(audit.show)
app.command("pin")(pin.show)
app.command("doctor")(doctor.show)
app.add_typer(bundles.app, name="bundle")
app.add_typer(decisions.app, name="decisions")


def _version(wanted: bool) -> None:
    if wanted:
        say(f"backend-kwargs {version('backend-kwargs')}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option(TRACEBACK, help="Show the whole traceback of an error.")] = False,
) -> None:
    """Named, configured torch.compile backends."""
    try:
        Path.cwd()
    except FileNotFoundError:  # torch's libraries end the process there
        raise BackendKwargsError("The current folder was deleted: change to another.") from None
    temporary()  # where torch has its caches: imports of it fail


def main() -> None:
    """Run a command; print a user's mistake as one line and exit with 2.

    SIGTERM and SIGHUP end it as Ctrl-C does, so that temporary folders are removed and child processes ended.
    """
    received = [signal.SIGINT]

    def end(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        raise KeyboardInterrupt

    for name in ENDING:
        if signal.getsignal(number := getattr(signal, name, signal.SIGTERM)) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, end)
    warnings.showwarning = _note
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's, which needs none here
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # cp1252, a pipe's encoding on Windows, lacks the lines of tables
    try:
        # Not standalone: typer would draw a box around the message.
        given = [word for word in sys.argv[1:] if word != TRACEBACK]  # it may stand after the command too
        check_removed(given)
        code = app(given or ["--help"], prog_name=app.info.name, standalone_mode=False)
        sys.exit(KILLED + received[-1] if received[1:] else code)
    except BackendKwargsError as error:
        if TRACEBACK in sys.argv[1:]:
            say(*"".join(tracebacks.format_exception(error)).splitlines(), out=console(stderr=True))
        complain(str(error))
    except ClickException as error:
        complain(_usage(error))
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(KILLED + received[-1])
    sys.exit(USER_MISTAKE)


def _note(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Print a warning as one line; while compilers are silenced, only our own."""
    out = console(stderr=True) if issubclass(category, BackendKwargsWarning) else Console(stderr=True, highlight=False)
    say(f"note: {message}", out=out)


def _usage(error: typer.BadParameter) -> str:
    """Return an error in the arguments as one line, with the command whose help explains more."""
    message = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")  # pydantic's, in typer
    end = "" if message.endswith("?") else "."
    return f"{message}{end} See '{error.ctx.command_path if error.ctx else app.info.name} --help'."
