"""`backend-kwargs compare`: one model under several backends, checked and timed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from backend_kwargs.backend import Backend
from backend_kwargs.backends.others import OTHERS, in_precision
from backend_kwargs.cli.arguments import Assignments, Model, assigned, backend_from_text
from backend_kwargs.cli.console import console, print_table, quiet, say
from backend_kwargs.cli.models import folder_of_model, model_of
from backend_kwargs.cli.modules import importable
from backend_kwargs.cli.pasting import Timed, lines_to_paste
from backend_kwargs.errors import BackendKwargsError, printable
from backend_kwargs.files.atomic_write import check_writable, write_whole
from backend_kwargs.files.plain_data import read_text
from backend_kwargs.options import precisions
from backend_kwargs.options.spec import join_candidate, split_candidates
from backend_kwargs.registry import PLAIN

if TYPE_CHECKING:
    from backend_kwargs.compare import Comparison

BACKENDS = "eager,inductor,tmpl-inductor:freezing,tmpl-inductor:cpp_wrapper,tmpl-inductor:max_autotune"
NONE_RAN = 1
RULE = "Among the candidates whose interval overlaps that of the fastest, this one compiled in the least time:"


Precisions = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,NAME]",
        help="Also tmpl-inductor, and openvino-native if listed, in each precision: bf16, int8-dynamic, ...",
    ),
]
MaxError = Annotated[
    float | None, typer.Option(help="Largest relative RMSE to float64 to accept; --precision needs it.")
]


class Mode(StrEnum):
    """What one call runs: forward alone, or forward and backward."""

    inference = "inference"
    training = "training"


def show(
    factory: Model,
    backends: Annotated[
        str,
        typer.Option(
            help="Separated by commas; options of one in brackets: a,b\\[x=1,y=2]. "
            f"Default: {BACKENDS.replace(',', ', ')}.",
            show_default=False,
        ),
    ] = BACKENDS,
    options: Assignments = None,
    config: Annotated[str | None, typer.Option(metavar="BASE64|@FILE", help="Another candidate, as a config.")] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Let --config contain code, such as a function to import.")
    ] = False,
    mode: Annotated[Mode, typer.Option(help="Forward alone, or forward and backward.")] = Mode.inference,
    device: Annotated[str | None, typer.Option(help="Where to run; default: where the factory put the model.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timing rounds; each round times every candidate.")] = 30,
    precision: Precisions = None,
    max_error: MaxError = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Absolute and relative tolerance; default 1e-3, in training 1e-2.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all results as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Plot the speedups.")] = None,
    report: Annotated[bool, typer.Option("--report", help="Show what each backend generated.")] = False,
) -> None:
    """Compile one model under several backends, check the results, time them interleaved, and print a table.

    A FILE.py and its factory can import the files next to it, as with `python FILE.py`.
    """
    _check_outputs(json, plot)  # now, not after minutes of compiling
    backends = ",".join([backends, *_in_precisions(precision, max_error, backends)])
    with importable(folder_of_model(factory)):  # a backend may be a module next to the model
        wanted = list(_backends(backends, assigned(options), config, trust=trust))
    model, example_inputs = model_of(factory)
    from backend_kwargs.compare import Candidate, compare, fastest

    candidates = [Candidate(label, backend) for label, backend in wanted]

    with quiet(), _progress() as progress:
        comparison = compare(
            model,
            example_inputs,
            candidates,
            mode=mode.value,
            device=device,
            rounds=rounds,
            tolerance=tolerance,
            max_error=max_error,
            progress=progress,
        )
    best = fastest(comparison)
    timed = Timed.of(model, example_inputs, training=mode is Mode.training, device=device)
    _print(comparison, dict(wanted)[best.label] if best else None, timed=timed, reports=report)
    _write(comparison, json, plot)
    if not any(row.right for row in comparison.rows):
        raise typer.Exit(NONE_RAN)


def _in_precisions(precision: str | None, max_error: float | None, backends: str) -> list[str]:
    """Return candidates for each precision; raise if one is unknown or there is no bound.

    They are `tmpl-inductor`, and those of `backends` whose compiler has the precision here, such as `openvino-native`.
    """
    names = precisions.named(precision)
    if names and max_error is None:
        raise BackendKwargsError("--precision needs --max-error, the largest relative error of an output: 1e-2, say.")
    others = [(spec, join_candidate(spec, own)) for spec, own in split_candidates(backends) if spec in OTHERS]
    candidates = []
    for name in names:
        candidates.append(join_candidate("tmpl-inductor", {"precision": name, "max_error": repr(max_error)}))
        for spec, label in others:
            if text := in_precision(label, name, max_error):
                if why := OTHERS[spec](spec).why_not_in(name):
                    left_out = f"{spec} is not compared in {name}: {why}."
                    say(left_out, out=console(stderr=True))
                else:
                    candidates.append(text)
    return candidates


def _check_outputs(json: Path | None, plot: Path | None) -> None:
    for path in filter(None, (json, plot)):
        check_writable(path)
    if plot:
        from backend_kwargs.compare.drawing import check_drawable

        check_drawable(plot)


def _write(comparison: "Comparison", json: Path | None, plot: Path | None) -> None:
    from backend_kwargs.compare import plot as draw
    from backend_kwargs.compare import to_json

    if json:
        import json as writer

        write_whole(json, writer.dumps(to_json(comparison), indent=2) + "\n")
    if plot:
        draw(comparison, plot)


def _backends(
    backends: str, common: dict[str, str], config: str | None, *, trust: bool
) -> Iterator[tuple[str, Backend | None]]:
    """Yield the label and the backend of each candidate, None for eager."""
    if common:  # checked even if no candidate takes them
        backend_from_text(PLAIN, common)
    for spec, own in split_candidates(backends):
        yield join_candidate(spec, own), None if spec == "eager" else _backend(spec, common, own)
    if config is not None:
        text = read_text(config[1:], "a config").strip() if config.startswith("@") else config
        backend = Backend.from_config(text, trust=trust)
        yield f"{backend.spec} of --config", backend


def _backend(spec: str, common: dict[str, str], own: dict[str, str]) -> Backend:
    """Return a backend with its own options; `common` ones only for Inductor."""
    inductor = backend_from_text(spec, {}).takes_inductor_options
    return backend_from_text(spec, {**(common if inductor else {}), **own})


@contextmanager
def _progress() -> Iterator[Callable[[str, str, float], None]]:
    err = console(stderr=True)
    if not err.is_terminal:
        yield lambda label, stage, fraction: _log(err, label, stage)
        return
    left = (TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *left)
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(label: str, stage: str, fraction: float) -> None:
            bar.update(task, description=escape(printable(f"{stage} {label}")), completed=fraction)

        yield show


def _log(err: Console, label: str, stage: str) -> None:
    if stage == "compile":
        say(f"compiling {label}", out=err)


def _print(comparison: "Comparison", best: Backend | None, *, reports: bool, timed: Timed | None = None) -> None:
    """Print the table, what it says, and the lines to paste."""
    from backend_kwargs.compare.rows import COLUMNS, cells

    print_table(COLUMNS, map(cells, comparison.rows))
    for line in comparison.reading():
        say(line)
    say()
    if comparison.baseline is None:
        say("No candidate ran.")
    elif best is None:
        noise = comparison.noise
        against_itself = f": timed against itself it is at {noise.low:.2f}x to {noise.high:.2f}x" if noise else ""
        say(f"Nothing beats {comparison.baseline} beyond the noise{against_itself}.")
    else:
        say(RULE)
        say(*(lines_to_paste(best, timed) or [f"{best!r}, which cannot be written as text."]))
    for row in (row for row in comparison.rows if reports and row.report):
        say("", row.label, *str(row.report).splitlines())
