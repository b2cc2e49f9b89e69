"""`backend-kwargs decisions`: list, show, export, import, forget and copy the decisions of races.

And `backend-kwargs tune-plan`, which makes them: the models of a file, on this machine's devices or on a Ray cluster.
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from backend_kwargs.auto import verdicts
from backend_kwargs.auto.decisions_toml import read_decisions, template_name, write_decisions
from backend_kwargs.auto.machine import device_of, difference, releases
from backend_kwargs.auto.reporting import what_is_open
from backend_kwargs.auto.store import FOLDER, KIND, Catalogue
from backend_kwargs.backend import Backend, find_backend
from backend_kwargs.cli.console import (
    As,
    AsJson,
    Output,
    Outputs,
    console,
    lines_to_paste,
    print_config,
    print_json,
    print_table,
    say,
)
from backend_kwargs.errors import BackendKwargsError, counted, removed, shortened, wrong_value
from backend_kwargs.facts.decision import Decision
from backend_kwargs.files import read_toml
from backend_kwargs.fleet import board
from backend_kwargs.fleet.board import AUTO, UnitClaims, is_slower, name_of, read_plan
from backend_kwargs.fleet.scheduling import (
    Ended,
    LocalPool,
    Pool,
    Queue,
    RayPool,
    Summary,
    UnitOutcome,
    devices_here,
    drive,
    expected,
    without_login,
)
from backend_kwargs.page import Document, noise_of
from backend_kwargs.page import document as page
from backend_kwargs.page.figures import day_of, environment_of, file_of, interval_of, measured_on, now
from backend_kwargs.page.sentence import SLOWER, gained
from backend_kwargs.progress import progress
from backend_kwargs.registry import decided
from backend_kwargs.report.decisions import document_of
from backend_kwargs.stores import Store
from backend_kwargs.stores.documents import private_key, public_key
from backend_kwargs.stores.layered import is_own, synced
from backend_kwargs.stores.opening import Opened, opened

app = typer.Typer(help="The decisions of tmpl-inductor:auto, one per graph.")

Where = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="A folder, a URL, env:NAME, or FILE.toml with url, signing_key, trusted_keys: not the default store.",
    ),
]
Key = Annotated[str, typer.Argument(help="A decision's key, or its first digits.")]
Keys = Annotated[list[str] | None, typer.Argument(help="Keys, or their first digits; all decisions if none is given.")]


@app.command("list")
def show_all(store: Where = None, json: AsJson = False, output: Output = None) -> None:
    """List the decisions, latest first."""
    outputs = Outputs.checked(output)
    catalogue = Catalogue(store_of(store), must_exist=True)
    decisions = _all(catalogue)
    if outputs:
        outputs.write(page_of(decisions))
    rows = [
        {
            "key": each.key[:20],  # the first 16 digits are the computation's, at any sizes
            "winner": each.winner,
            "provisional": what_is_open(each),
            "model": each.model,
            "sizes": ", ".join([*each.inputs[:3], *(["..."] if each.inputs[3:] else [])]),
            "graph": each.facts,
            "device": str(each.machine.get("device") or each.machine.get("gpu") or ""),
            "machine": _machine(each),
            "made": day_of(each.made),
        }
        for each in decisions
    ]
    if json:
        return print_json(rows)
    unread = f"{counted(len(catalogue.earlier), 'decision')} of an earlier release, whose keys no graph has now."
    if not rows:
        return say(*([unread] if catalogue.earlier else []), f"No decisions in {catalogue.label!r}.")
    shown = ("key", "winner", "model", "sizes", "graph", "machine", "made")
    marked = [row | ({"winner": f"{row['winner']} (provisional)"} if row["provisional"] else {}) for row in rows]
    print_table(shown, [tuple(row[name] for name in shown) for row in marked])
    if catalogue.earlier:
        say(f"Not listed: {unread}")
    if places := catalogue.places().values():
        confirmed = sum(each.confirmed for each in places)
        say(f"{counted(len(places), 'place')} raced alone, which no other model times again; {confirmed} confirmed.")


@app.command("show")
def show_one(
    key: Key,
    store: Where = None,
    json: AsJson = False,
    as_: As = None,
    output: Output = None,
) -> None:
    """Show one decision: the candidates, the winner and why, and the machine; or the winner's options with --as."""
    from dataclasses import asdict

    from backend_kwargs.auto.reporting import table

    outputs = Outputs.checked(output)
    everything = _all(Catalogue(store_of(store), must_exist=True))
    (decision,) = _found(everything, [key], one=True)
    if outputs:
        outputs.write(page_of([decision]))
    if as_:
        return print_config(_winner(decision).inductor_config(ahead_of_time=as_ == "aoti-config"))
    if json:
        return print_json(asdict(decision))
    facts = {
        "compiler": decision.compiler,
        "options": decision.options,
        "fixed": decision.fixed,
        "model": decision.model,
        "inputs": ", ".join(decision.inputs),
        **decision.machine,
        "budget_s": f"{decision.budget_s:g}",
        "made": day_of(decision.made),
    }
    say(*table(decision).splitlines(), *(f"{name}: {value}" for name, value in facts.items() if value != ""))
    for other in everything:
        if other.key == decision.key and other is not decision:
            differs = difference(other.machine, decision.machine).replace("(here ", "(above ")
            say(f"also decided on another machine: {other.winner}; {differs}")


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="The TOML file to write.")],
    keys: Keys = None,
    store: Where = None,
) -> None:
    """Write decisions to a TOML file, where each winner can also be used as a template; not provisional ones.

    The file has no signatures: who imports it trusts its maker.
    """
    catalogue = Catalogue(store_of(store), must_exist=True)
    everything = _all(catalogue)
    decisions = _found(everything, keys) if keys else everything
    if not decisions:
        raise BackendKwargsError(f"No decisions in {catalogue.label!r}; compile with tmpl-inductor:auto first.")
    settled = _settled(decisions)
    written = write_decisions(settled, file)  # of each key the latest
    templates = Counter(map(template_name, written))
    rest = templates.pop("", 0)
    kept = f"{len(templates)} as templates: {', '.join(templates)}" if templates else "none as a template"
    eager = f" ({rest} chose eager or another compiler, which has no template)" if rest else ""
    say(f"{len(written)} written to {file}, {kept}{eager}.")
    if of_others := len(settled) - len({each.key for each in settled}):
        say(f"{of_others} of other machines left out: of each key a file has the latest; sync copies all.")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="The TOML file to read.")],
    store: Where = None,
) -> None:
    """Add the decisions in a file, which has no signatures, to the store: import what you trust."""
    decisions = _settled(read_decisions(file, lambda name: find_backend(f"tmpl-inductor:{name}").options))
    catalogue = Catalogue(store_of(store))
    with progress("decisions", f"importing {counted(len(decisions), 'decision')}", console(stderr=True)):
        catalogue.add(*decisions)
    say(f"{len(decisions)} added to {catalogue.label!r}.")


