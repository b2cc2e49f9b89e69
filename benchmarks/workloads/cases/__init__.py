"""Every case of the suite, in one table."""

from benchmarks.workloads.case import Case
from benchmarks.workloads.cases import attention, elementwise, gemm, libraries, models, norms, optimizer, segments

CASES: dict[str, Case] = {
    case.name: case
    for module in (gemm, norms, attention, elementwise, optimizer, segments, models, libraries)
    for case in module.CASES
}
