"""`backend-kwargs compare`: one model under several backends, checked and timed."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from backend_kwargs.cli.pages import Against, Html, Json, Markdown, Outputs, WithCode
from backend_kwargs.cli.pasting import Timed, lines_to_paste
from backend_kwargs.errors import BackendKwargsError, printable, wrong_value
from backend_kwargs.facts.decision import EAGER
from backend_kwargs.files.atomic_write import check_writable, write_whole
from backend_kwargs.files.plain_data import read_text
from backend_kwargs.harness.models import folder_of_model, model_of
from backend_kwargs.harness.modules import importable
from backend_kwargs.options import precisions
from backend_kwargs.options.spec import join_candidate, split_candidates
from backend_kwargs.page.values import file_of
from backend_kwargs.registry import PLAIN

if TYPE_CHECKING:
    from backend_kwargs.compare import Comparison, Row
    from backend_kwargs.compare.gate import Judged

TEMPLATES = ("auto", "freezing", "cpp_wrapper", "max_autotune")
BACKENDS = ",".join(["eager", "inductor", *(f"{PLAIN}:{each}" for each in TEMPLATES)])
NONE_RAN, BELOW = 1, 3  # exit codes
QUICK_S, QUICK_RACE_S = 60.0, 10.0
RULE = "Among the candidates whose interval overlaps that of the fastest, this one compiled in the least time:"


Backends = Annotated[
    str,
    typer.Option(
        help="Separated by commas; options of one in brackets: a,b\\[x=1,y=2]. "
        f"Default: {BACKENDS.replace(',', ', ')}.",
        show_default=False,
    ),
]
Trust = Annotated[bool, typer.Option("--trust", help="Let --config contain code, such as a function to import.")]
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


Tolerance = Annotated[
    float | None, typer.Option(help="Absolute and relative tolerance; default 1e-3, in training 1e-2.")
]
Cold = Annotated[
    bool,
    typer.Option(
        "--cold/--warm",
        help="Empty Inductor's cache for each candidate, or use it as it is: sooner, but compile times depend on it.",
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="End in about a minute: short races, and no compile that may take longer.")
]
Samples = Annotated[Path | None, typer.Option(metavar="FILE", help="Write every row and its raw samples as JSON.")]
FailBelow = Annotated[
    float | None,
    typer.Option(
        "--fail-below",
        metavar="RATIO",
        help="Exit with 3 if the speedup of the fastest candidate over --over is not surely so high: "
        "the lower end of its interval counts.",
    ),
]
Over = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What --fail-below relates to; default: torch.compile without a mode."),
]


class Mode(StrEnum):
    """What one call runs: forward alone, or forward and backward."""

    inference = "inference"
    training = "training"


def show(
    factory: Model,
    backends: Backends = BACKENDS,
    options: Assignments = None,
    config: Annotated[str | None, typer.Option(metavar="BASE64|@FILE", help="Another candidate, as a config.")] = None,
    trust: Trust = False,
    mode: Annotated[Mode, typer.Option(help="Forward alone, or forward and backward.")] = Mode.inference,
    device: Annotated[str | None, typer.Option(help="Where to run; default: where the factory put the model.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timing rounds; each round times every candidate.")] = 30,
    precision: Precisions = None,
    max_error: MaxError = None,
    tolerance: Tolerance = None,
    cold: Cold = True,
    quick: Quick = False,
    html: Html = None,
    json: Json = None,
    markdown: Markdown = None,
    with_code: WithCode = False,
    against: Against = None,
    fail_below: FailBelow = None,
    over: Over = None,
    samples: Samples = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Plot the speedups.")] = None,
    report: Annotated[bool, typer.Option("--report", help="Show what each backend generated.")] = False,
) -> None:
    """Compare one model under several backends, check the results, time them interleaved, and print a table.

    A FILE.py and its factory can import the files next to it, as with `python FILE.py`.
    """
    outputs = Outputs.checked(html, json, markdown, against=against, with_code=with_code)
    _check_outputs(samples, plot)  # now, not after minutes of compiling
    gate = _gate(fail_below, over)
    backends = ",".join([backends, *_in_precisions(precision, max_error, backends)])
    with importable(folder_of_model(factory)):  # a backend may be a module next to the model
        wanted = list(_backends(backends, assigned(options), config, trust=trust))
    wanted = [_quickly(*each) for each in wanted] if quick else wanted
    if gate:
        gate = gate.among(wanted, optioned=bool(options))
    model, example_inputs = model_of(factory)
    from backend_kwargs.compare import Candidate, compare

    with quiet(), _progress([label for label, _ in wanted]) as progress:
        comparison = compare(
            model,
            example_inputs,
            [Candidate(label, backend) for label, backend in wanted],
            mode=mode.value,
            device=device,
            rounds=rounds,
            tolerance=tolerance,
            max_error=max_error,
            cold=cold,
            limit_s=QUICK_S if quick else None,
            kernels=bool(outputs),
            progress=progress,
        )
    timed = Timed.of(model, example_inputs, training=mode is Mode.training, device=device)
    _finish(comparison, factory, dict(wanted), outputs, gate, timed=timed, reports=report, samples=samples, plot=plot)


@dataclass(frozen=True, slots=True)
class Gate:
    """What `--fail-below` asks for."""

    least: float
    over: str

    def among(self, wanted: list[tuple[str, Backend | None]], *, optioned: bool) -> "Gate":
        """Return the gate with the label of one of the candidates, to which default is added if it is not there."""
        from backend_kwargs.compare.gate import DEFAULT, label_of

        labels = [label for label, _ in wanted]
        over = label_of(self.over, labels, optioned=optioned)
        if over not in labels:
            wanted.append((DEFAULT, backend_from_text("inductor", {})))
        return replace(self, over=over)


def _gate(fail_below: float | None, over: str | None) -> Gate | None:
    if fail_below is None:
        if over is not None:
            raise BackendKwargsError("--over needs --fail-below, the speedup over it that is asked for: 1.05, say.")
        return None
    if not 0 < fail_below < math.inf:
        raise wrong_value("--fail-below", "a ratio above 0, such as 1.05", fail_below)
    return Gate(fail_below, over or "default")


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


def _check_outputs(samples: Path | None, plot: Path | None) -> None:
    for path in filter(None, (samples, plot)):
        check_writable(path)
    if plot:
        from backend_kwargs.compare.drawing import check_drawable

        check_drawable(plot)


def _finish(
    comparison: "Comparison",
    title: str,
    backends: Mapping[str, Backend | None],
    outputs: Outputs,
    gate: Gate | None,
    *,
    timed: Timed,
    reports: bool,
    samples: Path | None,
    plot: Path | None,
) -> None:
    """Print and write a comparison; exit with what it shows."""
    from backend_kwargs.compare import fastest, to_json
    from backend_kwargs.compare import plot as draw

    best = fastest(comparison)
    backend = backends[best.label] if best and not comparison.over_itself(best) else None
    _print(comparison, best, backend, timed=timed, reports=reports)
    judged = _judged(comparison, gate)
    if outputs:
        from backend_kwargs.compare.document import document_of

        paste = lines_to_paste(backend, timed) if backend else []
        outputs.write(document_of(comparison, file_of(title), paste, [judged.text] if judged else []))
    if samples:
        import json

        write_whole(samples, json.dumps(to_json(comparison), indent=2) + "\n")
    if plot:
        draw(comparison, plot)
    if not any(row.right for row in comparison.rows):
        raise typer.Exit(NONE_RAN)
    if judged and not judged.passed:
        raise typer.Exit(BELOW)


def _judged(comparison: "Comparison", gate: Gate | None) -> "Judged | None":
    if gate is None:
        return None
    from backend_kwargs.compare.gate import judge

    judged = judge(comparison, gate.over, gate.least)
    say("", judged.text)
    return judged


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


def _quickly(label: str, backend: Backend | None) -> tuple[str, Backend | None]:
    """Return a candidate whose races, if it has any, are short unless it says how long they may be."""
    if backend is None or not backend.options.get("auto") or "budget_s" in backend.options:
        return label, backend
    return f"{label}[budget_s={QUICK_RACE_S:g}]", backend.bind("--quick", {"budget_s": QUICK_RACE_S})


@contextmanager
def _progress(labels: Sequence[str]) -> Iterator[Callable[[str, str, float], None]]:
    def named(label: str) -> str:
        return f"{label} ({labels.index(label) + 1} of {len(labels)})" if label in labels else label

    err = console(stderr=True)
    if not err.is_terminal:
        yield lambda label, stage, fraction: _log(err, named(label), stage)
        return
    left = (TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), *left)
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(label: str, stage: str, fraction: float) -> None:
            bar.update(task, description=escape(printable(f"{stage} {named(label)}")), completed=fraction)

        yield show


def _log(err: Console, label: str, stage: str) -> None:
    if stage == "compile":
        say(f"compiling {label}", out=err)


def _print(
    comparison: "Comparison", best: "Row | None", backend: Backend | None, *, reports: bool, timed: Timed | None = None
) -> None:
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
        if comparison.baseline == EAGER:
            say("Call the model itself.")
    elif ratio := comparison.over_itself(best):
        speedup = f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
        say(f"Call the model itself: {best.label}, the fastest candidate, is {speedup} as fast.")
    else:
        say(RULE)
        say(*(lines_to_paste(backend, timed) if backend else []) or [f"{backend!r}, which cannot be written as text."])
    for row in (row for row in comparison.rows if reports and row.report):
        say("", row.label, *str(row.report).splitlines())
