"""What `tune`, `audit` and `compare` do: models are measured; what was found as text, as a file, and as a page."""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer
from msgspec.structs import replace

from backend_kwargs import trial
from backend_kwargs.auto.decisions_toml import write_decisions
from backend_kwargs.auto.machine import machine
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.backend import Backend
from backend_kwargs.cli.console import (
    Outputs,
    as_timed,
    backend_from_text,
    console,
    lines_to_paste,
    pasted,
    print_table,
    quiet,
    say,
)
from backend_kwargs.compare import Candidate, Comparison, compare, fastest
from backend_kwargs.compare import comparison as comparisons
from backend_kwargs.errors import BackendKwargsError, counted
from backend_kwargs.facts.decision import Decision
from backend_kwargs.fleet.audit import (
    AuditDocument,
    Audited,
    Auditor,
    Effort,
    Finding,
    Target,
    as_json,
    audit_document,
    bundle_target,
    by_key,
    consented,
    judged,
    renewed,
    targets_of,
    units_of,
)
from backend_kwargs.fleet.board import AUTO
from backend_kwargs.fleet.racing import Tuned, left_out, racing, tuned, why_not_raced
from backend_kwargs.harness.models import model_of, split_factory
from backend_kwargs.interval import Interval, widest
from backend_kwargs.page import document as page
from backend_kwargs.page import figures, noise_of
from backend_kwargs.page.figures import environment_of, file_of, interval_of, measured_on
from backend_kwargs.page.sentence import SLOWER, gained, kept, remark, sentence
from backend_kwargs.progress import progress
from backend_kwargs.report.decisions import parts_of, verdict_of
from backend_kwargs.stores import Store
from backend_kwargs.stores.opening import opened
from backend_kwargs.stores.urls import URL
from backend_kwargs.torch_internals.dynamo import reset

# ---- tune

WHOLE = "the whole call"
SIZE_COLUMNS = ("sizes", "graph", "winner", "race", "eager call", "compiled call", "speedup")
STOPPED = 2  # exit code, as for a wrong argument, if some sizes were raced before


def tune(
    model: str, sizes: list[dict[str, int]], backend: Backend, budget_s: float, output: Path, outputs: Outputs
) -> None:
    """Race the model at each size, and write the decisions and the page."""
    raced, stopped = _raced(partial(model_of, model), sizes, backend, budget_s)
    kept = _write(model, raced, output)
    say(f"{counted(kept, 'decision')} written to {output}.")
    lines = partial(_lines, backend, fixed_sizes=any(sizes))
    slower, paste = [each for each in raced if each.calls_itself], ""
    if len(slower) < len(raced):
        say("On the machine that serves the model:", "", *lines(output))
        paste = "\n".join(lines(Path(output.name)))
    for each in slower:
        say(f"Call the model itself ({each.label}): the compiled call is {_times(each)[-1]} as fast.")
    if outputs:
        outputs.write(document_of(model, raced, paste))
    if stopped:
        raise typer.Exit(stopped)


def _write(model: str, raced: Sequence[Tuned], output: Path) -> int:
    """Print what was raced, write the decisions that may be used again, and return their number; raise if it is 0."""
    decisions = [decision for of_size in raced for decision in of_size.decisions]
    if not any(decision.rows for decision in decisions):
        raise BackendKwargsError(f"No graph of {model!r} was raced: {why_not_raced(decisions)}.")
    print_table(SIZE_COLUMNS, [row for of_size in raced for row in _rows_of(of_size)])
    kept = {decision.key: decision for of_size in raced for decision in of_size.kept}
    if not kept:
        raise BackendKwargsError(f"Nothing is written: {left_out(decisions)}.")
    for each in raced:
        if why := left_out(each.decisions):
            say(f"Left out ({each.label}): {why}.")
    write_decisions(kept.values(), output)
    return len(kept)


