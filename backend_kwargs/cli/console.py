"""What commands share: output, coloured on a terminal, plain and wide in a pipe; files, lines to paste, arguments."""

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import backend_kwargs
from backend_kwargs.backend import Backend, find_in_dynamo
from backend_kwargs.errors import (
    BackendKwargsError,
    BrokenPluginError,
    printable,
    shortened,
    shown,
    wrong_value,
)
from backend_kwargs.files import check_writable, write_whole
from backend_kwargs.harness.models import LIBRARIES, check_factory, spec_of
from backend_kwargs.options import convert, split_assignment
from backend_kwargs.options.option import Options
from backend_kwargs.page import Document, changes, read_document, to_html, to_json
from backend_kwargs.page.markdown import to_markdown
from backend_kwargs.registry import make_backend

PIPE_WIDTH = 200
LONGEST_LINE = 10_000  # characters: a file may contain a text of megabytes
NOTEBOOK = "JPY_PARENT_PID"  # set by Jupyter's kernels


def checked_model(model: str | None) -> str | None:
    """Return a model's name; raise if it names a file or function that does not exist, before torch is imported."""
    if model and model.partition(":")[0] not in LIBRARIES:
        check_factory(model)
    return model


_MODEL = typer.Argument(
    callback=checked_model,
    metavar="MODEL",
    help="timm:NAME, transformers:CLASS?option=value, or FILE_OR_MODULE:FACTORY that returns (model, example_inputs).",
)
Model = Annotated[str, _MODEL]
MaybeModel = Annotated[str | None, _MODEL]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option; may be given several times."),
]
As = Annotated[
    Literal["inductor-config", "aoti-config"] | None,
    typer.Option(
        "--as", help="Print the options as JSON for code that calls Inductor, such as vLLM, or for AOTInductor alone."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def assigned(assignments: Iterable[str] | None) -> dict[str, str]:
    """Parse `NAME=VALUE` texts."""
    return dict(map(split_assignment, assignments or ()))


def backend_from_text(spec: str, options: dict[str, str]) -> Backend:
    """Make a backend from options given as text; `spec` may also be "file.py:function"."""
    return make_backend(spec_of(spec)).bind("command line", options, convert)


class _Stream(Console):
    """A console whose output may be closed early, as by `head`, or whose disk may be full."""

    def print(self, *objects: object, **style: Any) -> None:
        """Print; exit with 0 if the reader has closed standard output."""
        try:
            super().print(*objects, **style)
        except OSError as error:
            self._lost(error)

    def on_broken_pipe(self) -> None:
        """Exit with 0, where rich would exit with 1."""
        self._lost(BrokenPipeError())

    def _lost(self, error: OSError) -> None:
        # Otherwise Python flushes the buffer at exit, fails again, and prints lines and sets an exit code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        if self.stderr:  # only notes are lost: the command's own result still counts
            return
        if isinstance(error, BrokenPipeError):
            raise SystemExit(0)
        raise BackendKwargsError(f"Cannot write to standard output: {error.strerror}; send it elsewhere.") from None


_ours: TextIO | None = None  # the real standard error, while other output to it is dropped


@contextmanager
def quiet() -> Iterator[None]:
    """Drop compilers' output to standard error, except our notes and progress; with TORCH_LOGS set, drop nothing.

    Compilers write from Python, from libraries and from child processes, so the file descriptor itself is replaced.
    """
    global _ours  # noqa: PLW0603 - a process has one standard error
    if "TORCH_LOGS" in os.environ or sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    with os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors="replace") as kept:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        _ours = kept
        try:
            yield
        finally:
            _ours = None
            sys.stderr.flush()
            os.dup2(kept.fileno(), 2)


def console(stderr: bool = False) -> Console:
    """Return the console for standard output or standard error."""
    file = (_ours or sys.stderr) if stderr else sys.stdout
    # `file` is None if the shell closed the stream; a notebook's `!command` has a terminal that shows every refresh.
    terminal = file is not None and file.isatty() and NOTEBOOK not in os.environ
    style: dict[str, Any] = {} if terminal else {"width": PIPE_WIDTH, "force_terminal": False}
    return _Stream(file=_ours if stderr else None, stderr=stderr, highlight=False, emoji=False, **style)


def say(*lines: str, out: Console | None = None) -> None:
    """Print each of `lines`, which may quote anybody's file, as one line that cannot control a terminal."""
    (out or console()).print("\n".join(map(_safe, lines)), soft_wrap=True, markup=False)


def complain(message: str) -> None:
    """Print one line on standard error."""
    console(stderr=True).print(Text.assemble(("error:", "red"), " ", _safe(message)), soft_wrap=True)


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print rows under a header, with numbers right-aligned."""
    rows = list(rows)
    if not rows:
        return
    # Folded: a name with an ellipsis could not be copied from a narrow terminal.
    columns = (Column(name, overflow="fold") for name in header)
    table = Table(*columns, box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_safe(str(cell))) for cell in row))
    # Not out.capture(), which writes an empty string to the stream; on a full disk even that fails.
    out, text = console(), StringIO()
    Console(file=text, width=out.width, force_terminal=out.is_terminal, highlight=False, emoji=False).print(table)
    out.print("\n".join(line.rstrip() for line in text.getvalue().splitlines()), soft_wrap=True, markup=False)


def print_json(data: object) -> None:
    """Print data as JSON, with the repr of values that JSON cannot represent."""
    data = json.loads(json.dumps(data, default=repr), parse_constant=str)  # JSON has no infinite number either
    written = json.dumps(data, indent=2).replace("\x7f", "\\u007f")  # the one that JSON leaves as it is
    console().print(written, soft_wrap=True, markup=False)


def print_config(config: Options) -> None:
    """Print options as JSON; raise if JSON cannot represent one."""
    for name, value in config.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise BackendKwargsError(f"Option {name!r} is {shown(value)}, which JSON cannot represent.") from None
    print_json(dict(config))


def _safe(text: str) -> str:
    return shortened(printable(text), LONGEST_LINE)


def output_option(written: str) -> Any:
    """Return the flag for the files that a command writes, with what their endings mean."""
    return typer.Option("-o", "--output", metavar="FILE", help=written)


Output = Annotated[
    list[Path] | None,
    output_option("Write a page (.html), its data (.json) or a summary for a pull request (.md); repeatable."),
]
PAGES: Mapping[str, Callable[[Document], str | bytes]] = {".html": to_html, ".json": to_json, ".md": to_markdown}


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files that a command writes, and the older report that they are compared with."""

    files: Sequence[Path] = ()
    old: Document | None = None

    @classmethod
    def checked(
        cls, files: Sequence[Path] | None, also: Collection[str] = (), *, against: Path | None = None
    ) -> "Outputs":
        """Return the outputs, which may end in `also` too, with the older report read; raise now, not after minutes."""
        made = cls(files or ())
        endings = (*also, *PAGES)
        for path in made.files:
            if path.suffix.lower() not in endings:
                listed = f"{', '.join(endings[:-1])} or {endings[-1]}"
                raise wrong_value("Option '--output'", f"a file that ends in {listed}", str(path))
            check_writable(path)
        if against and not made:
            raise BackendKwargsError("--against needs a file to show the changes in: -o OUT.html, say.")
        return cls(made.files, read_document(against) if against else None)

    def __bool__(self) -> bool:
        return bool(self.ending(*PAGES))

    def ending(self, *suffixes: str) -> list[Path]:
        """Return the files whose names end so."""
        return [path for path in self.files if path.suffix.lower() in suffixes]

    def write(self, document: Document, data: str | None = None) -> None:
        """Write the document to each file, and say where the page is; `data` is what .json has in place of its own."""
        import msgspec

        if self.old:
            document = msgspec.structs.replace(document, changes=changes(self.old, document))
        for path in self.ending(*PAGES):
            ending = path.suffix.lower()
            write_whole(path, data if data and ending == ".json" else PAGES[ending](document))
            if ending == ".html":
                say(f"The page is {path}.", out=console(stderr=True))


IMPORT = "import backend_kwargs as bk"


def as_timed(
    model: Any, example_inputs: object, *, training: bool, device: str | None
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the lines that set `model` up as `compare` times it, and those that call `compiled` so.

    That is in eval mode without gradients, or in training.
    """
    import torch

    stars = "**" if isinstance(example_inputs, Mapping) else "*"
    call = f"compiled({'' if isinstance(example_inputs, torch.Tensor) else stars}example_inputs)"
    calls = [call] if training else ["with torch.no_grad():", f"    {call}"]
    if not isinstance(model, torch.nn.Module):
        return [], calls
    tensors = [*model.parameters(), *model.buffers()]
    place = {device} if device else {str(tensor.device) for tensor in tensors}
    dtypes = {str(tensor.dtype) for tensor in tensors if tensor.is_floating_point()}
    # Several devices or dtypes are the factory's own choice: to() would change them.
    moved = [*(f'"{each}"' for each in place if len(place) == 1), *(dtypes if len(dtypes) == 1 else ())]
    to = f".to({', '.join(moved)})" if moved else ""
    return [f"model = model.{'train' if training else 'eval'}(){to}"], calls


def lines_to_paste(backend: Backend, before: Sequence[str] = (), calls: Sequence[str] = ()) -> list[str]:
    """Return the lines that compile `model` with `backend`, between those `before` and the `calls` of the result.

    There are none if the backend cannot be written as text.
    """
    if not (written := _written(backend)):
        return []
    ours = [IMPORT, ""] if written.startswith("bk.") else []
    return [*ours, *before, f"{'compiled = ' if calls else ''}torch.compile(model, backend={written})", *calls]


def _written(backend: Backend) -> str:
    """Return the name by which torch.compile finds `backend`, or the expression that makes it; "" if there is none."""
    name, written = backend.spec, pasted(f"bk.{backend!r}")
    with suppress(BrokenPluginError):
        # dynamo's "inductor" is equal in effect, although it is another object
        if repr(backend) == f"make_backend({name!r})" and (name == "inductor" or find_in_dynamo(name) == backend):
            return f'"{name}"'
    with suppress(BackendKwargsError, SyntaxError, NameError):  # the repr of a value may be no expression
        if eval(written, {"bk": backend_kwargs}) == backend:  # noqa: S307 - the repr is our own
            return written
    return ""


def pasted(expression: str) -> str:
    """Return an expression with `bk.` before each Store."""
    return re.sub(r"\bStore\(", "bk.Store(", expression)