@app.command("forget")
def forget(
    keys: Keys = None,
    all_: Annotated[bool, typer.Option("--all", help="Forget every decision, and what is known of places.")] = False,
    store: Where = None,
) -> None:
    """Put a note in place of decisions, so that their graphs are raced again, also where copies of them are."""
    if "" in (keys or ()):  # as "$KEY" of a shell where it is not set: all keys begin with it
        raise BackendKwargsError("A key to forget is empty; give --all to forget every decision.")
    if not keys and not all_:
        raise BackendKwargsError("Name the decisions to forget, or give --all.")
    catalogue = Catalogue(store_of(store), must_exist=True)
    count = 0
    for key in keys or [""]:
        count += (found := catalogue.forget(key))
        if key and not found:
            raise _unknown(key)
    places = catalogue.forget("", verdicts.KIND, verdicts.FOLDER) if all_ else 0
    and_places = f", and {counted(places, 'place')}" if places else ""
    say(f"{count} forgotten{and_places}.")


@app.command("sync")
def sync(
    source: Annotated[str, typer.Argument(metavar="FROM", help="The store to read.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The store to write.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be copied.")] = False,
) -> None:
    """Copy the decisions that are newer in one store to another, with their signatures; the forgotten ones too.

    And what is confirmed of places, and what was tuned by a plan, by which `tune-plan` knows what is done, and `audit`
    the models.
    """
    of = store_of(source)
    here, there = opened(of, must_exist=True), opened(store_of(target))
    names: defaultdict[str, list[str]] = defaultdict(list)
    with there.doing("write") as written, progress("sync", "copying", console(stderr=True)) as tell:
        copying = (
            synced(kind, _listed(here, folder), written, folder, dry_run=dry_run, trusted_keys=of.trusted_keys)
            for kind, folder in ((KIND, FOLDER), (verdicts.KIND, verdicts.FOLDER), (board.KIND, board.UNITS))
        )
        for at, (name, what) in enumerate(chain.from_iterable(copying), 1):
            tell(counted(at, "document"), 0.0)
            names[what].append(name)
            if what in ("new", "newer") and dry_run:
                say(f"{what}: {name}")
    if not names:
        return say(f"No decisions in {here.store.label!r}.")
    for what, those in names.items():
        if what.startswith("refused: "):
            say(f"{len(those)} {what}: {', '.join(those[:3])}{', ...' if those[3:] else ''}")
    copied = len(names["new"]) + len(names["newer"])
    kept = f"{len(names['same'])} the same, {len(names['older'])} older than there"
    say(f"{copied} {'would be ' if dry_run else ''}copied to {there.store.label!r}; {kept}.")
    if copied and not of.trusted_keys and is_own(there.store) and not is_own(here.store):
        say(
            f"Nobody's signature was checked: what others wrote to {here.store.label!r} is trusted in your own folder; "
            "with trusted_keys in a FILE.toml that names the store, only what one of these signed is copied."
        )