def _raced(
    make: Callable[[Mapping[str, int]], tuple[Callable[..., object], object]],
    sizes: list[dict[str, int]],
    backend: Backend,
    budget_s: float,
) -> tuple[list[Tuned], int]:
    """Return the decisions for each size, raced again with a separate store, and the exit code if not all were raced.

    What was raced before a Ctrl-C, or before a size that fails, is kept.
    """
    raced, err, began = [], console(stderr=True), time.perf_counter()
    with racing(backend, budget_s) as own:
        for at, size in enumerate(sizes):
            label = ", ".join(f"{name}={value}" for name, value in size.items()) or "as given"
            spent = time.perf_counter() - began
            left = f", about {spent / at * (len(sizes) - at):.0f} s left" if at else ""
            say(f"racing {label} ({at + 1} of {len(sizes)}){left}", out=err)
            try:
                model, inputs = make(size)
                reset()
                raced.append(tuned(label, model, inputs, own))
            except (BackendKwargsError, KeyboardInterrupt) as error:
                if not raced:
                    raise
                why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {error}"
                say(why, f"{at} of {len(sizes)} sizes are kept.", out=err)
                return raced, INTERRUPTED if isinstance(error, KeyboardInterrupt) else STOPPED
    return raced, 0


def _lines(backend: Backend, output: Path, *, fixed_sizes: bool) -> list[str]:
    """Return the lines that serve with the decisions: a command, and code."""
    given = backend.options.get("store")
    store = given.url if isinstance(given, Store) else given
    command = [
        "backend-kwargs",
        "decisions",
        "import",
        str(output),
        *(["--store", store] if isinstance(store, str) else []),
    ]
    own = {name: value for name, value in backend.options.items() if name not in ("auto", "budget_s")}
    dynamic = ", dynamic=False" if fixed_sizes else ""
    return [
        shlex.join(command),
        "",
        "import backend_kwargs as bk",
        "",
        pasted(f"backend = bk.make_backend({AUTO!r}, { ({**own, 'race': 'never'})!r})"),
        f"torch.compile(model, backend=backend{dynamic})  # called in eval mode, under torch.no_grad()",
    ]


def _rows_of(raced: Tuned) -> Iterator[tuple[str, ...]]:
    """Yield a row for each graph; the times are those of the call, with all of its graphs."""
    times = _times(raced)
    for decision in raced.decisions:
        yield raced.label, decision.subject, decision.winner, f"{decision.seconds:.0f} s", *times
        times = ("", "", "")


def _times(raced: Tuned) -> tuple[str, ...]:
    if (ratio := raced.speedup) is None:
        return "", "", ""
    medians = (trial.percentile(samples, 0.5) for samples in (raced.eager_s, raced.compiled_s))
    return *(f"{each * 1e3:.3g} ms" for each in medians), ratio.as_ratio()


# ---- the page of tune


def document_of(model: str, raced: Sequence[Tuned], paste: str) -> page.Document:
    """Return the page of a model that was raced: the whole call at each size, and the race of each graph."""
    parts = parts_of([*_graphs(raced)])
    noise = interval_of(widest(of_size.same for of_size in raced))
    rows = tuple(_page_row(of_size, len(raced) == 1) for of_size in raced)
    what = f"{counted(len(parts.graphs), 'graph')} at {counted(len(raced), 'size')}"
    return replace(
        parts,
        title=file_of(model),
        subtitle=f"{what} {measured_on(parts.environment)}",
        by="backend-kwargs tune",
        verdict=_verdict(raced, rows, paste),
        warnings=(*noise_of("a compiled call", noise), *parts.warnings),
        speedups=(page.Speedups(title=WHOLE, over="eager", noise=noise, rows=rows), *parts.speedups),
    )


def _graphs(raced: Sequence[Tuned]) -> Iterator[tuple[str, Decision]]:
    """Yield each decision with a name: its size and its description."""
    for of_size in raced:
        for at, decision in enumerate(of_size.decisions, 1):
            which = f", graph {at}" if len(of_size.decisions) > 1 else ""
            yield f"{of_size.label}{which}: {decision.subject}", decision


def _verdict(raced: Sequence[Tuned], rows: Sequence[page.Row], paste: str) -> page.Verdict:
    """Return the verdict: of one size with its figures, of several in a sentence."""
    if len(raced) > 1 or len(raced[0].decisions) != 1:
        return page.Verdict(text=gained("sizes", rows), paste=paste)
    speedup = rows[0].speedup
    if raced[0].calls_itself and speedup:
        text = f"Call the model itself: the compiled call is {figures.ratio(speedup.median)} as fast"
        return page.Verdict(text=f"{text} ({figures.between(speedup)}).")
    verdict = verdict_of(raced[0].decisions[0])
    of_call = (page.Speedup(over="eager", ratio=speedup),) if speedup else ()
    others = tuple(each for each in verdict.speedups if each.over != "eager" or not of_call)
    return replace(verdict, speedups=(*others, *of_call), latency=rows[0].latency, paste=paste)


