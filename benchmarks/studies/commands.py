"""The studies as commands of `python -m benchmarks`: their arguments; each study imports torch late."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from backend_kwargs.cli.console import Assignments, assigned, backend_from_text
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.files import write_whole
from benchmarks.arguments import Device, Shard, device_of, shard_of

PRECISIONS = "bfloat16 autocast,float32,float16 autocast"
ALL = "reduce-overhead,max-autotune-no-cudagraphs,max-autotune"


def overhead(device: Device = None, rounds: Annotated[int, typer.Option(min=1)] = 300) -> None:
    """Measure the package's overhead over plain torch.compile with equal options."""
    from backend_kwargs.cli.console import console
    from benchmarks.studies.overhead import as_table, measure_overhead

    console().print(as_table(measure_overhead(device_of(device), rounds=rounds)), markup=False, soft_wrap=True)


def kernels(
    case: Annotated[str, typer.Argument(help="A case, as `list` prints it.")],
    device: Device = None,
    backend: Annotated[str, typer.Option(metavar="SPEC", help="A backend's name, or eager.")] = "tmpl-inductor",
    option: Assignments = None,
    scale: Annotated[str, typer.Option(help="full or smoke; default: smoke on a CPU.")] = "",
) -> None:
    """List the kernels of a case by their time, compiled under a backend and options."""
    from backend_kwargs.cli.console import console
    from benchmarks.studies.kernel_times import measure_kernels
    from benchmarks.workloads.cases import CASES

    if case not in CASES:
        raise BackendKwargsError(f"No case is called {case!r}: `python -m benchmarks list` shows all.")
    where = device_of(device)
    compiler = None if backend == "eager" else backend_from_text(backend, assigned(option))
    found = measure_kernels(CASES[case], where, scale or ("smoke" if where == "cpu" else "full"), compiler)
    console().print(str(found), markup=False, soft_wrap=True)


def headroom(
    models: Annotated[
        list[str], typer.Argument(help="transformers:CLASS?..., timm:NAME?..., or FILE:FACTORY, as `compare` takes it.")
    ],
    device: Device = None,
    most: Annotated[int, typer.Option(min=1, help="Places of each model to time, those that take longest first.")] = 8,
    kinds: Annotated[bool, typer.Option("--kinds", help="Library calls of models of the suite, or `drawn`.")] = False,
) -> None:
    """Time each place of a model where a rewrite would replace something by itself, as it is and rewritten."""
    from backend_kwargs.cli.console import console, say
    from benchmarks.studies.headroom import measure_headroom
    from benchmarks.studies.library_calls import measure_kinds

    where = device_of(device)
    found = measure_kinds(models, where, say) if kinds else measure_headroom(models, where, most, say)
    console().print(found, markup=False, soft_wrap=True)