def store_of(given: str | None) -> Store:
    """Return the store that a command is given; FILE.toml has the fields of a Store, and its keys lie beside it."""
    if given is None or not given.endswith(".toml"):
        return Store(given)
    folder, of = Path(given).parent, Store.of(read_toml(given, "a store"))
    key = of.signing_key and private_key(str(folder / str(of.signing_key)))
    return replace(of, signing_key=key, trusted_keys=[public_key(str(folder / str(each))) for each in of.trusted_keys])


def _all(catalogue: Catalogue) -> list[Decision]:
    with progress("decisions", f"reading {catalogue.label}", console(stderr=True)):
        return catalogue.all()


def _listed(store: Opened, folder: str) -> Iterator[tuple[str, bytes]]:
    with store.doing("read") as read:  # its errors are its own, whichever store is written meanwhile
        yield from read.list(folder)


def _found(decisions: Sequence[Decision], keys: list[str], *, one: bool = False) -> list[Decision]:
    """Return the decisions with each of the keys; raise if there is none, or several keys for `one`."""
    found: list[Decision] = []
    for key in keys:
        matches = [each for each in decisions if each.key.startswith(key)]
        if not matches:
            raise _unknown(key)
        if one and (several := len({each.key for each in matches})) > 1:
            raise BackendKwargsError(f"{several} decisions' keys begin with {key!r}; give more digits.")
        found += matches[:1] if one else matches  # the latest of several machines'
    return found


def _settled(decisions: Sequence[Decision]) -> list[Decision]:
    """Return the decisions that other machines may have, and say what is left out; raise if nothing is left."""
    for each in (each for each in decisions if each.provisional):
        say(f"{each.key[:20]} is left out, since it is provisional: {what_is_open(each)}.")
    if settled := [each for each in decisions if not each.provisional]:
        return settled
    raise BackendKwargsError("All decisions are provisional, and stay on the machine that made them.")


def _unknown(key: str) -> BackendKwargsError:
    return BackendKwargsError(f"No decision's key begins with {key!r}; `decisions list` shows all.")


def page_of(decisions: Sequence[Decision]) -> Document:
    """Return the page of some decisions; of one, with the lines that compile with its winner."""
    paste = list[str]()
    if len(decisions) == 1:
        with suppress(BackendKwargsError):  # no text makes the winner
            paste = lines_to_paste(_winner(decisions[0]))
    return document_of(decisions, "\n".join(paste))


def _winner(decision: Decision) -> Backend:
    return decided(decision.winner, decision.options, decision.fixed, decision.compiler)


