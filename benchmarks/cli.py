"""The command line `python -m benchmarks`: commands that parse, call and print."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from backend_kwargs.cli.console import complain, console, print_json, print_table
from backend_kwargs.errors import BackendKwargsError, wrong_value
from backend_kwargs.files import write_whole
from benchmarks.arguments import Device, Shard, device_of, shard_of
from benchmarks.studies.commands import COMMANDS

if TYPE_CHECKING:
    import torch

    from benchmarks.execution.records import Cell
    from benchmarks.execution.session import Plan, Say
    from benchmarks.workloads.case import Case

UNFINISHED = 3  # the budget ended first; continue with --resume
FAILED = 1
USER_MISTAKE = 2
INTERRUPTED = 130
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

app = typer.Typer(name="python -m benchmarks", help=__doc__, add_completion=False, pretty_exceptions_enable=False)


class Suite(StrEnum):
    """How much to run."""

    smoke = "smoke"
    dev = "dev"
    start = "start"
    full = "full"
    models = "models"


class Mode(StrEnum):
    """What one call runs: forward, forward and backward, or a whole training step."""

    fwd = "fwd"
    fwd_bwd = "fwd_bwd"
    train = "train"


class L2(StrEnum):
    """Whether the L2 cache is emptied before each sample of device time."""

    cold = "cold"
    warm = "warm"


class Timer(StrEnum):
    """One clock alone: the device's events, or the wall."""

    events = "events"
    wall = "wall"


class Scale(StrEnum):
    """The sizes: "full" are the table's, "smoke" the same computation, small."""

    smoke = "smoke"
    full = "full"