def templates(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="templates.md and templates.json are written there.")],
    evidence: Annotated[Path | None, typer.Option(metavar="FILE", help="What tests/gpu found.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 30,
    cases: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    budget_s: Annotated[float, typer.Option(help="Seconds after which no further case starts.")] = 480.0,
) -> None:
    """Time each template on a GPU, on a case where it should help and on one where it should not."""
    from benchmarks.studies.templates import write_page

    if device_of(None) == "cpu":
        raise BackendKwargsError("templates needs a GPU: its cases are of sizes for one.")
    write_page(out, evidence, rounds, cases, budget_s)


def tune_kernels(
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSON of every configuration's time.")] = Path("tuned.json"),
    case: Annotated[str, typer.Option(help="Glob of cases.")] = "*",
    scale: Annotated[str, typer.Option(help="full or smoke.")] = "full",
    jobs: Annotated[int, typer.Option(help="Processes that compile; 0: the timing process compiles.")] = 8,
    budget: Annotated[float, typer.Option(help="Seconds after which no further case starts.")] = 210.0,
    each: Annotated[float, typer.Option(help="Seconds after which a case is abandoned.")] = 60.0,
    report: Annotated[Path | None, typer.Option(help="Run nothing; write the results in --out as Markdown.")] = None,
) -> None:
    """Tune the Triton kernels on this machine's GPU."""
    from benchmarks.studies.tune_kernels import tune, write_report

    if report:
        write_report(out, report)
    else:
        tune(out, case, scale, jobs, budget, each)


def bundles(
    device: Device = None,
    case: Annotated[list[str] | None, typer.Option(help="Only such models, as vit; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON of every figure.")] = None,
) -> None:
    """Time the first call from a bundle, in a fresh process that cannot compile, and the compile that made it."""
    from benchmarks.studies.bundles import measure_bundles

    measure_bundles(device_of(device), case or [], out)


def rewrites(
    out: Annotated[Path, typer.Option(metavar="PATH", help="A folder, a file for each case; a file with --patterns.")],
    device: Device = None,
    cases: Annotated[str, typer.Option(help="Only those whose name contains this.")] = "",
    one: Annotated[str, typer.Option(metavar="CASE", help="This case in this process; --out is a file.")] = "",
    model: Annotated[list[str] | None, typer.Option(help="A model as `run` takes it, instead; repeatable.")] = None,
    patterns: Annotated[bool, typer.Option("--patterns", help="Each pattern alone, without races.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Run nothing; print what --out holds as Markdown.")] = False,
    shard: Shard = "1/1",
    rounds: Annotated[int, typer.Option(min=1)] = 30,
    race_s: Annotated[float, typer.Option(help="Seconds for each race; 0: those of the case, 30 of most.")] = 0.0,
    modes: Annotated[str, typer.Option(help="Modes of torch.compile to time beside auto, joined by commas.")] = ALL,
    each_s: Annotated[float, typer.Option(help="Stop a case after this; what it wrote stays.")] = 300.0,
    budget_s: Annotated[float, typer.Option(help="Begin no case after this; exit with 3 if any is left.")] = 480.0,
) -> None:
    """Time rewrites of the graph: each alone inside a compiled graph, or raced on whole cases.

    On a CPU cases are small, which only tries the study; models have their own sizes, in float32.
    """
    from benchmarks.studies import rewrites as study

    if report:
        print(study.report(out))
        return
    place = study.place_of(device_of(device))
    if patterns:
        write_whole(out, json.dumps(study.alone(place, cases), indent=1) + "\n")
    elif one:
        study.race_one(one, out, rounds, race_s, tuple(filter(None, modes.split(","))), place)
    else:
        options = [f"--rounds={rounds}", f"--race-s={race_s}", f"--modes={modes}", f"--device={place.device}"]
        names = model or study.names_of(cases)
        if study.race_shard(out, names, shard_of(shard), (budget_s, each_s), options):
            raise typer.Exit(3)


def held_out(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="held_out.jsonl, which is continued, and held_out.md.")],
    models: Annotated[str, typer.Option(metavar="NAME,...", help="Only these, in this order; default: all.")] = "",
    configs: Annotated[str, typer.Option(metavar="NAME,...", help="Only these ways, as default,auto.")] = "",
    max_minutes: Annotated[float, typer.Option(min=0, help="Begin nothing that would not fit; exit with 3.")] = 600.0,
    rounds: Annotated[int, typer.Option(min=1)] = 40,
    work: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Caches; default: OUT/work.")] = None,
    device: Device = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small sizes, which only try the study.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Only print the models.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Only write the page of the records in FOLDER.")] = False,
) -> None:
    """Time auto and torch's modes on real models that nothing was tuned on, and judge the bars."""
    from backend_kwargs.cli.console import console
    from benchmarks.analysis.held_out import write_page
    from benchmarks.studies import held_out as study

    if names:
        console().print(study.listed(), markup=False, soft_wrap=True)
        return
    if page:
        rows = [study.MODELS[name] for name in study.models_named(models)]
        write_page(out / "held_out.jsonl", out / "held_out.md", rows)
        return
    stream, where = console(stderr=True), device_of(device)
    asked = study.Asked(
        models=study.models_named(models),
        ways=study.ways_named(configs),
        out=out,
        work=work or out / "work",
        device=where,
        scale="tiny" if tiny else "full",
        dtype="bfloat16" if where != "cpu" else "float32",
        rounds=rounds,
        max_s=60 * max_minutes,
    )

    def say(step: str) -> None:
        stream.print(f"{asked.max_s - asked.left_s:6.1f} s {step}", markup=False, soft_wrap=True)

    if not study.measure(asked, say):
        raise typer.Exit(3)


def regret(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="regret.jsonl, which is continued, and regret.md.")],
    models: Annotated[str, typer.Option(metavar="NAME,...", help="As `held-out --list` prints; on a CPU five.")] = "",
    races: Annotated[int, typer.Option(min=1, help="Fresh races of each model.")] = 5,
    rounds: Annotated[int, typer.Option(min=1)] = 60,
    max_minutes: Annotated[float, typer.Option(min=0, help="Begin no model after this; exit with 3.")] = 600.0,
    device: Device = None,
) -> None:
    """Race each model anew several times, time all candidates at length, and report regret and flips."""
    from backend_kwargs.cli.console import console
    from benchmarks.studies import regret as study
    from benchmarks.studies.held_out import models_named
    from benchmarks.workloads.held_out import ON_A_CPU

    where, stream = device_of(device), console(stderr=True)
    chosen = models_named(models) if models or where != "cpu" else ON_A_CPU
    scale: Literal["full", "tiny"] = "tiny" if where == "cpu" else "full"
    asked = study.Asked(chosen, races, out, where, scale, rounds, 60 * max_minutes)
    if not study.measure(asked, lambda step: stream.print(step, markup=False, soft_wrap=True)):
        raise typer.Exit(3)


