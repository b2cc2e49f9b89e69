"""Inductor's tuning: the kernels to choose from, and how it times them."""

from contextlib import AbstractContextManager

from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.select_algorithm import ExternKernelChoice
from torch._inductor.virtualized import V

TIMERS = ("benchmark_gpu", "benchmark_cpu")  # the methods with which `benchmarker` times a kernel


def choices_replaced(choices: InductorChoices) -> AbstractContextManager[object]:
    """Let this thread choose kernels by `choices`, until the context is left."""
    # Inductor makes the choices of a thread once, by the option's value at that moment, and keeps them.
    with config.patch(inductor_choices_class=None):
        V.choices  # noqa: B018
    return V.set_choices_handler(choices)  # type: ignore[no-any-return]