def _page_row(of_size: Tuned, alone: bool) -> page.Row:
    winners = ", ".join(dict.fromkeys(decision.winner for decision in of_size.decisions))
    return page.Row(
        name=of_size.label,
        status=SLOWER if of_size.calls_itself else "pass",
        note=f"{winners}: {sum(decision.seconds for decision in of_size.decisions):.0f} s",
        won=alone and not of_size.calls_itself,
        speedup=interval_of(of_size.speedup),
        latency=interval_of(trial.median_interval(of_size.compiled_s)) if of_size.compiled_s else None,
        graphs=len(of_size.decisions),
    )


# ---- audit

LOST, NOTHING, INTERRUPTED = 1, 2, 130  # exit codes
# Fresh races of each graph and the seconds of one; rounds of timing, and the seconds after which none starts.
AT_LENGTH, QUICK = (3, 10.0, 240, 20.0), (0, 0.0, 48, 5.0)
OF_A_MODEL = "--shapes, --dynamic and --option"
WITHOUT = "no graph of it has the key of a decision there"  # of one of several sizes
COLUMNS = ("model", "graph", "winner", "verdict", "over default", "regret", "flips", "recorded")
WORDS = {"right": "still right"}
COUNTED = WORDS | {"within noise": "within noise", "lost": "lost", "fails": "failed", "not audited": "not audited"}
NOISY = 1.02  # a decision that differs from itself by more is timed on a noisy machine
MOST = 1000  # decisions on a page
AGAIN = "What lost is decided anew by --update, or by building the bundle again."
ITSELF = Interval(1.0, 1.0, 1.0)


def row_of(finding: Finding) -> tuple[str, ...]:
    """Return the cells of a decision."""
    default = next((each.ratio for each in finding.against if each.name == "default" and each.ratio), None)
    flips = f"{finding.flips} of {finding.races}" if finding.races else ""
    regret = _percent(finding.regret) if finding.regret else ""
    over = Interval(1 / default.median, 1 / default.high, 1 / default.low).as_ratio() if default else ""
    record = f"{_time(finding.recorded_s)}, {finding.record}" if finding.recorded_s else finding.record
    return finding.model, finding.graph, finding.winner, said_of(finding), over, regret, flips, record


def said_of(finding: Finding) -> str:
    """Return what the audit says of a decision."""
    if finding.verdict == "lost":
        by = f"by {_percent(finding.loss)} " if finding.loss else ""
        return f"lost {by}to {finding.lost_to}"
    return ": ".join(filter(None, (WORDS.get(finding.verdict, finding.verdict), finding.reason)))


def remarks_on(each: Finding) -> Iterator[page.Warned]:
    """Yield what else is to be known of a decision: its places, times of another machine or release, and noise."""
    where = f"{each.winner} for {each.graph}"
    yield from (page.Warned(place, where=where) for place in each.places)
    if each.record == "not comparable":
        yield page.Warned(f"its recorded time is not comparable: {each.differs}", where=where)
    if each.record == "changed" and each.seconds and each.recorded_s:
        now = f"{each.seconds.median / each.recorded_s:.2f}x of the {_time(each.recorded_s)} that were recorded"
        yield page.Warned(f"a call takes {now}", where=where)
    if each.noise and each.noise.reach > NOISY:
        noise = f"{each.noise.low:.3f}x to {each.noise.high:.3f}x"
        yield page.Warned(
            f"a noisy audit: timed against itself it is at {noise}; on an idle machine smaller losses are found",
            "noise",
            where,
        )
    elif each.verdict != "not audited" and each.seconds and not each.noise:
        yield page.Warned("too few rounds to prove a loss; leave --quick out", "noise", where)


def notes_of(found: Sequence[Finding]) -> Iterator[str]:
    """Yield the remarks on each decision, then the count of the verdicts."""
    yield from (f"{each.where}: {each.text}" for finding in found for each in remarks_on(finding))
    yield f"{_counted(found)}."


def _counted(found: Sequence[Finding]) -> str:
    counts = Counter[str](each.verdict for each in found)
    said = ", ".join(f"{counts[verdict]} {word}" for verdict, word in COUNTED.items() if counts[verdict])
    return f"{counted(len(found), 'decision')}: {said}"


