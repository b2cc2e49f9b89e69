"""The report's tables on auto: real models, what rewrites gain, and what auto chose."""

from collections.abc import Iterator, Sequence

from benchmarks.analysis import verdicts
from benchmarks.analysis.auto_choices import LEAST, Choice, choices, geomeans
from benchmarks.analysis.markdown import about, number, ratio, short, table
from benchmarks.analysis.real_models import AUTO, KEPT, MODES, RealModel, mean_over, middle_and_most
from benchmarks.execution.records import Cell
from benchmarks.workloads.peers import WITHOUT_REWRITES

REAL = """\
Wall time of models from transformers and timm, medians in ms. The loop keeps each result until the next call has
returned; "dropped" is the time of the same calls with results dropped at once. "Kept" is the fastest mode whose results
are not overwritten: without CUDA graphs, or with the outputs cloned by the caller; "raw" is the fastest of the four
modes without clones. Speedups are those of `auto` in the loop, above 1 is faster; in *italics*: within the noise floor.
In training outputs are cloned, gradients are not."""
REWRITES = """\
Wall time of `auto` with and without rewrites of the graph, medians in ms of a loop that keeps each result until the
next call has returned. "Best" is the fastest of torch's four modes, "kept" the fastest whose results are not
overwritten. Speedups are those of `auto` with rewrites, with 95 % intervals; in *italics*: within the noise floor.
"First call" is in seconds, with nothing compiled before, without and with rewrites."""
FIRST = """\
Seconds of the first call with nothing compiled before, each compile in its own process. "Stored" is the first call of
`auto` with its decision and its kernels stored, "alone" that of its winner with the same kernels stored. Memory is the
peak of a call beyond what was allocated before the compile, in MiB."""
CHOICES = """\
Speedup in wall time (in older files with results dropped) of `auto`'s choice over each mode of torch.compile and the
fastest of them, all in the latest process with this `auto`: above 1 is faster. "Race" is the time to decide. The
compile time, which includes the race, is given next to the total compile time of all modes that pass. In *italics*:
within the noise floor."""
FINE = ("pass", "unavailable")


# ---- real models


def real_tables(models: Sequence[RealModel]) -> Iterator[str]:
    """Yield the tables of the real models: loops, and first calls."""
    if not models:
        return
    yield from ["", "## Real models", "", REAL, ""]
    head = ["model", "eager", *MODES, "kept", "its time", "auto", "x kept", "x raw", "dropped: raw", "dropped: auto"]
    yield from table(head, [*map(_loop_row, models), _loop_means(models)])
    yield from ["", FIRST, ""]
    head = [*MODES, "all four", "auto", "auto / four", "stored", "alone", "stored / alone"]
    yield from table(["model", *head, "memory: eager", "kept", "auto", "winner"], map(_first_row, models))
    yield from ["", *_bars(models)]


def _loop_row(of: RealModel) -> list[str]:
    kept, raw = of.best(KEPT), of.best(MODES)
    held = [_ms(of.held(peer)) for peer in ("eager", *MODES)]
    ratios = [ratio(of.over(peer), of.noise) for peer in (kept, raw)]
    return [of.name, *held, kept, _ms(of.held(kept)), _ms(of.held(AUTO)), *ratios, *_dropped(of)]


def _dropped(of: RealModel) -> list[str]:
    timed = {mode: seconds for mode in MODES if (seconds := of.dropped(mode)) is not None}
    return [_ms(min(timed.values(), default=None)), _ms(of.dropped(AUTO))]


def _loop_means(models: Sequence[RealModel]) -> list[str]:
    means = [number(mean_over(models, peers), "{:.2f}") for peers in (KEPT, MODES)]
    return ["all", *[""] * (len(MODES) + 3), "geomean", *means, "", ""]


def _first_row(of: RealModel) -> list[str]:
    made = of.cells[AUTO].compile if AUTO in of.cells else None
    auto_s, modes_s = of.first_s(AUTO), of.modes_s
    share = auto_s / modes_s if auto_s and modes_s else None
    seconds = [of.first_s(mode) for mode in MODES] + [modes_s, auto_s]
    stored = [made.warm_s, made.alone_s] if made else [None, None]
    peaks = [of.cells[peer].compile.peak_bytes if peer in of.cells else None for peer in ("eager", of.best(KEPT), AUTO)]
    return [
        of.name,
        *(number(each, "{:.1f}") for each in seconds),
        number(share, "{:.2f}"),
        *(number(each, "{:.1f}") for each in stored),
        number(of.stored_over_alone, "{:.2f}"),
        *(number(peak and peak / 2**20, "{:.0f}") for peak in peaks),
        of.winner,
    ]


