"""An audit measures a decision again: its winner beside default, the runner-up, and what fresh races choose.

Fresh races come first, so that their winners are timed too. Then all are compiled and checked as in a race, and timed
in turn: the number of rounds is fixed beforehand, since a test that stops when it is sure is sure too often.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from backend_kwargs import trial
from backend_kwargs.auto.candidates import RaceCandidate
from backend_kwargs.auto.question import Question, Request
from backend_kwargs.auto.race import begun, dynamo_seconds, in_eager, prepared, race
from backend_kwargs.auto.sandbox import sandboxed
from backend_kwargs.auto.selection import RaceState
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts.decision import DEFAULT, EAGER, Decision, RaceRow
from backend_kwargs.options.option import Options
from backend_kwargs.torch_internals.tensors import modes_restored

COMPILE_S = 300.0  # for the candidates of one audit
AGAIN = "\0again"  # the decision under another name: what differs between both is noise
Tell = Callable[[str], None]
Wanted: TypeAlias = tuple[str, RaceCandidate]  # its own name, and the candidate, which is called by its label


@dataclass(frozen=True, slots=True)
class Effort:
    """How much one audit measures: fresh races of `flip_s` seconds, then rounds, for `timing_s` seconds at most."""

    flips: int = 3
    flip_s: float = 10.0
    rounds: int = 240
    timing_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Contender:
    """A candidate of an audit: `label` is its name, with a number where two share one; `row` says how it ended.

    `code_of` is the label of the one whose code it has, its own if that is its own.
    """

    name: str
    label: str
    row: RaceRow
    code_of: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What an audit has measured: contenders, the decision first, and their samples, paired by round.

    `samples` has those of each code, by label, and `again` those of the decision under another name. `fresh` are the
    labels of what each fresh race chose.
    """

    contenders: tuple[Contender, ...]
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    again: Sequence[float] = ()
    fresh: tuple[str, ...] = ()

    def of(self, contender: Contender) -> Sequence[float]:
        """Return a contender's samples, none if it does not run."""
        return self.samples.get(contender.code_of, ())


def measured(request: Request, decision: Decision, effort: Effort, tell: Tell) -> Measured:
    """Measure a decision for the graph of a request; raise if the graph cannot be raced, or does not permit it."""
    trusts = Question(request).trusts
    if not trusts(decision.winner, decision):
        raise BackendKwargsError(f"these options do not permit {decision.winner}")
    fresh = [*_fresh(request, effort, tell)]
    wanted, fresh_labels = _wanted(decision, [row for row in fresh if trusts(row.name, row)], trusts)
    with sandboxed(request.gm) as sandbox:
        settings = replace(request.settings, budget_s=COMPILE_S)
        running = begun(replace(request, settings=settings), sandbox, dynamo_s=dynamo_seconds())
        return replace(_timed(running, wanted, effort, tell), fresh=fresh_labels)


def _fresh(request: Request, effort: Effort, tell: Tell) -> Iterator[RaceRow]:
    """Yield the winners of fresh races, which know of no decision."""
    settings = replace(request.settings, budget_s=effort.flip_s)
    alone = replace(request, settings=settings)
    for at in range(1, effort.flips + 1):
        tell(f"fresh race {at} of {effort.flips}")
        yield race(alone, lambda name, done: None).winner


def _wanted(
    decision: Decision, fresh: Sequence[RaceRow], trusts: Callable[[str, Decision | RaceRow], bool]
) -> tuple[dict[str, Wanted], tuple[str, ...]]:
    """Return the candidates to measure by label, the decision first, and the labels of the fresh winners."""
    wanted: dict[str, Wanted] = {}
    labels: dict[tuple[str, ...], str] = {}

    def add(name: str, options: Options, compiler: str) -> str:
        # Default compiled for CUDA graphs, and recorded without them, is default.
        alone = name in (DEFAULT, EAGER)
        key = (name if alone else json.dumps(dict(options), sort_keys=True, default=repr), compiler)
        if key not in labels:
            count = sum(own == name for own, _ in wanted.values())
            label = labels[key] = f"{name} ({count + 1})" if count else name
            wanted[label] = name, RaceCandidate(label, dict(options), over=False, compiler=compiler)
        return labels[key]

    add(decision.winner, decision.options, decision.compiler)
    default = next((row for row in decision.rows if row.name == DEFAULT and trusts(DEFAULT, row)), RaceRow(DEFAULT))
    add(DEFAULT, default.options, "")
    others = [row for row in decision.rows if not row.won and row.name != DEFAULT and row.status == "pass"]
    timed = sorted((row for row in others if row.seconds), key=lambda row: row.seconds or 0.0)
    if runner_up := next((row for row in timed if trusts(row.name, row)), None):
        add(runner_up.name, runner_up.options, runner_up.compiler)
    return wanted, tuple(add(row.name, row.options, row.compiler) for row in fresh)


def _timed(running: RaceState, wanted: Mapping[str, Wanted], effort: Effort, tell: Tell) -> Measured:
    """Compile and check the candidates, and time those that pass, each code once, in turn."""
    eager = in_eager(running)
    calls: dict[str, Callable[[], object]] = {}
    found: dict[str, Contender] = {}
    # What default draws is the reference of a random graph.
    for label in sorted(wanted, key=lambda label: running.stats.random and label != DEFAULT):
        tell(f"compiling {label}")
        name, candidate = wanted[label]
        runner = eager if label == EAGER else prepared(running, eager, candidate)
        row = runner.row if runner else running.rows[-1]
        if runner:
            calls[label] = runner.call
        code_of = row.reason.removeprefix("as ") if row.status == "same code" else label
        found[label] = Contender(name, label, row, code_of)
    if again := calls.get(found[next(iter(wanted))].code_of):
        calls[AGAIN] = again
    tell("timing")

    def failed(label: str, error: Exception) -> None:
        if label in found:
            found[label].row.status, found[label].row.reason = trial.status_of(error)

    with modes_restored():
        samples = trial.interleave(
            calls,
            rounds=effort.rounds,
            device=running.device,
            budget_s=effort.timing_s,
            failed=failed,
        )
    again_s = samples.pop(AGAIN, [])
    return Measured(tuple(found[label] for label in wanted), samples, again_s)
