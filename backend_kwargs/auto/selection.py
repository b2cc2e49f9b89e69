"""Which candidate of a race is next: what each could save, how long it takes, and why the others are skipped."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache, cached_property

import torch
from torch.fx import GraphModule

from backend_kwargs import measure
from backend_kwargs.auto.budget import Budget
from backend_kwargs.auto.candidates import (
    CUDAGRAPHS,
    DEFAULT_AND_GRAPHS,
    PADDED,
    UNFROZEN,
    WITH_GRAPHS,
    RaceCandidate,
    candidates_for,
    merged,
    name_of_other,
    precision_candidates,
    step_of,
    why_not_raced,
)
from backend_kwargs.auto.compiling import Compiles
from backend_kwargs.auto.graph_stats import GraphStats, Product, padded_in
from backend_kwargs.auto.head_to_head import Runner
from backend_kwargs.auto.request import RaceContext, Request
from backend_kwargs.auto.result_checks import ResultChecks
from backend_kwargs.auto.rewritten import candidates_of_rewrites, lowered_anew
from backend_kwargs.auto.roofline import (
    Slack,
    slack_of,
    time_library,
)
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.facts.decision import DEFAULT, EAGER, RaceRow
from backend_kwargs.graphs.replay import Task
from backend_kwargs.options.layers import Options, standing, with_users
from backend_kwargs.rewrites.table import find_rewrite

logger = logging.getLogger("backend_kwargs.auto")

LEAST_GAIN = 0.03  # a candidate that cannot gain this much is skipped
LEAST_GAIN_PER_S = 0.003  # so is one that gains less per second of compiling, unless effort is "full"
WORTH_A_LARGER_BUDGET = 0.1
LEAST_COMPILE_S = 0.5  # assumed for default, whose own compile is faster when it hits Inductor's cache


class Skipped(Enum):
    """The kinds of reasons for which a race leaves out a candidate."""

    UNFIT = auto()  # it has no effect here, or could not be judged
    RACED = auto()  # its options were raced, under another name
    ITSELF = auto()  # it was offered, and raced as such
    BUDGET = auto()  # there is no time for it
    GAIN = auto()  # it could save too little


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a candidate is left out: the kind, and the words in its row."""

    kind: Skipped
    text: str