Globs = Annotated[list[str] | None, typer.Option("--case", help="Only cases with such a name; repeatable.")]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="transformers:NAME?option=value, timm:NAME or FILE:FACTORY, instead of the cases."),
]
Out = Annotated[Path, typer.Option(metavar="FILE", help="JSON lines; one file for each shard.")]
Peers = Annotated[
    str | None, typer.Option(metavar="GLOB,...", help="Only these peers (all but each !GLOB), and the baselines.")
]
Modes = Annotated[list[Mode] | None, typer.Option(help="Only such modes; repeatable.")]
Dtype = Annotated[str | None, typer.Option(metavar="bf16|fp16|fp32", help="Instead of each case's own.")]
Sizes = Annotated[Scale | None, typer.Option(help='"smoke" on a CPU and for the smoke suite, else "full".')]
OneTimer = Annotated[Timer | None, typer.Option(help="One clock only; default: both.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="5 for the smoke suite, else 30.")]
Compiles = Annotated[
    int | None, typer.Option(min=1, help="How often to compile and time each peer; default: 3 for a headline, else 1.")
]
Beside = Annotated[
    bool | None,
    typer.Option("--beside/--apart", help="Compile in the timing process, or first in a separate process."),
]
Jobs = Annotated[int, typer.Option(min=1, help="Parallel compiles of peers that time no kernels.")]
Tuners = Annotated[int, typer.Option(min=1, help="Parallel compiles of torch's modes that time kernels.")]
Ahead = Annotated[int, typer.Option(min=1, help="Groups to compile before the first of them is timed.")]
FewerCompiles = Annotated[
    bool,
    typer.Option(
        "--fewer-compiles",
        help="max-autotune begins with what max-autotune-no-cudagraphs has tuned, and nothing compiles a second time.",
    ),
]
OneCache = Annotated[
    bool, typer.Option("--one-cache", help="As --beside, with one cache for all; reports no compile times.")
]
Budget = Annotated[str | None, typer.Option(metavar="540s", help="Stop after this time; --resume continues.")]
Timeout = Annotated[str, typer.Option(metavar="300s", help="For one peer's compile, or a group's timing.")]
Resume = Annotated[bool, typer.Option("--resume", help="Run only what FILE lacks.")]
Also = Annotated[list[Path] | None, typer.Option(metavar="FILE", help="With --resume: another file of done groups.")]
NoCeilings = Annotated[bool, typer.Option("--no-ceilings", help="Without limits.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if any available peer fails.")]


@app.command("list")
def show_list(suite: Suite = Suite.full, case: Globs = None) -> None:
    """List the cases and the peers."""
    from benchmarks.execution.session import select
    from benchmarks.workloads.cases import CASES
    from benchmarks.workloads.peers import HAND, peers

    chosen = select(CASES, suite, case or [], "cuda")
    rows = [
        (c.name, c.group, str(c.dtype).removeprefix("torch."), " ".join(c.modes), " ".join(sorted(c.suites)))
        for c in chosen
    ]
    print_table(("case", "group", "dtype", "modes", "suites besides full"), rows)
    found = [(p.name, p.kind, " ".join(p.devices), " ".join(p.modes)) for p in peers().values()]
    print_table(("peer", "kind", "devices", "modes"), [*found, (f"{HAND}NAME", "hand", "a case's own", "fwd fwd_bwd")])


@app.command()
def env(device: Device = None) -> None:
    """Print the environment of a run, as in its first line."""
    import torch

    from backend_kwargs.trial import environment
    from benchmarks.execution.session import about

    print_json({**environment(torch.device(device_of(device))), **about()})


@app.command()
def ceilings(device: Device = None, rounds: Annotated[int, typer.Option(min=1)] = 30) -> None:
    """Measure the device's best rates."""
    import torch

    from benchmarks.execution.ceilings import measure_ceilings

    with torch.no_grad():
        found = measure_ceilings(torch.device(device_of(device)), rounds)
    rows = [
        (name, f"{f.value:.4g}", f"[{f.low:.4g}, {f.high:.4g}]", f.unit, f.attempt) for name, f in found.figures.items()
    ]
    print_table(("ceiling", "median", "95 %", "unit", "best attempt"), rows)


@app.command()
def run(
    out: Out,
    suite: Suite = Suite.full,
    case: Globs = None,
    model: Models = None,
    peers: Peers = None,
    mode: Modes = None,
    dtype: Dtype = None,
    scale: Sizes = None,
    l2: L2 = L2.cold,
    timer: OneTimer = None,
    rounds: Rounds = None,
    compiles: Compiles = None,
    beside: Beside = None,
    jobs: Jobs = 1,
    tuners: Tuners = 1,
    ahead: Ahead = 1,
    fewer_compiles: FewerCompiles = False,
    one_cache: OneCache = False,
    budget: Budget = None,
    timeout: Timeout = "300s",
    shard: Shard = "1/1",
    resume: Resume = False,
    also: Also = None,
    device: Device = None,
    no_ceilings: NoCeilings = False,
    strict: Strict = False,
) -> None:
    """Check and time peers; exit with 3 if the budget ended first, with 1 if no cell passed."""
    from benchmarks.execution.session import Plan

    place = device_of(device)
    plan = Plan(
        cases=_cases(suite, case or [], model or [], mode or [], place),
        out=out,
        device=place,
        suite=suite.value,
        globs=_globs(peers, suite),
        modes=tuple(each.value for each in mode or ()),
        dtype=_dtype(dtype),
        scale=scale and scale.value,
        l2=l2.value,
        clocks=(timer.value,) if timer else ("events", "wall"),
        rounds=rounds,
        compiles=compiles,
        beside=beside,
        jobs=jobs,
        tuners=tuners,
        ahead=ahead,
        fewer_compiles=fewer_compiles,
        budget_s=_seconds("--budget", budget) if budget else float("inf"),
        step_s=_seconds("--timeout", timeout),
        shard=shard_of(shard),
        resume=resume,
        also=tuple(also or ()),
        ceilings=not no_ceilings,
        one_cache=one_cache,
    )
    _run(plan, strict=strict)


def _run(plan: "Plan", *, strict: bool) -> None:
    """Run a plan, print its cells, and exit with the matching status."""
    from benchmarks.execution.session import groups
    from benchmarks.execution.session import run as go

    if not groups(plan):
        if groups(replace(plan, shard=(1, 1))):
            console().print(f"Shard {plan.shard[0]}/{plan.shard[1]} is empty: there are fewer groups.")
            return
        raise BackendKwargsError("No case matches these options: `python -m benchmarks list` shows all.")
    with _progress() as say:
        progressed = go(plan, say)
    _print(progressed.cells)
    if progressed.out_of_time:
        console().print(f"{progressed.done} of {progressed.total} groups done: continue with --resume.")
        raise typer.Exit(UNFINISHED)
    failed = [cell for cell in progressed.cells if cell.status not in ("pass", "unavailable")]
    if (strict and failed) or (progressed.cells and not any(cell.passed for cell in progressed.cells)):
        raise typer.Exit(FAILED)


@app.command()
def compare(old: Path, new: Path) -> None:
    """Compare two files by speedups over eager.

    Exit with 0 if none fell beyond noise, 1 if one did or a peer no longer passes, 2 if the files cannot be compared.
    """
    from benchmarks.analysis.regressions import compare_files

    outcome = compare_files(old, new)
    console().print(outcome.table())
    if outcome.reason:
        console().print(outcome.reason, markup=False, soft_wrap=True)
    raise typer.Exit(outcome.code)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Of one device and one torch.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Markdown; plots are written next to it.")] = None,
    plots: Annotated[bool, typer.Option(help="Draw, with matplotlib.")] = True,
    hud: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write records for PyTorch's HUD.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write a page to look at.")] = None,
    against: Annotated[Path | None, typer.Option(metavar="OLD.html", help="With --html: show what differs.")] = None,
) -> None:
    """Write results as a page, as Markdown and plots, or as records for PyTorch's HUD."""
    import json

    from benchmarks.execution import records

    if not out and not hud and not html:
        raise BackendKwargsError("report requires --out FILE.md, --html OUT.html or --hud FILE.json.")
    if html:
        from benchmarks.analysis.page import write_page

        write_page(files, html, against=against)
    if hud:
        write_whole(hud, json.dumps(records.to_hud(records.read(*files)), indent=1) + "\n")
    if out:
        from benchmarks.analysis.report import write_report

        write_report(files, out, plots=plots)


for study in COMMANDS:
    app.command()(study)


# ---- arguments


def _globs(peers: str | None, suite: str) -> tuple[str, ...]:
    """Return the baselines and the globs of the requested peers, by default the suite's."""
    from benchmarks.workloads.peers import BASELINES, GLOBS, globs_of

    asked = globs_of(peers) if peers else GLOBS.get(suite, ("*",))
    return (*dict.fromkeys((*BASELINES, *asked)),)


def _cases(suite: str, globs: list[str], models: list[str], modes: list[Mode], device: str) -> "tuple[Case, ...]":
    if models and globs:
        raise BackendKwargsError("--model replaces the cases: leave --case out.")
    if not models:
        from benchmarks.execution.session import select
        from benchmarks.workloads.cases import CASES

        return select(CASES, suite, globs, device)
    from benchmarks.workloads.user_models import model_case

    return tuple(model_case(spec, mode.value) for spec in models for mode in modes or [Mode.fwd])


def _dtype(word: str | None) -> "torch.dtype | None":
    if word is None:
        return None
    import torch

    if word not in DTYPES:
        raise wrong_value("--dtype", " or ".join(map(repr, DTYPES)), word)
    found: Any = getattr(torch, DTYPES[word])
    return found


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise wrong_value(option, "seconds, such as '540s'", text)
    return seconds


# ---- printing


@contextmanager
def _progress() -> "Iterator[Say]":
    """Yield a function that shows progress: a bar on a terminal, else a line for each step."""
    stream, started = console(stderr=True), perf_counter()
    if not stream.is_terminal:
        yield lambda doing, done: stream.print(f"{perf_counter() - started:6.1f} s {done:4.0%} {doing}", markup=False)
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn()
    with Progress(*columns, console=stream, transient=True) as progress:
        bar = progress.add_task("", total=1.0)
        yield lambda doing, done: progress.update(bar, description=doing, completed=done)


def _print(cells: "list[Cell]") -> None:
    from backend_kwargs.trial import percentile

    rows = []
    for cell in cells:
        clocks = [f"{percentile(s, 0.5) * 1e6:.1f}" if s else "" for s in (cell.device_s, cell.wall_s, cell.dropped_s)]
        made = f"{cell.compile.cold_s:.1f}" if cell.compile.cold_s is not None else ""
        rows.append(
            (cell.case, cell.mode, cell.peer, *clocks, made, " ".join(filter(None, (cell.status, cell.reason))))
        )
    print_table(("case", "mode", "peer", "device µs", "wall µs", "dropped µs", "compile s", "status"), rows)


def main() -> None:
    """Run a command; print a user's mistake as one line and exit with 2."""
    try:
        app()
    except (BackendKwargsError, OSError) as error:  # a missing folder, a full disk
        complain(str(error))
        sys.exit(USER_MISTAKE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