def _machine(decision: Decision) -> str:
    """Return the device on which a decision was made, and of a CPU the threads."""
    device, threads = device_of(decision.machine), decision.machine.get("threads")
    return f"{device}, {threads} threads" if device.startswith("cpu") and threads else device


UNIT_COLUMNS = ("model", "status", "winner", "over eager", "took", "on")
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


def tune_plan(
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
        outputs.write(page_of_plan(plan, summary))
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


def _pool(on: str, folder: Path) -> AbstractContextManager[Pool]:
    """Return the workers that `--on` names."""
    if local := re.fullmatch(r"local(?::([1-9]\d{0,5}))?", on):
        return nullcontext(LocalPool(devices_here(int(local[1]) if local[1] else None), folder))
    if on.startswith(RAY) and on != RAY:
        return closing(RayPool(on.removeprefix(RAY), folder))
    raise wrong_value("Option '--on'", "local, local:N, ray:auto or ray:ADDRESS", without_login(on))


def _driven(queue: Queue, pool: Pool) -> tuple[list[Ended], bool]:
    """Return the units that ended here, and whether Ctrl-C came before the last."""
    ended: list[Ended] = []
    count, err = len(queue.left), console(stderr=True)
    if queue.done:
        say(f"{len(queue.done)} of {len(queue.done) + count} units are done already.", out=err)
    try:
        with queue.board.renewing(), progress("tuning", f"{count} units", err) as shown:
            for each in drive(queue, pool):
                ended.append(each)
                assert each.result
                why = each.result.failed and f"failed: {shortened(each.result.failed, LONGEST_REASON)}"
                done = f"{len(ended)} of {count}"
                say(f"{done}: {each.unit.label}  {why or ', '.join(each.result.winners)}", out=err)
                shown(f"{done} units are done", len(ended) / count)
    except KeyboardInterrupt:
        say(f"interrupted: what ended is kept, {len(ended)} of {count} units; start it again for the rest.", out=err)
        return ended, True
    return ended, False


def _show(summary: Summary, store: str | None) -> None:
    """Print a row for each unit, the reasons of those that failed, and what was covered and spent."""
    print_table(UNIT_COLUMNS, map(_row, summary.units))
    for each in summary.units:
        if each.failed:
            say(f"failed: {each.unit.label}: {shortened(each.failed, LONGEST_REASON)}")
    for why, count in Counter(each.missing for each in summary.units if each.missing).items():
        say(f"not run here: {counted(count, 'unit')}, since {why}")
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
    if not summary.done:
        return None
    if all(is_slower(each.gain, each.same) for each in summary.done):
        return say("Call the models themselves: compiled, none of them is faster.")
    where = "" if store is None else f", 'store': {store!r}"
    options = f"{{'race': 'never', 'match': 'device'{where}}}"
    say("", f"torch.compile(model, backend={AUTO!r}, options={options}, dynamic=False)")


def _row(of: UnitOutcome) -> tuple[str, ...]:
    if (document := of.done) is None:
        return of.unit.label, of.status, "", "", "", ""
    gain = document.gain.as_ratio() if document.gain else ""
    if is_slower(document.gain, document.same):
        gain = f"{gain}: call the model itself"
    winners = ", ".join(document.winners)
    return of.unit.label, of.status, winners, gain, f"{document.seconds:.0f} s", document.device_name


def page_of_plan(plan: Path, summary: Summary) -> page.Document:
    """Return the page of a plan: each unit's gain over eager, its noise, where it was raced, and what failed."""
    rows = tuple(map(_page_row, summary.units))
    asked, covered = summary.covered
    environment = environment_of(*({"device_name": each.device_name or None, **each.releases} for each in summary.done))
    return page.Document(
        title=plan.name,
        subtitle=f"{len(summary.done)} of {len(rows)} units are done, for {len(covered)} of {len(asked)} devices, "
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


def _page_row(of: UnitOutcome) -> page.Row:
    if (document := of.done) is None:
        return page.Row(file_of(of.unit.label), of.status, of.failed or of.missing)
    return page.Row(
        name=file_of(of.unit.label),
        status=SLOWER if is_slower(document.gain, document.same) else "pass",
        note=f"{', '.join(document.winners)}: {document.seconds:.0f} s",
        speedup=interval_of(document.gain),
    )