def page_of(document: AuditDocument) -> page.Document:
    """Return the page of an audit: each decision's speedup over the other candidates, and what lost."""
    # A decision is called by its model, graph and key; a model without one by its name.
    named = ((each, file_of(each.model)) for each in document.findings[:MOST])
    shown = [(each, f"{of}: {each.graph} ({each.key[:12]})" if each.key else of) for each, of in named]
    remarks = [remark for each in document.findings for remark in remarks_on(each)]
    lost = (each for each in document.findings if each.verdict == "lost")
    worst = max(lost, key=lambda each: each.loss.median if each.loss else 0.0, default=None)
    environment = environment_of(document.environment)
    return page.Document(
        title=f"Audit of {file_of(document.of)}",
        subtitle=f"{len(document.findings)} decisions {measured_on(environment)}",
        made=document.made,
        by="backend-kwargs audit",
        environment=environment,
        verdict=page.Verdict(
            text=f"{_counted(document.findings)}{f'; {worst.winner} {said_of(worst)}' if worst else ''}."
        ),
        warnings=(
            *(_warned(each, name) for each, name in shown if each.failed or each.verdict == "not audited"),
            *(each for each in remarks[:MOST] if each.kind == "noise"),
        ),
        speedups=tuple(
            page.Speedups(title=name, over=each.winner, noise=interval_of(each.noise), rows=(*_rows(each),))
            for each, name in shown
            if each.against or each.failed
        ),
        notes=tuple(f"{each.where}: {each.text}" for each in remarks if each.kind != "noise")[:500],
    )


def _warned(finding: Finding, name: str) -> page.Warned:
    """Return what became of a decision that is not right: one that lost runs, and can be replaced."""
    text = f"{finding.winner or 'a model'}: {said_of(finding)}"
    if finding.verdict == "lost":
        return page.Warned(f"{text}. {AGAIN}", "advice", name)
    return page.Warned("it fails", "failed", name) if finding.failed else page.Warned(text, "other", name)


def _rows(finding: Finding) -> Iterator[page.Row]:
    """Yield the decision, and the others with their speedup over it."""
    yield page.Row(
        name=finding.winner,
        status=finding.verdict if finding.failed else "pass",
        reason=said_of(finding) if finding.verdict == "lost" else finding.reason.partition(": ")[2],
        note="baseline" if finding.failed else said_of(finding),
        won=not finding.failed,
        speedup=ITSELF if finding.seconds else None,
        latency=interval_of(finding.seconds),
    )
    for each in finding.against:
        status, failed, why = each.reason.partition(": ")
        yield page.Row(
            each.name, *((status, why) if failed else ("pass", each.reason)), speedup=interval_of(each.ratio)
        )


def _percent(share: Interval) -> str:
    return f"{share.median:.1%} [{share.low:.1%}, {share.high:.1%}]" if share.median else "0 %"


def _time(seconds: float | None) -> str:
    return f"{(seconds or 0.0) * 1e3:.3g} ms"


