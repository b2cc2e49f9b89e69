"""Audits: a decision is measured again beside default, the runner-up, and what fresh races choose, and then judged.

Fresh races come first, so that their winners are timed too. Then all are compiled and checked as in a race, and timed
in turn: the number of rounds is fixed beforehand, since a test that stops when it is sure is sure too often.

A decision has lost if it is surely slower than another candidate by more than two runs of one callable may differ. Of
all audits of decisions that have not lost, 1 % raise an alarm at most, however many decisions each has.

What a store's document names is data: a factory is imported only if the caller has named it too, or has consented.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import torch
from msgspec import Meta, Struct
from torch.fx import GraphModule

from backend_kwargs import trial
from backend_kwargs.auto.candidates import RaceCandidate
from backend_kwargs.auto.machine import Machine, difference, machine, nearly
from backend_kwargs.auto.machine import device_of as device_name
from backend_kwargs.auto.question import Question, Request
from backend_kwargs.auto.race import begun, dynamo_seconds, in_eager, prepared, race
from backend_kwargs.auto.reporting import what_is_open
from backend_kwargs.auto.sandbox import sandboxed
from backend_kwargs.auto.selection import RaceState
from backend_kwargs.auto.store import Catalogue, name_of
from backend_kwargs.auto.verdicts import FOLDER, Verdict
from backend_kwargs.backend import Backend
from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.bundles.config import CompileConfig
from backend_kwargs.bundles.disk.contents import inspected
from backend_kwargs.bundles.graphs import key_of
from backend_kwargs.bundles.samples import sample_of, sizes_differ
from backend_kwargs.errors import BackendKwargsError, error_text, shortened, shown, warn_once
from backend_kwargs.facts import Call
from backend_kwargs.facts.decision import DEFAULT, EAGER, Decision, RaceRow
from backend_kwargs.fleet.board import UNITS, UnitDocument, backend_of, read
from backend_kwargs.fleet.racing import made
from backend_kwargs.interval import Interval
from backend_kwargs.options import check, untrusted
from backend_kwargs.options.option import Options
from backend_kwargs.page.figures import now
from backend_kwargs.stores import Documents
from backend_kwargs.torch_internals.dynamo import RESTARTS, reset
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

    `code_of` is the label of the one whose code it has, its own if that is its own. `samples` are the seconds of its
    calls, paired with the others' by round; none if it does not run.
    """

    name: str
    label: str
    row: RaceRow
    code_of: str
    samples: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Audited:
    """A decision, with the model and the machine that it was measured on; if it was not, `why`.

    `contenders` are those that were measured, the decision first, and `again` the samples of the decision under
    another name. `fresh` are the labels of what each fresh race chose.
    """

    model: str
    decision: Decision
    here: Machine
    why: str = ""
    judges_time: bool = True
    places: tuple[str, ...] = ()
    contenders: tuple[Contender, ...] = ()
    again: Sequence[float] = ()
    fresh: tuple[str, ...] = ()


def measured(audited: Audited, request: Request, effort: Effort, tell: Tell) -> Audited:
    """Measure a decision for the graph of a request; raise if the graph cannot be raced, or does not permit it."""
    decision = audited.decision
    trusts = Question(request).trusts
    if not trusts(decision.winner, decision):
        raise BackendKwargsError(f"these options do not permit {decision.winner}")
    unknowing = replace(request, settings=replace(request.settings, budget_s=effort.flip_s))
    fresh = []
    for at in range(1, effort.flips + 1):
        tell(f"fresh race {at} of {effort.flips}")
        fresh.append(race(unknowing, lambda name, done: None).winner)
    wanted, fresh_labels = _wanted(decision, [row for row in fresh if trusts(row.name, row)], trusts)
    with sandboxed(request.gm) as sandbox:
        settings = replace(request.settings, budget_s=COMPILE_S)
        running = begun(replace(request, settings=settings), sandbox, dynamo_s=dynamo_seconds())
        contenders, again = _timed(running, wanted, effort, tell)
    return replace(audited, contenders=contenders, again=again, fresh=fresh_labels)


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


def _timed(
    running: RaceState, wanted: Mapping[str, Wanted], effort: Effort, tell: Tell
) -> tuple[tuple[Contender, ...], Sequence[float]]:
    """Compile and check the candidates, time those that pass, each code once, in turn; return the first's again too."""
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
    timed = (replace(found[label], samples=samples.get(found[label].code_of, ())) for label in wanted)
    return tuple(timed), samples.get(AGAIN, ())


