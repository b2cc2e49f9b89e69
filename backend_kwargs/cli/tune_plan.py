"""`backend-kwargs tune-plan`: the models of a file, on this machine's devices or on those of a Ray cluster."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from backend_kwargs.auto.machine import releases
from backend_kwargs.cli.console import Output, Outputs, console, print_table, say
from backend_kwargs.cli.decisions import Where
from backend_kwargs.errors import BackendKwargsError, removed, shortened, wrong_value
from backend_kwargs.fleet.board import AUTO, Unit, UnitClaims, is_slower, name_of, read_plan
from backend_kwargs.fleet.scheduling import (
    Ended,
    LocalPool,
    Pool,
    Queue,
    RayPool,
    Summary,
    devices_here,
    drive,
    expected,
    without_login,
)
from backend_kwargs.page import document as page
from backend_kwargs.page import noise_of
from backend_kwargs.page.figures import environment_of, file_of, interval_of, measured_on, now
from backend_kwargs.page.sentence import SLOWER, gained
from backend_kwargs.progress import progress
from backend_kwargs.stores.opening import opened

COLUMNS = ("model", "status", "winner", "over eager", "took", "on")
LOCAL, RAY = "local", "ray:"
FAILED, INTERRUPTED = 1, 130
LONGEST_REASON = 300
MOST, MOST_TABLES = 2000, 1000  # rows of a page's table, and tables


On = Annotated[
    str,
    typer.Option(
        metavar="local[:N]|ray:ADDRESS",
        help="Where it runs: on this machine's devices, with N CPU workers on cores of their own, or on a Ray cluster.",
    ),
]
Shard = Annotated[str, typer.Option(metavar="K/N", help="Begin with the K-th of N parts; they share --store.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check all of it, and print its units with their minutes.")]


def show(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The models, sizes and devices.")],
    store: Where = None,
    on: On = LOCAL,
    shard: Shard = "1/1",
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Tune the models of a plan on many devices, and keep what won in a store; what is done is skipped.

    It exits with 1 if some of them failed.
    """
    outputs = Outputs.checked(output)
    if store and store.endswith(".toml"):
        raise BackendKwargsError(
            f"--store {store} has no effect here: name the place, and write the rest into the plan."
        )
    return _planned(plan, store) if dry_run else _run(plan, on, shard, store, outputs)


def _run(plan: Path, on: str, share: str, store: str | None, outputs: Outputs) -> None:
    """Tune the units of a plan, print what came of each, and exit with 1 if some failed."""
    units, number = read_plan(plan), share_of(share)
    if on.startswith((f"{RAY}http://", f"{RAY}https://")):
        job = "`ray job submit --working-dir . -- backend-kwargs tune-plan PLAN.toml --on ray:auto`"
        raise removed("'--on ray:http://...'", job)
    kept = opened(store)
    with _pool(on, plan.resolve().parent) as pool:
        board = UnitClaims(kept.store, releases(), kept.words, pool.devices_of)
        missing = {unit.key: why for unit in units if (why := pool.missing(unit))}
        here = [unit for unit in units if unit.key not in missing]
        with kept.doing("read"):
            queue = Queue(here, board, time.monotonic, number)
        ended, stopped = _driven(queue, pool)
    with kept.doing("read"):
        summary = Summary.of(units, board, ended, missing)
    _show(summary, store)
    if outputs:
        outputs.write(document_of(plan, summary))
    left = missing and number[1] == 1
    if stopped or left or summary.failed_among(queue.own):
        raise typer.Exit(INTERRUPTED if stopped else FAILED)


