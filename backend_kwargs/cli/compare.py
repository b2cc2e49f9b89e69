"""`backend-kwargs compare`: one model under several backends, checked and timed."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backend_kwargs.backend import Backend
from backend_kwargs.cli.console import (
    MaybeModel,
    Output,
    Outputs,
    Timed,
    backend_from_text,
    console,
    lines_to_paste,
    print_table,
    quiet,
    say,
)
from backend_kwargs.errors import BackendKwargsError, wrong_value
from backend_kwargs.facts.decision import EAGER
from backend_kwargs.harness.models import folder_of_model, importable, model_of
from backend_kwargs.options.option import join_candidate, split_candidates
from backend_kwargs.page import read_document
from backend_kwargs.page.figures import file_of
from backend_kwargs.progress import progress
from backend_kwargs.registry import PLAIN

if TYPE_CHECKING:
    from backend_kwargs.compare import Comparison, Row

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
From = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Compare nothing: make a page, data or summary of an earlier -o FILE."),
]
MaxError = Annotated[
    float | None, typer.Option(help="Largest relative RMSE to float64 to accept, where numbers are beyond --tolerance.")
]
Tolerance = Annotated[
    float | None, typer.Option(help="Absolute and relative tolerance; default 1e-3, in training 1e-2.")
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="End in about a minute: short races, Inductor's cache as it is, no compile that may take longer.",
    ),
]
Against = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Show what differs from an earlier -o OLD.html or OLD.json.")
]
FailBelow = Annotated[
    str | None,
    typer.Option(
        "--fail-below",
        metavar="[NAME=]RATIO",
        help="Exit with 3 if the speedup of the fastest candidate over NAME (default: torch.compile without a mode) is "
        "not surely so high: the lower end of its interval counts.",
    ),
]
OF_FILES = ("from_", "output", "against")


class Mode(StrEnum):
    """What one call runs: forward alone, or forward and backward."""

    inference = "inference"
    training = "training"


def show(
    context: typer.Context,
    factory: MaybeModel = None,
    from_: From = None,
    backends: Backends = BACKENDS,
    mode: Annotated[Mode, typer.Option(help="Forward alone, or forward and backward.")] = Mode.inference,
    device: Annotated[str | None, typer.Option(help="Where to run; default: where the factory put the model.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timing rounds; each round times every candidate.")] = 30,
    tolerance: Tolerance = None,
    max_error: MaxError = None,
    quick: Quick = False,
    output: Output = None,
    against: Against = None,
    fail_below: FailBelow = None,
) -> None:
    """Compare one model under several backends, check the results, time them interleaved, and print a table.

    A FILE.py and its factory can import the files next to it, as with `python FILE.py`.
    """
    outputs = Outputs.checked(output, against=against)
    if from_:
        return _again(context, from_, outputs)
    if factory is None:
        raise BackendKwargsError("Name what to compare: MODEL, or --from FILE, an earlier page or its data.")
    gate = None if fail_below is None else Gate.of(fail_below)
    with importable(folder_of_model(factory)):  # a backend may be a module next to the model
        wanted = [
            (join_candidate(spec, own), None if spec == EAGER else backend_from_text(spec, own))
            for spec, own in split_candidates(backends)
        ]
    wanted = [_quickly(*each) for each in wanted] if quick else wanted
    if gate:
        gate = gate.among(wanted)
    model, example_inputs = model_of(factory)
    from backend_kwargs.compare import Candidate, compare

    own = [backend.options.get("max_error") for _, backend in wanted if backend]  # accepted without --max-error

    with quiet(), _progress([label for label, _ in wanted]) as told:
        comparison = compare(
            model,
            example_inputs,
            [Candidate(label, backend) for label, backend in wanted],
            mode=mode.value,
            device=device,
            rounds=rounds,
            tolerance=tolerance,
            max_error=max(filter(None, own), default=None) if max_error is None else max_error,
            cold=not quick,
            limit_s=QUICK_S if quick else None,
            kernels=bool(outputs),
            progress=told,
        )
    timed = Timed.of(model, example_inputs, training=mode is Mode.training, device=device)
    _finish(comparison, factory, dict(wanted), outputs, gate, timed)


def _again(context: typer.Context, earlier: Path, outputs: Outputs) -> None:
    """Write the outputs from the data of an earlier page; raise for what only a comparison uses."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in OF_FILES:
            shown = "MODEL" if name == "factory" else f"--{name.replace('_', '-')}"
            raise BackendKwargsError(f"{shown} has no effect with --from, which compares nothing.")
    if not outputs:
        raise BackendKwargsError("Name what to write: -o OUT.html, OUT.json or OUT.md.")
    outputs.write(read_document(earlier))


@dataclass(frozen=True, slots=True)
class Gate:
    """What `--fail-below` asks for."""

    least: float
    over: str

    @classmethod
    def of(cls, text: str) -> "Gate":
        """Read "1.05" or "eager=1.05"."""
        name, _, ratio = text.rpartition("=")
        try:
            least = float(ratio)
        except ValueError:
            least = 0.0
        if not 0 < least < math.inf:
            raise wrong_value("Option '--fail-below'", "a ratio above 0, such as 1.05, or eager=1.05", text)
        return cls(least, name or "default")

    def among(self, wanted: list[tuple[str, Backend | None]]) -> "Gate":
        """Return the gate with the label of one of the candidates, to which default is added if it is not there."""
        from backend_kwargs.compare.comparison import DEFAULT, label_of

        labels = [label for label, _ in wanted]
        over = label_of(self.over, labels)
        if over not in labels:
            wanted.append((DEFAULT, backend_from_text("inductor", {})))
        return replace(self, over=over)


def _finish(
    comparison: "Comparison",
    title: str,
    backends: Mapping[str, Backend | None],
    outputs: Outputs,
    gate: Gate | None,
    timed: Timed,
) -> None:
    """Print and write a comparison; exit with what it shows."""
    from backend_kwargs.compare import fastest

    best = fastest(comparison)
    backend = backends[best.label] if best and not comparison.over_itself(best) else None
    _print(comparison, best, backend, timed)
    judged = None
    if gate:
        from backend_kwargs.compare.comparison import judge

        judged = judge(comparison, gate.over, gate.least)
        say("", judged.text)
    if outputs:
        from backend_kwargs.compare.comparison import document_of

        paste = lines_to_paste(backend, timed) if backend else []
        outputs.write(document_of(comparison, file_of(title), paste, [judged.text] if judged else []))
    if not any(row.right for row in comparison.rows):
        raise typer.Exit(NONE_RAN)
    if judged and not judged.passed:
        raise typer.Exit(BELOW)


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
        yield lambda label, stage, _: say(f"compiling {named(label)}", out=err) if stage == "compile" else None
        return
    with progress("compare", "starting", err) as tell:
        yield lambda label, stage, fraction: tell(f"{stage} {named(label)}", fraction)


def _print(comparison: "Comparison", best: "Row | None", backend: Backend | None, timed: Timed | None = None) -> None:
    """Print the table, what it says, and the lines to paste."""
    from backend_kwargs.compare.comparison import COLUMNS, cells

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
        say(f"Call the model itself: {best.label}, the fastest candidate, is {ratio.as_ratio()} as fast.")
    else:
        say(RULE)
        say(*(lines_to_paste(backend, timed) if backend else []) or [f"{backend!r}, which cannot be written as text."])
