"""The gate of a pipeline: whether a comparison's fastest candidate is surely so much faster than another one."""

from collections.abc import Sequence
from dataclasses import dataclass

from backend_kwargs.compare.document import speedup_over
from backend_kwargs.compare.rows import Comparison
from backend_kwargs.errors import unknown

DEFAULT = "default"  # as `--fail-below` calls torch.compile without a mode
DEFAULTS = ("default", "inductor", "tmpl-inductor", "tmpl-inductor:default")  # candidates that are that


@dataclass(frozen=True, slots=True)
class Judged:
    """Whether the lower end of the interval reaches the limit, and the sentence that says so."""

    passed: bool
    text: str


def label_of(over: str, labels: Sequence[str]) -> str:
    """Return the label of what `over` names, DEFAULT if no candidate is that; raise for another name."""
    if over in labels:
        return over
    if over == DEFAULT:
        return next((label for label in DEFAULTS if label in labels), DEFAULT)
    raise unknown("name of --fail-below", over, [*labels, DEFAULT], otherwise="It is one of --backends, or 'default'.")


def judge(comparison: Comparison, over: str, least: float) -> Judged:
    """Judge the fastest candidate with right results, other than eager and `over`, by its speedup over `over`."""
    rows = {row.label: row for row in comparison.rows}
    if not rows[over].samples:
        return Judged(False, f"{over} was not timed ({rows[over].status}), so that no speedup over it can be judged.")
    ran = (row for row in comparison.rows if row.status in ("pass", "unknown") and row.samples)
    able = [row for row in ran if row.backend != "eager" and row.label != over]
    fastest = min(able, key=lambda row: row.latency.median if row.latency else 0.0, default=None)
    speedup = speedup_over(fastest, rows[over]) if fastest else None
    if fastest is None or speedup is None:
        return Judged(False, f"No candidate besides {over} and eager passed, so that no speedup can be judged.")
    passed = speedup.low >= least
    limit = f"at least {least:g}x is asked for" if passed else f"its lower end is below {least:g}x"
    return Judged(passed, f"{fastest.label} is {speedup.as_ratio(3)} over {over}: {limit}.")