def _planned(plan: Path, store: str | None) -> None:
    """Check a plan, its factories and its store, and print its units with what they may take; nothing is raced."""
    units, kept = read_plan(plan), opened(store)
    board = UnitClaims(kept.store, releases(), kept.words)
    with kept.doing("read"):
        known = board.known()
        done = board.done(known)
    seconds = expected(units, known)
    left = [unit for unit in units if name_of(unit) not in done]
    print_table(
        ("unit", "status", "expected"),
        [(unit.label, "left" if unit in left else "done before", _minutes(seconds[unit.key])) for unit in units],
    )
    total = sum(seconds[unit.key] for unit in left)
    say(
        f"{len(left)} of {len(units)} units are left, {_minutes(total)} of one worker: as such units took before, or "
        "one budget each."
    )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def share_of(text: str) -> tuple[int, int]:
    """Return K and N of "K/N"; raise for anything else."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    number, of = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= of:
        raise wrong_value("Option '--shard'", "K/N, from 1/N to N/N", text)
    return number, of


@contextmanager
def _pool(on: str, folder: Path) -> Iterator[Pool]:
    """Give the workers that `--on` names."""
    if local := re.fullmatch(r"local(?::([1-9]\d{0,5}))?", on):
        yield LocalPool(devices_here(int(local[1]) if local[1] else None), folder)
    elif on.startswith(RAY) and on != RAY:
        with closing(RayPool(on.removeprefix(RAY), folder)) as pool:
            yield pool
    else:
        wanted = "local, local:N, ray:auto or ray:ADDRESS"
        raise wrong_value("Option '--on'", wanted, without_login(on))


def _driven(queue: Queue, pool: Pool) -> tuple[list[Ended], bool]:
    """Return the units that ended here, and whether Ctrl-C came before the last."""
    ended: list[Ended] = []
    count, err = len(queue.left), console(stderr=True)
    if queue.done:
        say(f"{len(queue.done)} of {len(queue.done) + count} units are done already.", out=err)
    try:
        with queue.board.renewing(), _progress(count) as tell:
            for each in drive(queue, pool):
                ended.append(each)
                tell(len(ended), each)
    except KeyboardInterrupt:
        say(f"interrupted: what ended is kept, {len(ended)} of {count} units; start it again for the rest.", out=err)
        return ended, True
    return ended, False


@contextmanager
def _progress(count: int) -> Iterator[Callable[[int, Ended], None]]:
    """Give what shows that a unit ended: a bar on a terminal, else a line for each."""
    out = console(stderr=True)
    with progress("tuning", f"{count} units", out) as told:

        def tell(done: int, ended: Ended) -> None:
            assert ended.result
            outcome = ended.result.failed and f"failed: {shortened(ended.result.failed, LONGEST_REASON)}"
            say(f"{done} of {count}: {ended.unit.label}  {outcome or ', '.join(ended.result.winners)}", out=out)
            told(f"{done} of {count} units are done", done / count)

        yield tell


def _show(summary: Summary, store: str | None) -> None:
    """Print a row for each unit, the reasons of those that failed, and what was covered and spent."""
    print_table(COLUMNS, map(_row, [summary] * len(summary.units), summary.units))
    for unit, why in summary.failures:
        say(f"failed: {unit.label}: {shortened(why, LONGEST_REASON)}")
    for why in dict.fromkeys(summary.missing.values()):
        count = sum(each == why for each in summary.missing.values())
        say(f"not run here: {count} {'unit' if count == 1 else 'units'}, since {why}")
    asked, covered = summary.covered
    say(f"devices covered: {len(covered)} of {len(asked)} ({', '.join(covered) or 'none'} of {', '.join(asked)})")
    if summary.same:
        verdict = (
            "other work disturbs the timings: end it, or use fewer workers"
            if summary.is_disturbed
            else "timings are steady"
        )
        say(f"A/A, the widest of a call beside itself: {summary.same.as_ratio()}: {verdict}")
    say(f"spent: {summary.cost_s:.0f} s of workers, for {len(summary.ended)} of {len(summary.units)} units")
    done = [document for unit in summary.units if (document := summary.document(unit))]
    if not done:
        return None
    if all(is_slower(each.gain, each.same) for each in done):
        return say("Call the models themselves: compiled, none of them is faster.")
    where = "" if store is None else f", 'store': {store!r}"
    options = f"{{'race': 'never', 'match': 'device'{where}}}"
    say("", f"torch.compile(model, backend={AUTO!r}, options={options}, dynamic=False)")


def _row(summary: Summary, unit: Unit) -> tuple[str, ...]:
    document = summary.document(unit)
    if document is None:
        return unit.label, summary.status(unit), "", "", "", ""
    gain = document.gain.as_ratio() if document.gain else ""
    if is_slower(document.gain, document.same):
        gain = f"{gain}: call the model itself"
    winners = ", ".join(document.winners)
    return unit.label, summary.status(unit), winners, gain, f"{document.seconds:.0f} s", document.device_name


def document_of(plan: Path, summary: Summary) -> page.Document:
    """Return the page of a plan: each unit's gain over eager, its noise, where it was raced, and what failed."""
    rows = tuple(_page_row(summary, unit) for unit in summary.units)
    done = [document for unit in summary.units if (document := summary.document(unit))]
    asked, covered = summary.covered
    environment = environment_of(*({"device_name": each.device_name or None, **each.releases} for each in done))
    return page.Document(
        title=plan.name,
        subtitle=f"{len(done)} of {len(rows)} units are done, for {len(covered)} of {len(asked)} devices, "
        + measured_on(environment),
        made=now(),
        by="backend-kwargs tune-plan",
        environment=environment,
        verdict=page.Verdict(text=gained("units", rows)),
        warnings=tuple(noise_of("a compiled call", summary.noise)),
        speedups=tuple(
            page.Speedups(
                title="the whole call", over="eager", noise=interval_of(summary.noise), rows=rows[at : at + MOST]
            )
            for at in range(0, min(len(rows), MOST * MOST_TABLES), MOST)
        ),
        notes=(f"Workers spent {summary.cost_s:.0f} s for {len(summary.ended)} units in this run.",),
    )


def _page_row(summary: Summary, unit: Unit) -> page.Row:
    document = summary.document(unit)
    if document is None:
        why = summary.failure(unit) or summary.missing.get(unit.key, "")
        return page.Row(file_of(unit.label), summary.status(unit), why)
    return page.Row(
        name=file_of(unit.label),
        status=SLOWER if is_slower(document.gain, document.same) else "pass",
        note=f"{', '.join(document.winners)}: {document.seconds:.0f} s",
        speedup=interval_of(document.gain),
    )
