"""The checks of a candidate's results: against eager's, a reference in higher precision, or the user's bound."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch.fx import GraphModule

from backend_kwargs import trial
from backend_kwargs.auto.budget import Budget
from backend_kwargs.backends import Inputs
from backend_kwargs.errors import error_text
from backend_kwargs.facts.decision import RaceRow
from backend_kwargs.graphs.replay import Task
from backend_kwargs.options.option import Options
from backend_kwargs.precision.lowered import against, in_float64
from backend_kwargs.trial import Accuracy, Results

LARGEST_REFERENCE = 2 << 30  # bytes of inputs on a CPU; the reference takes up to four times as much memory
REFERENCES = 6  # references that must fit into a GPU's free memory, to leave room for intermediate results
SLOWER_IN_PRECISION = 10
RUN = 40  # calls of eager that one such run takes


@dataclass
class ResultChecks:
    """What results are compared with: those `expected`, and a `reference` if there is one."""

    task: Task
    random: bool  # whether the graph draws random numbers
    device: torch.device
    budget: Budget
    tolerance: float | None
    expected: Results
    reference: Results | None = None
    roundings: trial.Roundings | tuple[()] = ()
    without: str = ""  # why there is no reference
    slow: bool = False  # whether that is for time
    awaits_draws: bool = False  # whether nothing is right yet that draws as compiled code does
    is_lost: bool = False  # whether nothing ever was

    def compute_reference(self) -> None:
        """Run the graph in higher precision, if time and memory allow it."""
        on_gpu = self.device.type == "cuda"
        largest = torch.cuda.mem_get_info(self.device)[0] / REFERENCES if on_gpu else LARGEST_REFERENCE
        if self.task.inputs.aliased:  # the reference converts each tensor by itself, which separates them
            self.without = "inputs that it writes to share memory"
        elif self.task.inputs.bytes > largest:
            self.without = f"its inputs of {self.task.inputs.bytes / 2**30:.1f} GiB are too large for one"
        elif not self.budget.allows(SLOWER_IN_PRECISION):
            self.without, self.slow = f"a call in eager takes {self.budget.call_s:.2g} s", True
        else:

            def run(gm: GraphModule, args: Inputs) -> Results:
                # gm.forward, since GraphModule.__call__ prints the traceback when the graph cannot run in float64.
                inputs = replace(self.task.inputs, values=args, guard=False)  # they are copies
                return replace(self.task, inputs=inputs).observe(gm.forward)

            draws = trial.Draws(lambda: self.task.observe(self.task.copy()), self.expected, random=self.random)
            given = self.task.copy(), self.task.inputs.fresh()
            self.reference = trial.reference(*given, run=draws.given_to(run))
            with_draws = " with the random numbers that eager draws" if self.random else ""
            self.without = "" if self.reference is not None else f"it cannot be computed in float64{with_draws}"

    @cached_property
    def precise(self) -> Results | str:
        """The float64 results of the graph, the reference of lower precisions, or the reason why there are none."""
        if self.random:
            return "it draws random numbers"
        if not self.budget.allows(SLOWER_IN_PRECISION):
            return f"there is no time for it within budget_s={self.budget.seconds:g}; raise budget_s"
        try:
            return in_float64(self.task)
        except Exception as error:  # noqa: BLE001 - a kernel without float64, or no memory left
            return error_text(error)

    def of_results(self, seen: Results) -> Accuracy:
        """Check what a candidate has returned and changed."""
        if self.is_lost:
            return Accuracy("fail_accuracy", "default failed the accuracy check, so there is no result to compare with")
        how: Options = {"training": self.task.training, "tol": self.tolerance, "roundings": self.roundings}
        accuracy = trial.check_all(seen, self.expected, self.reference, **how)
        if accuracy.status != "fail_accuracy" or accuracy.rmse is None or not (lacking := self._lacking):
            return accuracy
        for_time = self.slow or (isinstance(self.roundings, trial.Roundings) and self.roundings.cut)
        return replace(
            accuracy, status="unchecked" if for_time else "uncheckable", reason=f"{accuracy.reason}; {lacking}"
        )

    @property
    def _lacking(self) -> str:
        """Why numbers that differ from eager's are not known to be wrong, "" if they are."""
        if not self.roundings or not self.roundings.lacking or not (self.roundings.cut or self.without):
            return ""
        no_reference = f"there is no float64 reference ({self.without}), and " if self.without else ""
        return f"{no_reference}{self.roundings.lacking}"

    def close(self) -> None:
        """Let go of the inputs and the results of eager, which would stay until garbage is collected."""
        if self.roundings:
            self.roundings.close()

    def of_eager(self, seen: Results) -> Accuracy:
        """Check a second run of eager against the first, before there is a reference, and prepare further ones."""
        task, drawn = self.task, self.task.drawn()

        def rounded_otherwise() -> Results:
            again = task.observe(task.copy())
            if not all(map(torch.equal, drawn, task.drawn())):
                raise RuntimeError("it draws other random numbers than eager does")
            return again

        self.roundings = trial.Roundings(rounded_otherwise, self.expected, partial(self.budget.allows, RUN))
        return trial.same_twice(seen, self.expected, training=self.task.training, tol=self.tolerance)

    def of_draws(self, seen: Results, as_eager_draws: Callable[..., object], *, last: bool) -> Accuracy:
        """Check the first candidate on a random graph, by a compile with eager's draws; then expect what it has `seen`.

        Inductor draws other random numbers than eager does. So the other candidates are checked against its results,
        within twice the errors that eager and it have by eager's draws. If it is wrong, the next one is the first, but
        for the `last`.
        """
        drawn = self.task.observe(as_eager_draws)
        accuracy = self.of_results(drawn)
        self.awaits_draws = not (accuracy.passed or last)
        if self.awaits_draws:
            return accuracy
        if self.reference is not None and self.roundings:
            for each in (self.expected, drawn):
                self.roundings.add(trial.errors(each, self.reference))
        self.expected, self.reference, self.is_lost = seen, None, not accuracy.passed
        self.without = "it draws other random numbers than eager"
        return accuracy

    def of_error(self, seen: Results, row: RaceRow) -> Accuracy:
        """Measure the error of a candidate in a lower precision, and hold it to the bound that the user gave."""
        assert not isinstance(self.precise, str)
        accuracy = against(seen, self.expected, self.precise, row.options["max_error"])
        row.error, row.max_error = accuracy.error, row.options["max_error"]
        return accuracy