def audit(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="audit.json and audit.md are written there.")],
    plants: Annotated[int, typer.Option(min=0, max=20, help="Models with a planted loser.")] = 20,
    audits: Annotated[int, typer.Option(min=0, help="Audits of unchanged decisions.")] = 20,
    unchanged: Annotated[int, typer.Option(min=1, max=20, help="Decisions of each such audit.")] = 4,
    rounds: Annotated[int, typer.Option(min=24)] = 240,
    timing_s: Annotated[float, typer.Option(min=0.0, help="For the rounds of one decision.")] = 20.0,
) -> None:
    """Audit decisions with planted losers, and unchanged ones again and again; half an hour on two idle cores."""
    from backend_kwargs.cli.console import console
    from backend_kwargs.fleet.audit import Effort
    from benchmarks.studies import audit as study

    stream = console(stderr=True)
    effort = Effort(flips=0, rounds=rounds, timing_s=timing_s)
    asked = study.Asked(plants, audits, unchanged, effort, out)
    study.measure(asked, lambda step: stream.print(step, markup=False, soft_wrap=True))


def pinned(
    device: Device = None,
    models: Annotated[str, typer.Option(help="Names of the study's models, joined by ';'; default: all.")] = "",
    rounds: Annotated[int, typer.Option(min=1)] = 100,
    race_s: Annotated[float, typer.Option(help="Seconds for each race.")] = 30.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE.md", help="A file for the page, and .json of it.")] = None,
) -> None:
    """Time what a lock pins beside the race's own winner, and beside Inductor's deterministic mode."""
    from benchmarks.studies.pinned import MODELS, measure_pinned

    asked = models.split(";") if models else list(MODELS)
    if unknown := [name for name in asked if name not in MODELS]:
        raise BackendKwargsError(f"--models must be among {'; '.join(MODELS)}, got {unknown[0]!r}.")
    print(measure_pinned(device_of(device), asked, rounds, race_s, out))


def public_reports(
    report: Annotated[list[int] | None, typer.Argument(help="Numbers of reports; default: all.")] = None,
) -> None:
    """Run programs that plain torch.compile gets wrong on a CPU, in eager, plainly and under auto."""
    from backend_kwargs.cli.console import console
    from benchmarks.studies.public_reports import CASES, as_table

    known = {number for case in CASES for number in case.reports}
    if unknown := [number for number in report or () if number not in known]:
        raise BackendKwargsError(f"REPORT must be one of {', '.join(map(str, sorted(known)))}, got {unknown[0]}.")
    console().print(as_table(report or ()), markup=False, soft_wrap=True)


def training_nets(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="training_nets.jsonl, which is continued, and .md.")],
    nets: Annotated[str, typer.Option(metavar="NAME,...", help="As --list prints, or held_out:NAME.")] = "all",
    precisions: Annotated[str, typer.Option(metavar="NAME,...", help="all: whole nets in bfloat16 too.")] = PRECISIONS,
    variants: Annotated[str, typer.Option(metavar="NAME,...", help="Such as cudnn.benchmark; all.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
    each_s: Annotated[float, typer.Option(min=1, help="Stop a net after this.")] = 300.0,
    max_minutes: Annotated[float, typer.Option(min=0, help="Begin no net after this; exit with 3.")] = 600.0,
    device: Device = None,
    leaves: Annotated[bool, typer.Option("--leaves", help="Record each tensor's error, of passed graphs too.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Only print the nets.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Only write the page of the records in FOLDER.")] = False,
) -> None:
    """Check training steps of public nets under default against eager and float64; nothing is timed or downloaded."""
    from backend_kwargs.cli.console import console
    from benchmarks.studies import training_nets as study

    if names:
        print(*study.names(), sep="\n")
    elif page:
        study.write_page(out)
    else:
        asked = study.Asked(
            nets=study.chosen(nets.split(","), study.names(), "net"),
            precisions=study.chosen(precisions.split(","), study.ALL_PRECISIONS, "precision"),
            variants=study.chosen(variants.split(","), study.VARIANTS, "variant"),
            device=device_of(device),
            out=out,
            jobs=jobs,
            each_s=each_s,
            max_s=60 * max_minutes,
            leaves=leaves,
        )
        stream = console(stderr=True)
        if not study.measure(asked, lambda step: stream.print(step, markup=False, soft_wrap=True)):
            raise typer.Exit(3)


COMMANDS: tuple[Callable[..., None], ...] = (
    overhead,
    kernels,
    headroom,
    templates,
    tune_kernels,
    bundles,
    rewrites,
    held_out,
    regret,
    audit,
    pinned,
    public_reports,
    training_nets,
)
