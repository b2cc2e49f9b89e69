"""Every case of the suite, in one table."""

import copyreg
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from benchmarks.workloads.case import Case
from benchmarks.workloads.cases import attention, elementwise, gemm, libraries, models, norms, optimizer, segments

CASES: dict[str, Case] = {
    case.name: case
    for module in (gemm, norms, attention, elementwise, optimizer, segments, models, libraries)
    for case in module.CASES
}


def _reduced(case: Case) -> tuple[Callable[..., Case], tuple[Any, ...]]:
    # A case of the table is pickled by name, since `build` may be a lambda.
    if CASES.get(case.name) is case:
        return _case_of_table, (case.name,)
    return Case, tuple(getattr(case, each.name) for each in fields(Case))


def _case_of_table(name: str) -> Case:
    return CASES[name]


copyreg.pickle(Case, _reduced)
