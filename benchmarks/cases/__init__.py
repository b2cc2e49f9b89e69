"""Every case of the suite, in one table."""

from benchmarks.case import Case
from benchmarks.cases import attention, elementwise, gemm, models, norms, optimizer, segments

CASES: dict[str, Case] = {
    case.name: case
    for module in (gemm, norms, attention, elementwise, optimizer, segments, models)
    for case in module.CASES
}
