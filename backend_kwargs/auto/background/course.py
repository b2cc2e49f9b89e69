"""The steps of a race in the background: what is raced next, and who takes over."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from backend_kwargs.auto.background.following import Following
from backend_kwargs.auto.background.lowering import NO_WORKER, Lowerings
from backend_kwargs.auto.candidates import RaceCandidate, toggled
from backend_kwargs.auto.compiling import Candidate
from backend_kwargs.auto.head_to_head import Runner
from backend_kwargs.auto.race import Race
from backend_kwargs.facts.background import Timeline
from backend_kwargs.facts.decision import DEFAULT, EAGER, RaceRow
from backend_kwargs.options.layers import Options

TRIES = 5  # slices in which the tuning of one candidate may go on

Ready: TypeAlias = Callable[[], bool]
Steps: TypeAlias = Generator[Ready | None, None, None]  # yields what it waits for, None for nothing


@dataclass
class Course:
    """One race: `champion` is the best up to now, `challenger` what is raced against it; `serve(best)` switches."""

    race: Race
    lowerings: Lowerings
    timeline: Timeline
    eager: Runner
    champion: Runner
    serve: Callable[[Runner], None]
    following: Following
    challenger: Runner | None = None
    made: Candidate | None = None  # what the last candidate was compiled to
    chosen_for: Runner | None = None  # whose options the candidates that workers lower extend

    @property
    def runners(self) -> list[Runner]:
        """Who may be called in the next step."""
        return [each for each in (self.eager, self.champion, self.challenger) if each is not None]

    def steps(self) -> Steps:
        """Race: after each step, yield what the next one waits for."""
        selection, ahead = self.race.selection, self.race.compiles.ahead
        if self.challenger is not None:  # default was compiled in the first call
            yield from self._timed(self.challenger)
            yield from self._toggled(selection.default, self.made)
        else:
            yield from self._met(selection.default)
        if not any(row.name == DEFAULT and row.status == "pass" for row in self.race.rows):
            return
        yield lambda: not self.following.waits()
        left = self._left()
        yield None
        while left:
            if self.chosen_for is not self.champion:
                self.chosen_for = self.champion
                ahead.choose_again()
                yield None
            ahead.lower_chosen()
            known = {id(each): self.lowerings.why_not(each, self.champion) for each in left}
            fitting = [each for each in left if not known[id(each)]]
            if not fitting:
                for each in left:
                    row = RaceRow(each.name, dict(each.options), "skipped", known[id(each)], compiler=each.compiler)
                    self.race.rows.append(row)
                break
            yield lambda: any(self._settled(each) for each in fitting)  # noqa: B023 - called before the next round
            lowered = [each for each in fitting if self._settled(each)]
            if lowered := [each for each in lowered if not self.lowerings.why_not(each, self.champion)]:
                following = selection.first_of(lowered, self.champion)
                left.remove(following)
                yield from self._met(following)
        yield None
        self.champion = self.race.not_slower(self.champion, self.eager)
        self.serve(self.champion)

    def _left(self) -> list[RaceCandidate]:
        """Return the candidates to race: after that of a graph of equal code, those that its winner consists of."""
        candidates = [each for each in self.race.selection.candidates(self.champion) if each.name != EAGER]
        parts = self.following.parts(candidates)
        if (leader := self.following.leader) is not None and leader.decision is not None:
            why = f"a graph of equal code chose {leader.decision.winner}"
            self.timeline.note(why)
            others = [each for each in candidates if each not in parts]
            self.race.rows += [RaceRow(e.name, dict(e.options), "skipped", why, compiler=e.compiler) for e in others]
            request = self.race.request  # whatever their predicted gain is, they are raced
            winners = request.winners | {each.name for each in parts}
            self.race.request = self.race.selection.request = replace(request, winners=winners)
        return [*parts]

    def _settled(self, candidate: RaceCandidate) -> bool:
        return self.lowerings.settled(candidate, self.champion)

    def _met(self, candidate: RaceCandidate) -> Steps:
        """Load and check a candidate once it is lowered, and time it against the leader, with CUDA graphs and without.

        The better of the two serves from then on.
        """
        options = self.race.selection.options(candidate, self.champion)
        yield lambda: self._settled(candidate)
        if (job := self.lowerings.job(candidate, self.champion)) is None or job.reason:
            reason = job.reason if job else NO_WORKER
            self.race.rows.append(RaceRow(candidate.name, options, "skipped", reason))
            self.timeline.note(f"{candidate.name} is refused: {reason}")
            return
        self.timeline.note(f"{candidate.name} was compiled by a worker")
        yield from self._compared(candidate, options, partial(self.race.compiles.compile, options))
        yield from self._toggled(candidate, self.made)

    def _toggled(self, candidate: RaceCandidate, made: Candidate | None) -> Steps:
        """Race a candidate's code with CUDA graphs if it had none, otherwise without, if that is worth it."""
        if made is None or not made.has_other:
            return
        options = toggled(made.options)
        if step := self.race.selection.other(candidate, options, self.champion):
            yield from self._compared(step, options, partial(self.race.compiles.other, made))

    def _compared(self, candidate: RaceCandidate, options: Options, make: Callable[[], Candidate]) -> Steps:
        """Load, check and time one candidate; the better one serves from then on."""
        rows = self.race.rows
        for left in reversed(range(TRIES)):
            self.challenger = yield from self.race.preparing(candidate, options, self.champion, make)
            # The slice ended while kernels were tuned: those tuned stay so, and the rest follows.
            if self.challenger is not None or rows[-1].status != "timeout" or not left:
                break
            rows.pop()
            yield None
        self.made = self.challenger.made if self.challenger is not None else None
        if self.challenger is None:
            self.timeline.note(f"{candidate.name} is refused: {rows[-1].status}: {rows[-1].reason}")
            return
        yield None
        yield from self._timed(self.challenger)

    def _timed(self, challenger: Runner) -> Steps:
        leader, self.made = self.champion, challenger.made
        best = self.race.better(challenger, leader)
        ratio = challenger.row.speedup
        shown = f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "not timed"
        self.timeline.note(f"{challenger.row.name} was checked and timed: {shown} over {leader.row.name}")
        self.challenger = None
        self.champion = best
        self.serve(best)
        yield None
