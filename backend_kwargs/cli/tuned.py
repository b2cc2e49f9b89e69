"""A model raced at each size for `tune`: what was found as text, as a file of decisions, and as a page."""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import typer
from msgspec.structs import replace

from backend_kwargs import trial
from backend_kwargs.auto.decisions_toml import write_decisions
from backend_kwargs.backend import Backend
from backend_kwargs.cli.console import Outputs, console, pasted, print_table, say
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts.decision import Decision
from backend_kwargs.fleet.board import AUTO
from backend_kwargs.fleet.racing import Tuned, left_out, racing, tuned, why_not_raced
from backend_kwargs.harness.models import model_of
from backend_kwargs.interval import Interval, widest
from backend_kwargs.page import document as page
from backend_kwargs.page import figures, noise_of
from backend_kwargs.page.figures import file_of, interval_of, measured_on
from backend_kwargs.page.sentence import SLOWER, gained
from backend_kwargs.report.decisions import parts_of, verdict_of
from backend_kwargs.report.graphs import number
from backend_kwargs.stores import Store
from backend_kwargs.torch_internals.dynamo import reset

WHOLE = "the whole call"
COLUMNS = ("sizes", "graph", "winner", "race", "eager call", "compiled call", "speedup")
STOPPED, INTERRUPTED = 2, 130  # exit codes, as for a wrong argument and for Ctrl-C, if some sizes were raced before


def tune(
    model: str, sizes: list[dict[str, int]], backend: Backend, budget_s: float, output: Path, outputs: Outputs
) -> None:
    """Race the model at each size, and write the decisions and the page."""
    raced, stopped = _raced(partial(model_of, model), sizes, backend, budget_s)
    kept = _write(model, raced, output)
    slower = [each for each in raced if each.calls_itself]
    lines_for = partial(_lines, backend, fixed_sizes=any(sizes))
    lines = [] if len(slower) == len(raced) else lines_for(output)
    serve = " On the machine that serves the model:" if lines else ""
    say(f"{kept} decision{'' if kept == 1 else 's'} written to {output}.{serve}")
    if lines:
        say("", *lines)
    for each in slower:
        ratio = each.speedup.as_ratio() if each.speedup else ""
        say(f"Call the model itself ({each.label}): the compiled call is {ratio} as fast.")
    if outputs:
        outputs.write(document_of(model, raced, "\n".join(lines and lines_for(Path(output.name)))))
    if stopped:
        raise typer.Exit(stopped)


def _write(model: str, raced: Sequence[Tuned], output: Path) -> int:
    """Print what was raced, write the decisions that may be used again, and return their number; raise if it is 0."""
    decisions = [decision for of_size in raced for decision in of_size.decisions]
    if not any(decision.rows for decision in decisions):
        raise BackendKwargsError(f"No graph of {model!r} was raced: {why_not_raced(decisions)}.")
    print_table(COLUMNS, [row for of_size in raced for row in _rows(of_size)])
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


def _rows(raced: Tuned) -> Iterator[tuple[str, ...]]:
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


# ---- the page


def document_of(model: str, raced: Sequence[Tuned], paste: str) -> page.Document:
    """Return the page of a of_size model: the whole call at each size, and the race of each graph."""
    parts = parts_of([*_graphs(raced)])
    noise = interval_of(widest(of_size.same for of_size in raced))
    rows = tuple(_page_row(of_size, len(raced) == 1) for of_size in raced)
    counted = f"{number(len(parts.graphs), 'graph')} at {number(len(raced), 'size')}"
    return replace(
        parts,
        title=file_of(model),
        subtitle=f"{counted} {measured_on(parts.environment)}",
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
    kept = tuple(each for each in verdict.speedups if each.over != "eager" or not of_call)
    return replace(verdict, speedups=(*kept, *of_call), latency=_latency(raced[0]), paste=paste)


def _latency(of_size: Tuned) -> Interval | None:
    return interval_of(trial.median_interval(of_size.compiled_s)) if of_size.compiled_s else None


def _page_row(of_size: Tuned, alone: bool) -> page.Row:
    winners = ", ".join(dict.fromkeys(decision.winner for decision in of_size.decisions))
    return page.Row(
        name=of_size.label,
        status=SLOWER if of_size.calls_itself else "pass",
        note=f"{winners}: {sum(decision.seconds for decision in of_size.decisions):.0f} s",
        won=alone and not of_size.calls_itself,
        speedup=interval_of(of_size.speedup),
        latency=_latency(of_size),
        graphs=len(of_size.decisions),
    )
