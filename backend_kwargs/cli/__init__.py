"""The command line `backend-kwargs`: commands that parse, call and print."""

import io
import signal
import sys
import traceback as tracebacks
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from backend_kwargs.cli import (
    bundles,
    commands,
    decisions,
)
from backend_kwargs.cli.console import complain, console, say
from backend_kwargs.errors import BackendKwargsError, BackendKwargsWarning, removed
from backend_kwargs.files import temporary

FILE = "-o FILE, whose ending says what is written: .html, .json or .md"
OLDER = "write a page, and then `backend-kwargs compare --from NEW.html --against OLD.html -o CHANGES.html`"
AUTOS = "--option {0}=VALUE"
BRACKETS = "write the options in brackets: --backends 'inductor,tmpl-inductor[NAME=VALUE]'"
STORE = "--store FILE.toml, with url and signing_key or trusted_keys, as bk.Store takes them; keys lie beside the file"
QUICK = "`--quick` measures less"
REMOVED = {
    "build": "`backend-kwargs bundle build MODEL -o BUNDLE`",
    "inspect": "`backend-kwargs bundle inspect BUNDLE`",
    "options": "`backend-kwargs explain BACKEND PATTERN`, such as explain inductor '*tma*'",
    "page": "`backend-kwargs compare --from FILE -o OUT.html`",
    "run": "`backend-kwargs bundle run BUNDLE FACTORY`",
    "seal": "count the sizes of your calls, and declare them in bk.seal(..., sizes=...) or buckets=...",
    "serve": "write a page, `backend-kwargs decisions list --store STORE -o OUT.html`",
    "tune --plan": "`backend-kwargs tune-plan PLAN.toml`",
    "tune-plan --workers": "--on local:N",
    "audit --candidates": AUTOS.format("candidates"),
    "audit --effort": AUTOS.format("effort"),
    "audit --flip-s": QUICK,
    "audit --flips": QUICK,
    "audit --html": FILE,
    "audit --json": FILE,
    "audit --model": "name the model as the argument, `audit MODEL --store STORE`, or after a bundle",
    "audit --rounds": QUICK,
    "audit --timing-s": QUICK,
    "audit --signing-key": STORE,
    "audit --trusted-key": STORE,
    "bundle --fullgraph": "CompileConfig(fullgraph=True) in Python, which says where a graph breaks",
    "bundle --guards": "leave it out",
    "bundle --json": "read BUNDLE/manifest.json",
    "bundle --mode": "--backend tmpl-inductor:max_autotune, say: modes are templates too",
    "bundle --no-guards": "leave it out; the module is traced when it is loaded",
    "bundle --out": "-o BUNDLE",
    "bundle --rounds": "leave it out",
    "compare --cold": "leave it out",
    "compare --config": "make it in a file, `mine = bk.Backend.from_config(...)`, and write --backends file.py:mine",
    "compare --html": FILE,
    "compare --json": FILE,
    "compare --markdown": FILE,
    "compare --option": BRACKETS,
    "compare --over": "--fail-below NAME=RATIO",
    "compare --plot": FILE,
    "compare --with-code": "print(bk.report(compiled)), or .graphs[0].codes[0].source of it, in Python",
    "compare --precision": "--backends 'tmpl-inductor[precision=bf16,max_error=1e-2]'",
    "compare --report": "call bk.report(compiled) in Python, or look at the page, -o FILE.html",
    "compare --samples": "-o FILE.json has the rows; backend_kwargs.compare.to_json(...) in Python all samples",
    "compare --warm": "`--quick` uses Inductor's cache as it is",
    "decisions --against": OLDER,
    "decisions --html": FILE,
    "decisions --signing-key": STORE,
    "decisions --trusted-key": STORE,
    "explain -o": "--option NAME=VALUE",
    "tune --against": OLDER,
    "tune --budget-s": AUTOS.format("budget_s"),
    "tune --candidates": AUTOS.format("candidates"),
    "tune --effort": AUTOS.format("effort"),
    "tune --freezing": "--option freezing=true",
    "tune --html": FILE,
    "tune --json": FILE,
    "tune --max-error": AUTOS.format("max_error"),
    "tune --print-plan": "copy the plan in docs/fleet.md",
    "tune --precision": AUTOS.format("precision"),
}


def check_removed(given: Sequence[str]) -> None:
    """Raise if a command or a flag was removed."""
    words = {word.partition("=")[0] for word in given[1:]}
    for name, instead in REMOVED.items():
        command, *flags = name.split()
        if given[:1] == [command] and words.issuperset(flags):
            raise removed(f"'backend-kwargs {name}'", instead)


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
app.command("list")(commands.list_backends)
app.command("explain")(commands.explain_options)
app.command("compare")(commands.compare_backends)
app.command("tune")(commands.tune_model)
app.command("tune-plan")(decisions.tune_plan)
app.command("audit")(commands.audit_decisions)
app.command("pin")(commands.pin_model)
app.command("doctor")(commands.doctor)
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
        # "Value error" is pydantic's, in typer. The command's help explains more.
        message = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
        stop = "" if message.endswith("?") else "."
        complain(f"{message}{stop} See '{error.ctx.command_path if error.ctx else app.info.name} --help'.")
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(KILLED + received[-1])
    sys.exit(USER_MISTAKE)


def _note(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """Print a warning as one line; while compilers are silenced, only our own."""
    out = console(stderr=True) if issubclass(category, BackendKwargsWarning) else Console(stderr=True, highlight=False)
    say(f"note: {message}", out=out)