# ---- what was found

LEVEL = 0.01  # the share of audits without a loser that find one
MARGIN = 0.02  # what two runs of one callable may differ by on a quiet machine, as in races
REPRODUCED = 1.1  # what one callable may differ by between two processes
NAME, TEXT = 500, 8000  # characters: what a document's maker wrote may be a megabyte
Name = Annotated[str, Meta(max_length=NAME)]
Text = Annotated[str, Meta(max_length=TEXT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Judgement = Literal["right", "within noise", "lost", "fails", "not audited"]


class Against(Struct, frozen=True, omit_defaults=True):
    """Another candidate: `ratio` is the decision's time over its own, above 1 if the decision is slower.

    `p` is the p-value of the decision being slower by no more than the margin. Without a ratio, `reason` says why.
    """

    name: Name
    options: dict[Name, Any] = {}
    ratio: Interval | None = None
    p: Share = 1.0
    reason: Text = ""


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the audit of one decision found; times in seconds, shares of 1.

    `lost_to` is what the decision lost to, or has the least time over, and `p` its p-value, adjusted for all
    comparisons of the audit. `regret` is the decision's time over that of `best`, less 1. Of `races` fresh races,
    `others` chose another candidate, and `flips` one that differs beyond noise. `noise` is the decision timed against
    itself, `seconds` its time now, `recorded_s` when it was made; `record` compares both, and `differs` says why that
    cannot be. `places` say what is stored of those that it has rewritten.
    """

    verdict: Judgement
    model: Name
    key: Name
    graph: Text = ""
    winner: Name = ""
    options: dict[Name, Any] = {}
    reason: Text = ""
    against: tuple[Against, ...] = ()
    lost_to: Name = ""
    loss: Interval | None = None
    p: Share = 1.0
    best: Name = ""
    regret: Interval | None = None
    races: int = 0
    others: int = 0
    flips: int = 0
    noise: Interval | None = None
    seconds: Interval | None = None
    recorded_s: float | None = None
    record: Literal["", "reproduced", "changed", "not comparable", "not recorded"] = ""
    differs: Text = ""
    places: tuple[Text, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it makes the audit fail."""
        return self.verdict in ("lost", "fails")


class AuditDocument(Struct, frozen=True, kw_only=True):
    """An audit: what was audited, on which machine, and what it found of each decision."""

    of: Name
    made: Name
    environment: dict[Name, Any]
    findings: tuple[Finding, ...]
    schema: Literal[1] = 1
    level: float = LEVEL
    margin: float = MARGIN


def audit_document(of: str, environment: Mapping[str, object], findings: Sequence[Finding]) -> AuditDocument:
    """Return an audit as data."""
    return AuditDocument(of=shortened(of, NAME), made=now(), environment=dict(environment), findings=tuple(findings))


def as_json(document: AuditDocument) -> str:
    """Return an audit as JSON."""
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=repr), indent=1).decode() + "\n"


def judged(audited: Sequence[Audited]) -> list[Finding]:
    """Return what audits found, with Holm's correction over their decisions."""
    found = [_finding(each) for each in audited]
    timed = [at for at, finding in enumerate(found) if finding.lost_to]
    for at, p in zip(timed, trial.holm([found[at].p for at in timed]), strict=True):
        verdict: Judgement = "lost" if p <= LEVEL and audited[at].judges_time else found[at].verdict
        found[at] = msgspec.structs.replace(found[at], p=p, verdict=verdict)
    return found


