"""How Inductor times kernels."""

from torch._inductor.runtime.benchmarking import benchmarker

TIMERS = ("benchmark_gpu", "benchmark_cpu")  # the methods with which `benchmarker` times a kernel
