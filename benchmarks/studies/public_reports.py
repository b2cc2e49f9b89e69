"""Programs after public reports, which torch.compile without options gets wrong or refuses on a CPU, under `auto`.

Each program is our own, and small enough for its result to be known by hand.
"""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backend_kwargs import make_backend
from backend_kwargs.tables import as_text

PAGE = "https://github.com/pytorch/pytorch/issues"
BUDGET_S = 20.0


@dataclass(frozen=True, slots=True)
class Case:
    """A program after a report, and its result; `plain` is what torch 2.13 does without options: wrong or raises.

    The result is the gradient of the first input if that requires one, else what `fn` returns.
    """

    reports: tuple[int, ...]
    what: str
    fn: Callable[..., Tensor]
    inputs: Callable[[], Sequence[Tensor]]
    result: Any
    plain: str = "wrong"

    def outcome(self, backend: Any = None) -> str:
        """Return "right", "wrong" or "raises": compiled by `backend`, or in eager."""
        torch._dynamo.reset()
        inputs, fn = self.inputs(), torch.compile(self.fn, backend=backend) if backend else self.fn
        try:
            found = fn(*inputs)
            if inputs[0].requires_grad:
                (found,) = torch.autograd.grad(found.sum(), inputs[0])
        except Exception:  # noqa: BLE001 - each compiler refuses a graph by its own error
            return "raises"
        return "right" if torch.allclose(found, torch.tensor(self.result), rtol=1e-4) else "wrong"


@torch.library.custom_op("public_reports::reverse_into", mutates_args=("target",))
def reverse_into(source: Tensor, target: Tensor) -> None:
    """Write the elements of `source` into `target` one by one, the last one first."""
    for at in range(len(source)):
        target[len(source) - 1 - at] = source[at]


def _copied_then_changed(target: Tensor, source: Tensor) -> Tensor:
    target[:] = source[:]
    source.mul_(3)
    return target


def _scattered_slice(x: Tensor, rows: Tensor) -> Tensor:
    made = torch.slice_scatter(x, rows, 0, 1, 3)
    x.zero_()
    return made


def _scattered_diagonal(x: Tensor) -> Tensor:
    made = torch.diagonal_scatter(x, x.diagonal())
    x.fill_(-1)
    return made


def _cloned_after_fill(x: Tensor, at: Tensor) -> Tensor:
    x.index_fill_(0, at, 9)
    made = x.clone()
    x.clamp_(max=2)
    return made


def _reversed_from_a_clone(x: Tensor) -> Tensor:
    reverse_into(x.clone(), x)
    return x + 0.5


def _overlapping_rows(x: Tensor) -> Tensor:
    made = x.clone()
    made.as_strided((3, 2), (1, 1)).add_(1)
    return made


def _overlapping_windows(x: Tensor) -> Tensor:
    return (x + x).unfold(0, 3, 2).abs_()


def _floor_division(x: Tensor, y: Tensor) -> Tensor:
    return x // y