def _finding(audited: Audited) -> Finding:
    """Return what is known of one decision alone."""
    decision = audited.decision
    known: dict[str, Any] = {
        "model": shortened(audited.model, NAME),
        "key": shortened(decision.key, NAME),
        "graph": shortened(decision.facts, TEXT),
        "winner": shortened(decision.winner, NAME),
        "places": tuple(shortened(each, TEXT) for each in audited.places),
        "options": {shortened(name, NAME): value for name, value in decision.options.items()},
    }
    if not audited.contenders:
        return Finding(verdict="not audited", reason=shortened(audited.why, TEXT), **known)
    own, *others = audited.contenders
    if not own.samples:
        return Finding(verdict="fails", reason=_why(own.row), **known)
    noise = trial.sure_ratio(audited.again, own.samples).ratio
    over = {
        each.label: trial.sure_ratio(own.samples, each.samples, max(MARGIN, noise.reach - 1))
        for each in others
        if each.samples and each.code_of != own.code_of
    }
    ratios = {own.label: Interval(1.0, 1.0, 1.0)} | {label: each.ratio for label, each in over.items()}
    closest = min(over, key=lambda label: over[label].p, default="")
    best = max(ratios, key=lambda label: ratios[label].median)
    others_chosen = [label for label in audited.fresh if label != own.label]
    apart = [ratios[label] for label in others_chosen if label in ratios]
    return Finding(
        verdict="right" if all(ratio.high <= 1 for ratio in ratios.values()) else "within noise",
        reason=shortened(f"provisional: {what_is_open(decision)}", TEXT) if decision.provisional else "",
        against=tuple(_against(each, own, over.get(each.label)) for each in others),
        lost_to=closest,
        loss=_bounded(ratios[closest], less=1) if closest else None,
        p=min(1.0, over[closest].p * len(over)) if closest else 1.0,
        best=best,
        regret=_bounded(ratios[best], less=1),
        races=len(audited.fresh),
        others=len(others_chosen),
        flips=sum(each.low > 1 + MARGIN or each.high < 1 - MARGIN for each in apart),
        noise=_bounded(noise),
        seconds=trial.median_interval(own.samples),
        **_record(audited, trial.percentile(own.samples, 0.5)),
        **known,
    )


def _against(other: Contender, own: Contender, over: trial.SureRatio | None) -> Against:
    options = dict(other.row.options)
    if over:
        return Against(name=other.label, options=options, ratio=_bounded(over.ratio), p=over.p)
    why = "it has the decision's code" if other.code_of == own.code_of else _why(other.row)
    return Against(name=other.label, options=options, reason=why)


def _why(row: RaceRow) -> str:
    """Return how a candidate failed."""
    return shortened(f"{row.status}: {row.reason}", TEXT)


def _bounded(ratio: Interval, less: float = 0.0) -> Interval | None:
    """Return a ratio less a number, None if too few rounds have bounded it."""
    bounded = ratio.high < float("inf")
    return Interval(ratio.median - less, ratio.low - less, ratio.high - less) if bounded else None


def _record(audited: Audited, now_s: float) -> dict[str, Any]:
    """Return whether the time that was recorded is that of today, if both are of one machine and release."""
    decision = audited.decision
    recorded = next((row.seconds for row in decision.rows if row.won and row.seconds), None)
    if recorded is None:
        return {"record": "not recorded"}
    if differs := difference(decision.machine, audited.here):
        return {"record": "not comparable", "recorded_s": recorded, "differs": shortened(differs, TEXT)}
    same = 1 / REPRODUCED <= now_s / recorded <= REPRODUCED
    return {"record": "reproduced" if same else "changed", "recorded_s": recorded}


def renewed(audited: Audited, finding: Finding) -> Decision | None:
    """Return the decision as the audit leaves it, with today's times; where it lost, the fastest in its place.

    None if it was not measured, or nothing runs.
    """
    seconds = {each.label: trial.percentile(each.samples, 0.5) for each in audited.contenders if each.samples}
    if not seconds:
        return None
    won = min(seconds, key=lambda label: seconds[label]) if finding.failed else audited.contenders[0].label
    rows = tuple(
        replace(  # under the candidate's own name
            each.row,
            name=each.name,
            seconds=seconds.get(each.label),
            won=each.label == won,
            speedup=None,
            against="",
            began_s=None,
            led_s=None,
            timed_s=None,
        )
        for each in audited.contenders
    )
    chosen = next(row for row in rows if row.won)
    return replace(
        audited.decision,
        winner=chosen.name,
        options=chosen.options,
        compiler=chosen.compiler,
        rows=rows,
        machine=dict(audited.here),
        made=time.time(),
        differs="",
    )


# ---- the decisions of a model

Make = Callable[[], tuple[Any, Any]]
CHANGED = "no graph of the model has its key: the model, or backend-kwargs, has changed since"
UNREACHED = "no inputs of the model's reach it, or the model, or backend-kwargs, has changed since"
# How a graph may have been recorded: gradients, inference mode, eval(). A model may have decisions in several.
MODES = ((False, False, True), (False, True, True), (True, False, True), (True, False, False))