# ---- what is audited


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is audited: its name, the models, the decisions by key, and the store that has them, if it is one."""

    what: str
    targets: Sequence[Target]
    decisions: Mapping[str, Sequence[Decision]]
    catalogue: Catalogue | None = None


def audit(chosen: Chosen, outputs: Outputs, *, quick: bool, update: bool) -> None:
    """Measure, print and write what was chosen; exit with what was found."""
    if update and chosen.catalogue is None:
        raise BackendKwargsError("--update is for stores: build a bundle again, and its graphs are decided anew.")
    if update and chosen.catalogue:  # now, not after minutes of measuring
        chosen.catalogue.check_replaces()
    audited, others, stopped = _audited(chosen, Effort(*(QUICK if quick else AT_LENGTH)))
    if all(each.why == WITHOUT for each in audited):
        raise _nothing(chosen)
    found, heres = judged(audited), [each.here for each in audited if each.here]
    print_table(COLUMNS, map(row_of, found))
    say(*notes_of(found))
    if others:
        more = f"{others} more for this device {'was' if others == 1 else 'were'} not audited"
        say(f"{more}: of other models, sizes (--shapes, --dynamic) or options.")
    document = audit_document(chosen.what, environment_of(*heres) if heres else machine(), found)
    if outputs:
        outputs.write(page_of(document), as_json(document))
    if update and chosen.catalogue:  # last: where the store may not be written, nothing else is lost
        anew = [renewed(*each) for each in zip(audited, found, strict=True)]
        kept = [each for each in anew if each and chosen.catalogue.takes(each)]
        chosen.catalogue.add(*kept)
        changed = sum(finding.failed and new is not None for finding, new in zip(found, anew, strict=True))
        say(f"{len(kept)} stored in {chosen.catalogue.label!r} as new generations, {changed} with another winner.")
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if any(each.failed for each in found):
        raise typer.Exit(LOST)
    if all(each.verdict == "not audited" for each in found):
        raise typer.Exit(NOTHING)


def of_bundle(subject: str, factory: str | None, store: str | None, trust: bool, asked: bool) -> Chosen:
    """Return the decisions in a bundle."""
    if asked or store:
        raise BackendKwargsError(f"{OF_A_MODEL}, and --store, are not for a bundle, which has its own.")
    if factory is None:  # as for `bundle run`: not the one that the manifest names
        raise BackendKwargsError("Pass FACTORY too, the function that makes the bundle's model: MODULE_OR_FILE:NAME.")
    target, decided = bundle_target(Path(subject), partial(model_of, factory), factory, trust=trust)
    return Chosen(subject, [target], decided)


def model_named(subject: str | None, factory: str | None) -> str | None:
    """Return the model that the arguments name, if they do; raise if they name something else."""
    if subject is None:
        return None
    if URL.match(subject) or subject.startswith("env:") or Path(subject).is_dir():
        raise BackendKwargsError(f"{subject!r} is neither a bundle nor a model; a store is --store {subject}.")
    if factory is not None:
        raise BackendKwargsError(f"{subject!r} is no bundle, which {factory!r} could make the model of.")
    split_factory(subject)
    return subject


def of_store(
    model: str | None,
    of: Store,
    backend: Backend,
    sizes: Sequence[Mapping[str, int]],
    trust: bool,
    *,
    asked: bool,
    dynamic: bool,
) -> Chosen:
    """Return the decisions in a store; `asked`: the user has given sizes or options, which then count."""
    kept = opened(of, must_exist=True)
    catalogue = Catalogue(of)
    with progress("audit", f"reading {catalogue.label}", console(stderr=True)), kept.doing("read") as store:
        decisions, documents = by_key(catalogue), units_of(store, of.trusted_keys)
    if not decisions:
        raise BackendKwargsError(f"No decisions in {catalogue.label!r}; compile with tmpl-inductor:auto, or tune.")
    if asked and model is None:
        raise BackendKwargsError(f"{OF_A_MODEL} are of a model: name it, as FILE_OR_MODULE:FACTORY.")
    units = consented(documents, model, trust=trust, label=catalogue.label)
    targets = [] if asked else targets_of(units)
    if model is not None and not targets:
        targets = [*_targets(model, sizes, backend, dynamic=dynamic)]
    return Chosen(catalogue.label, targets, decisions, catalogue)


def _targets(model: str, sizes: Sequence[Mapping[str, int]], backend: Backend, *, dynamic: bool) -> Iterator[Target]:
    """Yield a model at each size; if `dynamic`, also with all of them as sizes that vary."""
    makes = [partial(model_of, model, each) for each in sizes]
    for each, make in zip(sizes, makes, strict=True):
        yield Target("  ".join((model, *_words(each))), make, backend)
    if dynamic:
        how = None if len(makes) > 1 else True
        yield Target(f"{model}  sizes that vary", makes[0], backend, dynamic=how, others=tuple(makes[1:]))


def _words(sizes: Mapping[str, int]) -> list[str]:
    return [f"{name}={value}" for name, value in sizes.items()]


def _audited(chosen: Chosen, measuring: Effort) -> tuple[list[Audited], int, bool]:
    """Return what was audited, how many decisions for this device were not, and whether Ctrl-C came before the last."""
    found, count = list[Audited](), sum(map(len, chosen.decisions.values()))
    with quiet(), progress("audit", "starting", err := console(stderr=True)) as shown:

        def tell(text: str) -> None:
            shown(text, len(found) / count)
            if not err.is_terminal:
                say(text, out=err)

        places = chosen.catalogue.places() if chosen.catalogue else {}
        auditor = Auditor(chosen.decisions, measuring, tell, places, found)
        try:
            for at, target in enumerate(chosen.targets, 1):
                tell(f"{target.label} ({at} of {len(chosen.targets)})")
                _audit(auditor, target, alone=len(chosen.targets) == 1)
        except KeyboardInterrupt:
            if not found:
                raise
            say(f"interrupted: {len(found)} decisions were audited before.", out=err)
            return found, auditor.left(), True
    return found, auditor.left(), False


def _audit(auditor: Auditor, target: Target, *, alone: bool) -> None:
    """Audit a model; one of several that fails, or has no decision, is noted beside the others."""
    try:
        has_some = auditor.audit(target)
    except BackendKwargsError as error:
        if alone:
            raise
        auditor.leave_out(target, str(error))
    else:
        if not (has_some or alone or target.decisions):
            auditor.leave_out(target, WITHOUT)


def _nothing(chosen: Chosen) -> BackendKwargsError:
    """Return the error that no graph has a decision, with the options that such graphs may lack."""
    models = ", ".join(dict.fromkeys(target.label for target in chosen.targets)) or "the documents on this device"
    count = sum(map(len, chosen.decisions.values()))
    fixed = [each.fixed for several in chosen.decisions.values() for each in several if each.fixed]
    hint = f" Some were made with options: --option {_words(fixed[0])[0]}, say." if fixed else ""
    return BackendKwargsError(
        f"No graph of {models} has the key of one of the {count} decisions in {chosen.what!r}: they are of other "
        f"models, devices, sizes (--shapes, --dynamic) or options (--option).{hint}"
    )


# ---- compare

NONE_RAN, BELOW = 1, 3  # exit codes
QUICK_S = 60.0


def compared(
    factory: str,
    wanted: list[tuple[str, Backend | None]],
    outputs: Outputs,
    gate: tuple[str, float] | None,
    *,
    mode: comparisons.Mode,
    device: str | None,
    rounds: int,
    tolerance: float | None,
    max_error: float | None,
    quick: bool,
) -> None:
    """Compare a factory's model under labelled backends, print and write what came out, and exit with what it shows."""
    if gate:
        over = comparisons.label_of(gate[0], [label for label, _ in wanted])
        if over not in dict(wanted):
            wanted.append((over, backend_from_text("inductor", {})))
        gate = over, gate[1]
    model, example_inputs = model_of(factory)
    own = [backend.options.get("max_error") for _, backend in wanted if backend]  # accepted without --max-error
    which = {label: f"{label} ({at} of {len(wanted)})" for at, (label, _) in enumerate(wanted, 1)}

    with quiet(), progress("compare", "starting", err := console(stderr=True)) as shown:

        def told(label: str, stage: str, fraction: float) -> None:
            shown(f"{stage} {which.get(label, label)}", fraction)
            if stage == "compile" and not err.is_terminal:
                say(f"compiling {which[label]}", out=err)

        comparison = compare(
            model,
            example_inputs,
            [Candidate(label, backend) for label, backend in wanted],
            mode=mode,
            device=device,
            rounds=rounds,
            tolerance=tolerance,
            max_error=max(filter(None, own), default=None) if max_error is None else max_error,
            cold=not quick,
            limit_s=QUICK_S if quick else None,
            kernels=bool(outputs),
            progress=told,
        )
    best = fastest(comparison)
    backend = dict(wanted)[best.label] if best else None
    timed = as_timed(model, example_inputs, training=mode == "training", device=device)
    paste = lines_to_paste(backend, *timed) if backend else []
    print_comparison(comparison, paste or ([f"{backend!r} cannot be written as text."] if backend else []))
    _finish(comparison, file_of(factory), paste, outputs, gate)


def _finish(
    comparison: Comparison, title: str, paste: Sequence[str], outputs: Outputs, gate: tuple[str, float] | None
) -> None:
    """Judge and write a comparison; exit with what it shows."""
    judged = comparisons.judge(comparison, *gate) if gate else None
    if judged:
        say("", judged.text)
    if outputs:
        outputs.write(comparisons.document_of(comparison, title, paste, [judged.text] if judged else []))
    if not any(row.right for row in comparison.rows):
        raise typer.Exit(NONE_RAN)
    if judged and not judged.passed:
        raise typer.Exit(BELOW)


def print_comparison(comparison: Comparison, paste: Sequence[str]) -> None:
    """Print the table, what is to be known to read it, its verdict, and the lines to paste if the winner is used."""
    verdict = comparisons.verdict_of(comparison, "\n".join(paste))
    print_table(comparisons.COLUMNS, map(comparisons.cells, comparison.rows))
    said = "".join(piece.text for piece in sentence(verdict, comparison.noise))
    say(*comparison.reading(), "", said, *remark(verdict).splitlines())
    if verdict.paste and not kept(verdict):
        say("", *paste)
