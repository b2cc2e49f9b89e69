"""Which candidate of a race is next: what each could save, how long it takes, and why the others are skipped."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch
from torch.fx import GraphModule

from backend_kwargs import measure
from backend_kwargs.auto.budget import Budget
from backend_kwargs.auto.candidates import (
    AGAIN,
    CUDAGRAPHS,
    GRAPHS_FIRST,
    PADDED,
    PRODUCT_S,
    TUNED_PRODUCTS,
    UNFROZEN,
    RaceCandidate,
    candidates_for,
    merged,
    precision_candidates,
    why_not_raced,
)
from backend_kwargs.auto.graph_stats import GraphStats, Product, padded_in
from backend_kwargs.auto.head_to_head import Runner
from backend_kwargs.auto.products import after_tuning, candidate_of_products
from backend_kwargs.auto.request import Request, Tools
from backend_kwargs.auto.result_checks import ResultChecks
from backend_kwargs.auto.rewritten import candidates_of_rewrites, lowered_anew
from backend_kwargs.auto.roofline import (
    Slack,
    excess_of,
    gain_without_graphs,
    idle_share,
    seconds_of_traffic,
    slack_of,
    time_library,
)
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.facts.decision import DEFAULT, EAGER, RaceRow
from backend_kwargs.graphs.replay import Task
from backend_kwargs.options.layers import Options, standing, with_users
from backend_kwargs.rewrites.table import find_rewrite
from backend_kwargs.torch_internals.tensors import has_static_address

logger = logging.getLogger("backend_kwargs.auto")

LEAST_GAIN = 0.03  # a candidate that cannot gain this much is skipped
LEAST_GAIN_PER_S = 0.003  # so is one that gains less per second of compiling, unless effort is "full"
WORTH_A_LARGER_BUDGET = 0.1
LEAST_COMPILE_S = 0.5  # assumed for default, whose own compile is faster when it hits Inductor's cache
OVER_BUDGET = "it is predicted to exceed the budget"
MANY_CALLS = 100  # that must fit into what is left to measure how long a call leaves the device idle
# Of an eager call: where the device is idle for longer, CUDA graphs are compiled first. Where default is predicted to
# take more than half of the budget to compile, nothing is compiled after it: then they are if their copies cost little,
# and otherwise if the device is idle for less. (Such graphs also have more launches than the driver queues ahead, about
# 1000, so that the device is idle for longer than it seems.)
IDLE, LITTLE_IDLE = 0.2, 0.1
OP_S = 0.03  # predicted for the first compile, per operator: the median of ten models, 0.018 to 0.075 (16 cores)


@dataclass
class Selection:
    """What is known of a race's candidates: its subject, then what has been measured up to now.

    `rows` are those of the race and `lowered` the graphs that default was lowered to; its compile took `default_s`.
    `library` has the seconds of each library kernel. `base` belongs to the candidate whose options the next ones
    extend: its seconds and its slack. `best_row` is the fastest of Inductor's. `before_graphs` are the options and
    `base` of a candidate that has lost to a rewrite with CUDA graphs, for which graphs alone may be the reason.
    """

    request: Request
    task: Task
    stats: GraphStats
    device: torch.device
    budget: Budget
    checks: ResultChecks
    rows: list[RaceRow]
    default_s: float = 0.0
    library: dict[Product, float] | None = None
    lowered: list[GraphModule] = field(default_factory=list)
    base: tuple[float, Slack] | None = None
    best_row: RaceRow | None = None
    before_graphs: tuple[Options, float, Slack] | None = None

    @property
    def settings(self) -> RaceSettings:
        """The options of the race."""
        return self.request.settings

    @property
    def tools(self) -> Tools:
        """What the race has from its compiler."""
        return self.request.tools

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
        return not self.stats.dynamic and not self._unfit(GRAPHS_FIRST, CUDAGRAPHS)

    def graphs_first(self, eager: Runner) -> bool:
        """Return whether CUDA graphs are compiled before default: eager waits for launches, or only one compile fits.

        CUDA graphs run default's kernels, and compiling both takes nearly twice as long as one of them.
        """
        # Random graphs are checked against default.
        if self.stats.random or not self.may_have_graphs:
            return False
        alone = OP_S * self.stats.ops > self.budget.seconds / 2
        if alone and self._copies_take_little(self.budget.call_s):
            return True
        if not self.budget.allows(MANY_CALLS):
            return False
        idle = idle_share(eager.call, self.device)
        logger.info("Eager leaves the device idle for %.0f%% of a call.", 100 * idle)
        return idle >= (LITTLE_IDLE if alone else IDLE)

    @cached_property
    def graphs(self) -> RaceCandidate:
        """CUDA graphs as the first candidate, with the rewrites that seldom lose: it may be the only one."""
        early = tuple(name for name in self.tools.rewrites if self.stats.gpu and find_rewrite(name).early)
        names = [name for rewrite in self._matching(early) for name in rewrite.options["rewrites"]]
        return replace(GRAPHS_FIRST, options={**CUDAGRAPHS, "rewrites": names}) if names else GRAPHS_FIRST

    def _default_later(self, champion: Runner) -> list[RaceCandidate]:
        """Return default as a candidate if CUDA graphs came first."""
        if champion.candidate is not self.graphs:
            return []
        eager_s = next(row.seconds for row in self.rows if row.name == EAGER)
        gain = 1.0
        if self.base is not None and eager_s is not None:
            gain = gain_without_graphs(*self.base, eager_s, self.stats, self.device)
        return [RaceCandidate(DEFAULT, over=False, complexity=0, costs=AGAIN, gain=gain)]

    def _with_graphs(self, rewrite: RaceCandidate, call_s: float) -> RaceCandidate:
        """Return the rewrite with CUDA graphs, if copies take little of `call_s` and none have been tried yet.

        Its operators are called from Python, so that it may lose for its launches alone.
        """
        tried = any(row.options.get("triton.cudagraphs") for row in self.rows)
        calls = find_rewrite(rewrite.name).operators
        if tried or not calls or not self.may_have_graphs or not self._copies_take_little(call_s):
            return rewrite
        return replace(rewrite, options={**CUDAGRAPHS, **rewrite.options})

    def _copies_take_little(self, call_s: float) -> bool:
        """Return whether CUDA graphs copy inputs that may move, and results, in a small part of `call_s`.

        Of a graph that changes its inputs torch records nothing, in most cases.
        """
        tensors = [value for value in self.request.example_inputs if isinstance(value, torch.Tensor)]
        moving = sum(tensor.nbytes for tensor in tensors if not has_static_address(tensor))
        copies_s = seconds_of_traffic(2 * (self.stats.bytes_written + moving), self.device)
        return not self.stats.writes and copies_s < LEAST_GAIN * call_s

    # ---- all candidates

    def candidates(self, champion: Runner) -> list[RaceCandidate]:
        """Return what may be raced against the first champion: steps, rewrites, precisions and other compilers."""
        settings, frozen = self.settings, self.request.frozen
        steps = candidates_for(self.stats, settings.effort, settings.candidates, self.tools.options_of, frozen=frozen)
        compilers = [step.name for step in steps if step.compiler]
        precise = precision_candidates(settings.precision, settings.max_error, compilers)
        if any(row.name == GRAPHS_FIRST.name for row in self.rows):
            steps = [step for step in steps if step.name != GRAPHS_FIRST.name]
        rewrites = [] if self.named or self.budget.over else self._matching(self.tools.rewrites)
        call_s = champion.row.seconds or self.budget.call_s
        rewrites = [self._with_graphs(rewrite, call_s) for rewrite in rewrites]
        return [*self._default_later(champion), *self._tunings(), *steps, *rewrites, *precise]

    def _tunings(self) -> list[RaceCandidate]:
        """Return the tuning of the products that are far from what they need, on a GPU."""
        if self.device.type != "cuda" or self.named or self.base is None or self.library is None:
            return []
        excess, least_s = excess_of(self.library, self.device), LEAST_GAIN_PER_S * PRODUCT_S * self.base[0]
        tuning = candidate_of_products(excess, least_s, lambda tuning: self.predicted_s(tuning) <= self.budget.left_s)
        return [tuning] if tuning else []

    def _matching(self, names: Sequence[str]) -> list[RaceCandidate]:
        """Return those of the rewrites `names` that match."""
        if not names:
            return []

        @cache
        def lowered() -> list[GraphModule]:
            again = replace(self.request, graph=replace(self.request.graph, gm=self.task.copy()))
            return self.lowered or lowered_anew(again)

        traced = self.task.copy(), self.request.example_inputs
        return candidates_of_rewrites(names, self.stats, self.settings.objective, lowered, traced, self.device)

    # ---- one candidate

    def first_of(self, fitting: Sequence[RaceCandidate], champion: Runner) -> RaceCandidate:
        """Return the candidate with the largest expected gain per second, or the first of those that are named."""
        if self.named:
            return fitting[0]
        return max(fitting, key=lambda candidate: self.gain(candidate, champion) / self.predicted_s(candidate))

    def options(self, candidate: RaceCandidate, champion: Runner) -> Options:
        """Return the options with which the candidate is compiled: merged onto those of Inductor's best, if it is."""
        if self.before_graphs and candidate.options == CUDAGRAPHS:
            return merged(self.before_graphs[0], candidate)
        row = self.best_row if champion.row.compiler else champion.row
        return merged(row.options if candidate.over and row else {}, candidate)

    def why_not(self, candidate: RaceCandidate, champion: Runner) -> str:
        """Return why the candidate is skipped against this champion, "" if it is not."""
        options = self.options(candidate, champion)
        if why := self._unfit(candidate, options):
            return why
        compiled = [row for row in self.rows if row.status != "skipped" and row.name != EAGER]
        if equal := [row.name for row in compiled if row.options == options and row.compiler == candidate.compiler]:
            return f"it would be {equal[0]} again"
        if self.budget.over:
            return self.budget.is_spent
        if (predicted := self.predicted_s(candidate)) > self.budget.left_s:
            gain = self.gain(candidate, champion) if self.base else 0.0
            worth = f"; it could save {gain:.0%}, so raise budget_s" if gain >= WORTH_A_LARGER_BUDGET else ""
            # Rounded apart, so that the first figure is the larger one.
            needed, left = math.ceil(predicted * 10) / 10, math.floor(self.budget.left_s * 10) / 10
            return f"{OVER_BUDGET}: about {needed:g} s of compiling, {left:g} s are left{worth}"
        if "precision" in options and isinstance(self.checks.precise, str):
            return f"its error cannot be measured in float64: {self.checks.precise}"
        if self.named or self.settings.objective == "memory":
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
        if candidate.name == PADDED and padded_in(self.lowered):
            return "Inductor has padded all products by itself"
        limits = self.tools.limits(with_users(options, self.tools.fixed))
        inert = {name: limit.reason for name, limit in limits.items()}
        inert |= dict.fromkeys(standing(self.tools.fixed, options), "your options set it otherwise")
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
        if self.before_graphs and candidate.options == CUDAGRAPHS and champion.row.seconds:
            _, seconds, slack = self.before_graphs
            return 1 - (seconds - slack.saves(candidate.shares)) / champion.row.seconds
        if self.base is None:  # default fails or is wrong, so there is no slack to compute from
            return 1.0
        seconds, slack = self.base
        saved_s = slack.saves(candidate.shares) + candidate.saved_s
        return 1 - (seconds - saved_s) / (champion.row.seconds or seconds)

    def extend(self, runner: Runner) -> None:
        """Let the next candidates extend the options of this one, and measure its slack."""
        under, options = self.best_row, runner.row.options
        joined = "rewrites" in options and "triton.cudagraphs" in options
        if joined and self.base and under and "triton.cudagraphs" not in under.options:
            self.before_graphs = under.options, *self.base
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
            elif (names := row.options.get(TUNED_PRODUCTS)) and self.base is not None:
                self.library = after_tuning(self.library, names, self.base[0] - row.seconds)
            slack = slack_of(runner.call, row.seconds, self.stats, self.library, self.device)
            self.base = row.seconds, slack
            logger.info("%s could save at most %s of %.3g s", row.name, slack, row.seconds)
        except Exception as error:  # noqa: BLE001 - without the slack, the race goes on in the table's order
            logger.info("The slack of %s is unknown: %s", row.name, measure.status_of(error)[1])