@dataclass(frozen=True, slots=True)
class Target:
    """A model at one size: how it is made, and the backend whose decisions are audited.

    `decisions` are the names of what is known to be decided for it. `dynamic` is torch.compile's; None: it is called
    with the inputs of `others` too, so that torch takes what differs for sizes that vary. `keys` names a graph where
    decisions are not under the key of its request, as in a bundle.
    """

    label: str
    make: Make
    backend: Backend
    threads: int | None = None
    decisions: tuple[str, ...] = ()
    dynamic: bool | None = False
    others: tuple[Make, ...] = ()
    keys: Callable[[GraphModule, Inputs], str] | None = None


@dataclass
class Auditor:
    """The decisions by key, how much is measured, the verdicts of places by name, and what was found up to now."""

    decisions: Mapping[str, Sequence[Decision]]
    effort: Effort
    tell: Tell
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    found: list[Audited] = field(default_factory=list)

    def audit(self, target: Target) -> bool:
        """Audit the decisions for the graphs of a model, and note those that cannot be; return whether there are any.

        Raises if the model fails, and none is known to be its own.
        """
        before, errors = len(self.found), list[BackendKwargsError]()
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(target.threads or torch.get_num_threads())
            for at, (grad, inference, evaluated) in enumerate(MODES):
                if at and not self.left():
                    break
                self.tell(f"{target.label}: tracing")
                reset()
                try:
                    self._call(target, grad, inference, evaluated)
                except BackendKwargsError as error:
                    errors.append(error)
        reset()
        fails = errors and len(self.found) == before
        self._note_missing(target, str(errors[0]).rstrip(".") if fails else UNREACHED if target.keys else CHANGED)
        if errors and len(self.found) == before:
            raise errors[0]
        return len(self.found) > before

    def leave_out(self, target: Target, why: str) -> None:
        """Note that nothing was audited of a model."""
        self.found.append(Audited(target.label, Decision("", "", ""), {}, why=why.rstrip(".")))

    @cached_property
    def _here(self) -> dict[str, Decision]:
        """The decisions for this device, by name."""
        return {name_of(each): each for several in self.decisions.values() for each in several if _is_here(each)}

    def left(self) -> int:
        """Return how many decisions for this device no graph has asked for."""
        return len(self._here.keys() - {name_of(each.decision) for each in self.found})

    def _call(self, target: Target, grad: bool, inference: bool, evaluated: bool) -> None:
        """Call a model in one of its modes, with all of its inputs."""

        def graphs(gm: GraphModule, example_inputs: Inputs) -> Call:
            return self._graph(target, gm, example_inputs)

        model, inputs = target.make()
        if isinstance(model, torch.nn.Module):
            model.train(not evaluated)
        compiled: Any = torch.compile(model, backend=graphs, dynamic=target.dynamic)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            for each in (inputs, *(make()[1] for make in target.others)):
                positional, keywords = sample_of(each)
                try:
                    compiled(*positional, **keywords)
                except BackendKwargsError:
                    raise
                except Exception as error:
                    why = f"{target.label} fails on its example inputs: {error_text(error)}."
                    raise BackendKwargsError(why) from error

    def _graph(self, target: Target, gm: GraphModule, example_inputs: Inputs) -> Call:
        """Audit the decision for a graph, if there is one; the graph itself runs in eager."""
        request = target.backend.request(CapturedGraph(gm, example_inputs))
        asked = Question(request)
        key = target.keys(gm, example_inputs) if target.keys else asked.key
        decision = self._decision(key, asked.here)
        if decision is None or any(name_of(each.decision) == name_of(decision) for each in self.found):
            return gm.forward
        judges_time, places = request.settings.objective == "latency", tuple(said_of_places(decision, self.verdicts))
        audited = Audited(target.label, decision, asked.here, judges_time=judges_time, places=places)
        what = f"{target.label}: {decision.winner} for {decision.facts or 'a graph'}"
        try:
            self.found.append(measured(audited, request, self.effort, lambda doing: self.tell(f"{what}: {doing}")))
        except RESTARTS:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a race meets, the other decisions are audited
            why = str(error) if isinstance(error, BackendKwargsError) else error_text(error)
            self.found.append(replace(audited, why=why))
        return gm.forward

    def _decision(self, key: str, here: Machine) -> Decision | None:
        """Return the decision for a graph: of a machine like this one, else the nearest one's."""
        several = self.decisions.get(key, ())
        return min(several, key=lambda each: (len(nearly(each.machine, here)), -each.made), default=None)

    def _note_missing(self, target: Target, why: str) -> None:
        """Note the decisions for this device that are known to be this model's, and that no graph of it asked for."""
        seen = {each.decision.key for each in self.found}
        for decision in (self._here[name] for name in target.decisions if name in self._here):
            if decision.key not in seen:
                self.found.append(Audited(target.label, decision, decision.machine, why=why))