def _rounded_product(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return (x @ w).to(torch.bfloat16) + bias


def _pooled(x: Tensor) -> Tensor:
    return nn.functional.avg_pool1d(x, 3, 3, ceil_mode=True)


def _pooled_where_negative(x: Tensor, w: Tensor) -> Tensor:
    y = nn.functional.conv2d(x, w, padding=1)
    return torch.where(y > 0, y, nn.functional.max_pool2d(y, 3, 1, 1))


def _numbers(*sizes: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(sizes).numel()).reshape(sizes)


def _identity() -> Tensor:
    """Return weights by which a convolution of two channels returns its input."""
    return nn.functional.pad(torch.eye(2).reshape(2, 2, 1, 1), (1, 1, 1, 1))


CASES = (
    Case(
        (198131,),
        "`dst[:] = src[:]`, then a write to `src`",
        _copied_then_changed,
        lambda: (torch.zeros(3), _numbers(3)),
        [1.0, 2.0, 3.0],
    ),
    Case(
        (198094,),
        "`slice_scatter` of an input that is then zeroed",
        _scattered_slice,
        lambda: (_numbers(4, 2), -_numbers(2, 2)),
        [[1.0, 2.0], [-1.0, -2.0], [-3.0, -4.0], [7.0, 8.0]],
    ),
    Case(
        (198094,),
        "`diagonal_scatter` of an input that is then filled",
        _scattered_diagonal,
        lambda: (_numbers(2, 2),),
        [[1.0, 2.0], [3.0, 4.0]],
    ),
    Case(
        (198094,),
        "a clone after `index_fill_`, before another write",
        _cloned_after_fill,
        lambda: (_numbers(4), torch.tensor([1, 2])),
        [1.0, 9.0, 9.0, 4.0],
    ),
    Case(
        (198031,),
        "a custom operator that reads a clone of what it writes",
        _reversed_from_a_clone,
        lambda: (_numbers(4),),
        [4.5, 3.5, 2.5, 1.5],
    ),
    Case(
        (174371,),
        "an `as_strided` view whose rows overlap, written",
        _overlapping_rows,
        lambda: (_numbers(5),),
        [2.0, 4.0, 5.0, 5.0, 5.0],
    ),
    Case(
        (183888, 165409),
        "`abs_` of overlapping windows from `unfold`",
        _overlapping_windows,
        lambda: (_numbers(7) - 4,),
        [[6.0, 4.0, 2.0], [2.0, 0.0, 2.0], [2.0, 4.0, 6.0]],
        "raises",
    ),
    Case(
        (197895,),
        "`1.0 // 0.1`",
        _floor_division,
        lambda: (torch.tensor([1.0, 0.5, 6.0, 7.0]), torch.tensor([0.1, 0.1, 0.2, 2.0])),
        [9.0, 4.0, 29.0, 3.0],
    ),
    Case(
        (181568,),
        "a product that is rounded to bfloat16 before a bias is added",
        _rounded_product,
        lambda: (torch.ones(1, 2), torch.tensor([[256.0], [1.0]]), torch.tensor([0.5])),
        [[256.5]],
    ),
    Case(
        (175154,),
        "`interpolate` to the nearest element, by a factor of 1.3",
        lambda x: nn.functional.interpolate(x, scale_factor=1.3, mode="nearest") * 1,
        lambda: (_numbers(1, 1, 2, 7),),
        [[[[1.0, 1.0, 2.0, 3.0, 4.0, 4.0, 5.0, 6.0, 7.0], [8.0, 8.0, 9.0, 10.0, 11.0, 11.0, 12.0, 13.0, 14.0]]]],
    ),
    Case(
        (198119,),
        "the gradient of an average pool with `ceil_mode=True`",
        _pooled,
        lambda: (_numbers(1, 1, 5).requires_grad_(),),
        [[[1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2]]],
    ),
    Case(
        (185509,),
        "the gradient of a choice between a convolution and its max pool",
        _pooled_where_negative,
        lambda: (
            torch.tensor([[[[-1.0, 2.0], [3.0, -4.0]], [[5.0, -6.0], [-7.0, 8.0]]]]).requires_grad_(),
            _identity(),
        ),
        [[[[0.0, 1.0], [3.0, 0.0]], [[1.0, 0.0], [0.0, 3.0]]]],
    ),
)


def outcomes(case: Case) -> tuple[str, str, str]:
    """Return the outcome in eager, under torch.compile without options, and under `auto`."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that default failed the check, which is what the table is about
        store = str(Path(folder) / "decisions")
        auto = make_backend("tmpl-inductor:auto", candidates=[], budget_s=BUDGET_S, store=store)
        return case.outcome(), case.outcome("inductor"), case.outcome(auto)


def as_table(reports: Sequence[int] = ()) -> str:
    """Run the cases, or those of some reports, and return a row for each."""
    asked = [case for case in CASES if not reports or {*reports} & {*case.reports}]
    rows = [(", ".join(map(str, case.reports)), case.what, *outcomes(case)) for case in asked]
    return as_text(("report", "what it computes", "eager", "torch.compile", "auto"), rows)


def as_markdown() -> str:
    """Return the table of the docs."""
    lines = [
        f"| {', '.join(f'[{each}]({PAGE}/{each})' for each in case.reports)} | {case.what} | {case.plain} | right |"
        for case in CASES
    ]
    return "\n".join(["| report | what it computes | `torch.compile` | `auto` |", "|---|---|---|---|", *lines])