@dataclass
class Selection:
    """What is known of a race's candidates: its subject, then what has been measured up to now.

    `rows` are those of the race, and `compiles` its compiles; default's took `default_s`. `library` has the seconds of
    each library kernel. `base` belongs to the candidate whose options the next ones extend: its seconds and its slack.
    `best_row` is the fastest of Inductor's.
    """

    request: Request
    task: Task
    stats: GraphStats
    device: torch.device
    budget: Budget
    checks: ResultChecks
    rows: list[RaceRow]
    compiles: Compiles
    default_s: float = 0.0
    library: dict[Product, float] | None = None
    base: tuple[float, Slack] | None = None
    best_row: RaceRow | None = None

    @property
    def settings(self) -> RaceSettings:
        """The options of the race."""
        return self.request.settings

    @property
    def context(self) -> RaceContext:
        """What the race has from its compiler."""
        return self.request.context

    @property
    def named(self) -> bool:
        """Whether the user has named the candidates: all of them are raced, in this order."""
        return self.settings.candidates is not None

    # ---- CUDA graphs

    @property
    def may_have_graphs(self) -> bool:
        """Whether CUDA graphs that the user has not named may be raced."""
        if self.device.type != "cuda" or self.named or self.settings.objective == "memory":
            return False
        # Each symbolic size would record a graph of its own.
        return not self.stats.dynamic and not self._unfit(WITH_GRAPHS, CUDAGRAPHS)

    @property
    def default(self) -> RaceCandidate:
        """Default, compiled for CUDA graphs if these may be raced: the same code then serves with them and without."""
        shared = self.may_have_graphs and self.compiles.may_share(CUDAGRAPHS)
        return DEFAULT_AND_GRAPHS if shared else RaceCandidate(DEFAULT, over=False, complexity=0)

    def other(self, candidate: RaceCandidate, options: Options, champion: Runner) -> RaceCandidate | None:
        """Return the step for a candidate's code under toggled `options`, with CUDA graphs or without.

        None if it is not worth its time: once CUDA graphs won, code is raced with them.
        """
        raced = any(row.options == options for row in self.rows if row.status != "skipped")
        if champion.replayed or raced or not self.may_have_graphs:
            return None
        return replace(
            WITH_GRAPHS if candidate.name == DEFAULT else candidate,
            name=name_of_other(candidate.name, options),
            options=options,
            over=False,
        )

    # ---- all candidates

    def candidates(self, champion: Runner) -> list[RaceCandidate]:
        """Return what may be raced against the first champion: steps, rewrites, precisions and other compilers."""
        settings, of, frozen = self.settings, self.context.options_of, self.request.frozen
        steps = candidates_for(self.stats, settings.effort, settings.candidates, of, frozen=frozen)
        compilers = [step.name for step in steps if step.compiler]
        precise = precision_candidates(settings.precision, settings.max_error, compilers)
        if any(row.name == WITH_GRAPHS.name for row in self.rows):
            steps = [step for step in steps if step is not WITH_GRAPHS]
        rewrites = [] if self.budget.over else [*self.lowered_rewrites, *self.traced_rewrites]
        names = list(self.context.rewrites)
        rewrites.sort(key=lambda each: names.index(each.name))
        return [*self.offered, *steps, *rewrites, *precise]

    @cached_property
    def offered(self) -> list[RaceCandidate]:
        """What other machines, or other releases of torch, have decided for this graph, as it was chosen there."""
        found: dict[str, RaceCandidate] = {}
        for each in self.request.offered:
            candidate = RaceCandidate(each.winner, each.options, over=False, complexity=2, compiler=each.compiler)
            found.setdefault(repr((each.compiler, sorted(each.options.items()))), candidate)
        return [*found.values()]

    @cached_property
    def lowered_rewrites(self) -> list[RaceCandidate]:
        """The rewrites that match graphs which default has lowered."""
        return self._matching(self._rewrites(traced=False))

    @cached_property
    def traced_rewrites(self) -> list[RaceCandidate]:
        """The rewrites of dynamo's graph that match."""
        return self._matching(self._rewrites(traced=True))

    def _rewrites(self, *, traced: bool) -> list[str]:
        """Return the rewrites that the race may try, of dynamo's graph or of those that Inductor lowers."""
        return (
            [] if self.named else [name for name in self.context.rewrites if bool(find_rewrite(name).traced) == traced]
        )

    def _matching(self, names: Sequence[str]) -> list[RaceCandidate]:
        """Return those of the rewrites `names` that match."""
        if not names:
            return []

        @cache
        def lowered() -> list[GraphModule]:
            again = replace(self.request, graph=replace(self.request.graph, gm=self.task.copy()))
            return [each.gm for each in self.compiles.lowered] or lowered_anew(again)

        traced = self.task.copy(), self.request.example_inputs
        asked = names, self.stats, self.settings.objective, lowered, traced, self.device
        return candidates_of_rewrites(*asked, whole=bool(self.compiles.lowered) or not self.stats.training)

    # ---- one candidate

    def first_of(self, fitting: Sequence[RaceCandidate], champion: Runner) -> RaceCandidate:
        """Return the candidate with the largest expected gain per second, or the first of those that are named.

        What was decided for this graph elsewhere comes first, then what won at other sizes.
        """
        if self.named or fitting[0] in self.offered:
            return fitting[0]
        known = [candidate for candidate in fitting if candidate.name in self.winners]
        return max(known or fitting, key=lambda each: self.gain(each, champion) / self.predicted_s(each))

    @property
    def winners(self) -> frozenset[str]:
        """The names of the candidates that won at other sizes."""
        return frozenset(map(step_of, self.request.winners))

    def options(self, candidate: RaceCandidate, champion: Runner) -> Options:
        """Return the options with which the candidate is compiled: merged onto those of Inductor's best, if it is."""
        row = self.best_row if champion.row.compiler else champion.row
        return merged(row.options if candidate.over and row else {}, candidate)

    def why_not(self, candidate: RaceCandidate, champion: Runner) -> Reason | None:
        """Return why the candidate is skipped against this champion, None if it is not."""
        options = self.options(candidate, champion)
        if why := self._unfit(candidate, options):
            return Reason(Skipped.UNFIT, why)
        compiled = [row for row in self.rows if row.status != "skipped" and row.name != EAGER]
        if equal := [row.name for row in compiled if row.options == options and row.compiler == candidate.compiler]:
            again = Skipped.ITSELF if equal[0] == candidate.name else Skipped.RACED
            return Reason(again, f"it would be {equal[0]} again")
        predicted = self.predicted_s(candidate)
        if why := self._gains_little(candidate, champion, predicted):  # which more time would not change
            return Reason(Skipped.GAIN, why)
        if self.budget.over:
            return Reason(Skipped.BUDGET, self.budget.is_spent)
        if predicted > self.budget.left_s:
            gain = self.gain(candidate, champion) if self.base else 0.0
            worth = f"; it could save {gain:.0%}, so raise budget_s" if gain >= WORTH_A_LARGER_BUDGET else ""
            # Rounded apart, so that the first figure is the larger one.
            needed, left = math.ceil(predicted * 10) / 10, math.floor(self.budget.left_s * 10) / 10
            why = f"it is predicted to exceed the budget: about {needed:g} s of compiling, {left:g} s are left{worth}"
            return Reason(Skipped.BUDGET, why)
        if "precision" in options and isinstance(self.checks.precise, str):
            return Reason(Skipped.UNFIT, f"its error cannot be measured in float64: {self.checks.precise}")
        return None

    def _gains_little(self, candidate: RaceCandidate, champion: Runner, predicted: float) -> str:
        """Return why the candidate is not worth its time, or ""; what is named, or has won elsewhere, always is."""
        known = candidate in self.offered or candidate.name in self.winners
        if self.named or self.settings.objective == "memory" or known:
            return ""
        gain = self.gain(candidate, champion)
        if gain < LEAST_GAIN:
            return f"it could save {max(gain, 0):.1%} at most"
        if self.settings.effort == "quick" and gain < LEAST_GAIN_PER_S * predicted:
            return f"it could save {gain:.1%}, for about {predicted:.0f} s of compiling"
        return ""

    def _unfit(self, candidate: RaceCandidate, options: Options) -> str:
        """Return why the candidate has no effect here, or ""."""
        if candidate.compiler:
            return why_not_raced(candidate, self.stats, frozen=self.request.frozen)
        if candidate.name == UNFROZEN and not self.stats.frozen:
            return "no parameter is frozen here"
        if candidate.name == PADDED and padded_in([each.gm for each in self.compiles.lowered]):
            return "Inductor has padded all products by itself"
        limits = self.context.limits(with_users(options, self.context.fixed))
        inert = {name: limit.reason for name, limit in limits.items()}
        inert |= dict.fromkeys(standing(self.context.fixed, options), "your options set it otherwise")
        if candidate.options and all(name in inert for name in candidate.options):
            return f"it can do nothing here: {next(iter(inert[name] for name in candidate.options))}"
        return ""

    def predicted_s(self, candidate: RaceCandidate) -> float:
        """Return the predicted seconds to compile and tune, from the time that default took."""
        return candidate.costs.seconds(max(self.default_s, LEAST_COMPILE_S), self.stats)

    def gain(self, candidate: RaceCandidate, champion: Runner) -> float:
        """Return the share of the champion's time that the candidate may save, from what such options saved before."""
        if candidate.gain is not None:
            return candidate.gain
        if self.base is None:  # default fails or is wrong, so there is no slack to compute from
            return 1.0
        seconds, slack = self.base
        saved_s = slack.saves(candidate.shares) + candidate.saved_s
        return 1 - (seconds - saved_s) / (champion.row.seconds or seconds)

    def extend(self, runner: Runner) -> None:
        """Let the next candidates extend the options of this one, and measure its slack."""
        self.best_row = runner.row
        self.learn_slack(runner)

    def learn_slack(self, runner: Runner) -> None:
        """Measure the slack of a compiled candidate, since the next candidates extend its options."""
        row = runner.row
        if row.status != "pass" or row.seconds is None or self.named or self.budget.over:
            return
        if "precision" in row.options and self.base is not None:
            self.base = row.seconds, self.base[1].scaled(row.seconds / self.base[0])
            return
        try:
            if self.library is None:
                self.library = time_library(self.stats.products, self.device)
            slack = slack_of(runner.call, row.seconds, self.stats, self.library, self.device)
            self.base = row.seconds, slack
            logger.info("%s could save at most %s of %.3g s", row.name, slack, row.seconds)
        except Exception as error:  # noqa: BLE001 - without the slack, the race goes on in the table's order
            logger.info("The slack of %s is unknown: %s", row.name, measure.status_of(error)[1])