def said_of_places(decision: Decision, known: Mapping[str, Verdict]) -> Iterator[str]:
    """Yield of each place that a decision has rewritten what its stored verdict says."""
    for row in filter(decision.uses, decision.places):
        start = f"{FOLDER}{device_name(decision.machine)}/{row.place.rpartition(':')[2]}."
        found = [verdict for name, verdict in known.items() if name.startswith(start)]
        ratios = [
            f"{each.speedup.as_ratio()} alone, {'' if each.confirmed else 'not '}confirmed in a whole graph"
            for each in found
            if each.speedup
        ]
        yield f"{row.name}: {'; '.join(ratios) or 'no verdict is stored'}"


def _is_here(decision: Decision) -> bool:
    """Return whether a decision is for a device of this machine; a bundle's names none."""
    return not decision.machine or device_name(decision.machine) in _devices_here()


@cache
def _devices_here() -> frozenset[str]:
    return frozenset(device_name(machine([kind])) for kind in ("cpu", "cuda"))


# ---- what a store names


def by_key(catalogue: Catalogue) -> dict[str, list[Decision]]:
    """Return the decisions of a store by key, those of several machines together."""
    found: dict[str, list[Decision]] = {}
    for each in catalogue.all():
        found.setdefault(each.key, []).append(each)
    return found


def units_of(store: Documents, trusted_keys: Sequence[object] = ()) -> list[UnitDocument]:
    """Return what `tune-plan` wrote into a store of units that are done; if there are keys, what one signed."""
    documents = (read(name, content, trusted_keys) for name, content in store.list(UNITS))
    return [each for each in documents if each and each.decisions and not each.failed]


def targets_of(documents: Sequence[UnitDocument]) -> list[Target]:
    """Return the models of units that can run on this machine; their options are a document's, so data alone."""
    targets = []
    for each in documents:
        unit = each.unit
        if unit.device_type == "cuda" and not torch.cuda.is_available():
            continue
        try:
            backend = backend_of(unit, untrusted(check))
        except BackendKwargsError as error:
            warn_once(f"{unit.label} is not audited: {error}")
            continue
        targets.append(Target(unit.label, partial(made, unit), backend, unit.threads, each.decisions))
    return targets


def consented(documents: Sequence[UnitDocument], model: str | None, *, trust: bool, label: str) -> list[UnitDocument]:
    """Return the units whose model the caller has named, or all of them under `trust`; raise if neither is given."""
    if model is not None:
        return [each for each in documents if each.unit.model == model]
    if trust and documents:
        return list(documents)
    named = list(dict.fromkeys(each.unit.model for each in documents))
    if not named:
        raise BackendKwargsError(
            f"The documents of {label!r} do not name their model: pass MODEL, FILE_OR_MODULE:FACTORY, which makes it."
        )
    several = f", and {len(named) - 1} more" if named[1:] else ""
    raise BackendKwargsError(
        f"A store's document is data, and the model that it names is not imported without consent: name it, or pass "
        f"--trust for all of them. It names {shown(named[0])}{several}."
    )


# ---- what a bundle names


def bundle_target(path: Path, make: Make, label: str, *, trust: bool) -> tuple[Target, dict[str, list[Decision]]]:
    """Return the model of a bundle, and the decisions in its manifest by the keys of their graphs."""
    manifest, _ = inspected(path, ())
    config = CompileConfig.from_dict(manifest.config, trust=trust)
    decided = {
        graph.key: [Decision(graph.key, "", graph.winner, graph.options, made=0.0)]
        for graph in manifest.graphs
        if graph.winner is not None
    }
    if not decided:
        raise BackendKwargsError(f"Bundle {str(path)!r} contains no decision of auto: it was built without auto=True.")
    dynamic = sizes_differ(manifest.samples) if config.dynamic is None else config.dynamic
    names = tuple(name_of(each) for several in decided.values() for each in several)
    return Target(label, make, config.resolved, decisions=names, dynamic=dynamic, keys=key_of), decided