def _bars(models: Sequence[RealModel]) -> Iterator[str]:
    slow = [of.name for of in models if of.too_slow]
    known = sum(of.over(of.best(KEPT)) is not None for of in models)
    yield f"- Below {LEAST}x of the fastest mode whose results stay, of {known} models: {', '.join(slow) or 'none'}."
    if first := middle_and_most([of.first_s(AUTO) for of in models]):
        yield f"- First call of `auto`: {first[0]:.1f} s in the middle, {first[1]:.1f} s at most."
    shares = [auto_s / of.modes_s for of in models if (auto_s := of.first_s(AUTO)) and of.modes_s]
    if share := middle_and_most(shares):
        yield f"- Of what the four modes take together: {share[0]:.2f} in the middle, {share[1]:.2f} at most."
    if stored := middle_and_most([of.stored_over_alone for of in models]):
        yield f"- With a stored decision over its winner alone: {stored[0]:.2f} in the middle, {stored[1]:.2f} at most."
    for of in models:
        failed = {peer: cell for peer, cell in of.failed.items() if cell.status not in FINE}
        failed = failed if of.cells else {"all": next(iter(of.failed.values()))}
        if found := [f"{peer} {cell.status}({short(cell.reason)})" for peer, cell in failed.items()]:
            yield f"- Not passed on {of.name}: {', '.join(found)}."


# ---- with and without rewrites


def rewrite_tables(cases: Sequence[RealModel]) -> Iterator[str]:
    """Yield the table of what rewrites gain."""
    if not cases:
        return
    yield from ["", "## Rewrites", "", REWRITES, ""]
    means = [number(mean_over(cases, peers), "{:.2f}") for peers in ([WITHOUT_REWRITES], MODES, KEPT)]
    head = ["case", "eager", "best", "its time", "auto without", "auto", "x without", "x best", "x kept", "first call"]
    mean = ["all", *[""] * 4, "geomean", *means, "", ""]
    yield from table([*head, "winner"], [*map(_rewritten_row, cases), mean])


def _rewritten_row(of: RealModel) -> list[str]:
    best, pair = of.best(MODES), (WITHOUT_REWRITES, AUTO)
    times = [_ms(of.held(best)), *(_ms(of.held(peer)) for peer in pair)]
    ratios = [ratio(of.over(peer), of.noise) for peer in (WITHOUT_REWRITES, best, of.best(KEPT))]
    first = "; ".join(number(of.first_s(peer), "{:.1f}") for peer in pair)
    return [of.name, _ms(of.held("eager")), best, *times, *ratios, first, of.winner]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g}"


# ---- what auto chose


def choice_tables(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a table for each auto: its choices, and their speedups over torch's modes."""
    chosen = choices(cells)
    if chosen:
        yield from ["", "## What auto chose", "", CHOICES]
    for peer, found in chosen.items():
        yield from ["", f"### {peer}", ""]
        modes = list(dict.fromkeys(mode for choice in found for mode in choice.over))
        head = ["case", "winner", "options", "race", "compile", "all modes", "best mode", "x best"]
        yield from table([*head, *(f"x {mode}" for mode in modes)], [*_choice_rows(found, modes)])
        yield from ["", *_held_against_goals(found)]
        cells_of_peer = [one.cell for peers in verdicts.latest_results(cells).values() for one in peers.get(peer, ())]
        lost = [f"{verdicts.name(c)} ({c.status})" for c in cells_of_peer if c.status not in FINE]
        if lost:
            yield f"- Not passed: {', '.join(dict.fromkeys(lost))}."


def _choice_rows(found: Sequence[Choice], modes: Sequence[str]) -> Iterator[list[str]]:
    for of in found:
        options = ", ".join(f"{name}={value}" for name, value in of.options.items())
        compiles = [about(of.compile_s, of.fresh), about(of.modes_s, of.fresh)]
        ratios = [ratio(of.over.get(mode), of.noise) for mode in (of.best, *modes)]
        yield [of.case, of.winner, options, number(of.race_s, "{:.1f} s"), *compiles, of.best, *ratios]
    means = geomeans(found)
    ratios = [number(means.get(mode), "{:.2f}") for mode in ("", *modes)]
    yield ["all", "", "", *_seconds(found), "geomean", *ratios]


def _seconds(found: Sequence[Choice]) -> list[str]:
    """Return the total seconds of races, compiles, and compiles of modes, over the cases where all three are known."""
    known = [of for of in found if None not in (of.race_s, of.compile_s, of.modes_s)]
    fresh, many = all(of.fresh for of in known), f" in {len(known)}" if len(known) < len(found) else ""
    sums = [sum(getattr(of, what) or 0.0 for of in known) for what in ("race_s", "compile_s", "modes_s")]
    return [f"{about(seconds, fresh or not at)}{many}" if known else "" for at, seconds in enumerate(sums)]


def _held_against_goals(found: Sequence[Choice]) -> Iterator[str]:
    slow, late = ([of.case for of in found if getattr(of, which)] for which in ("too_slow", "too_late"))
    marks = [of.mark for of in found if of.mark]
    counts = "/".join(str(marks.count(mark)) for mark in ("win", "tie", "loss"))
    yield f"- Against the best mode, wins/ties/losses: {counts}."
    yield f"- Below {LEAST}x of the best mode beyond noise: {', '.join(slow) or 'none'}."
    known = sum(of.race_s is not None and of.modes_s is not None for of in found)
    yield f"- Longer to decide than to compile all modes, of {known} where both are known: {', '.join(late) or 'none'}."
