"""The programs after public reports return their results in eager and under auto, and the command names the reports."""

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.studies.public_reports import CASES, outcomes

pytestmark = pytest.mark.filterwarnings("ignore:.torch._prims_common.check:FutureWarning")
MADE_FOR = torch.__version__.startswith("2.13.")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.reports[0]} {case.fn.__name__}")
def test_auto_gives_the_right_result(case):
    """Eager and auto are right; without options torch 2.13 is wrong or refuses the program."""
    eager, plain, auto = outcomes(case)
    assert (eager, auto) == ("right", "right")
    if MADE_FOR:
        assert plain == case.plain


def test_another_number_is_an_error():
    """The error names the reports that there are."""
    result = CliRunner().invoke(app, ["public-reports", "1"])
    assert "REPORT must be one of 165409, 174371, 175154, " in str(result.exception) + result.output
