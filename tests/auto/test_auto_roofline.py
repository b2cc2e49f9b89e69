"""The least time that a device needs for a graph, and how much of a call could still be saved."""

import math
from dataclasses import replace

import pytest
import torch
from graphs import TOLD

from backend_kwargs import measure
from backend_kwargs.compilers.auto import roofline
from backend_kwargs.compilers.auto.graph_stats import Product, observed_stats
from backend_kwargs.compilers.auto.roofline import Ceilings, Slack, slack_of, time_library

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CEILINGS = Ceilings(copy=4.0, fill=5.0, half=100.0, single=10.0)  # bytes and flops per second


def facts_of(run, **changes):
    return replace(observed_stats(run, lambda seen: 0.0, **TOLD)[1], **changes)


def product(flops=0.0, nbytes=0.0, activations=0.0, itemsize=2, count=1):
    return Product("mm", count, flops, nbytes, activations, itemsize, (torch.mm, (), {}))


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        pytest.param({"bytes_read": 10}, 2.0, id="read"),
        pytest.param({"bytes_read": 8, "bytes_written": 8}, 4.0, id="copied"),
        pytest.param({"bytes_read": 10, "bytes_written": 5}, 3.5, id="mostly read"),
        pytest.param({"bytes_read": 10, "flops": 300}, 3.0, id="computed"),
        pytest.param({"bytes_read": 10, "device": "cpu"}, 0.0, id="on a CPU"),
    ],
)
def test_the_limit(monkeypatch, told, seconds):
    """The limit is the larger of two, with the bandwidths of reading and copying."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: CEILINGS)
    assert roofline.limit_of(facts_of(lambda: None, **{"device": "cuda"} | told), CUDA) == seconds


def test_without_memory_to_measure_it_there_is_no_limit(monkeypatch):
    """If the device has no memory to measure its rates, the race continues without a limit and does not retry."""

    def full(device):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(roofline, "_measured", full)
    facts = facts_of(lambda: None, device="cuda", bytes_read=10.0)
    assert roofline.limit_of(facts, torch.device("cuda:7")) == 0


@pytest.mark.parametrize(
    ("kernel", "seconds"),
    [
        pytest.param(product(flops=200.0, nbytes=4.0), 2.0, id="computes in bf16"),
        pytest.param(product(flops=200.0, nbytes=4.0, itemsize=4), 20.0, id="computes in fp32"),
        pytest.param(product(flops=1.0, nbytes=12.0), 3.0, id="waits for memory"),
    ],
)
def test_the_least_seconds_of_a_library_kernel(kernel, seconds):
    """The least time of a library kernel is that of its flops in its dtype or of its bytes, whichever is longer."""
    assert CEILINGS.product_s(kernel) == seconds


def test_shares_of_slack_add_up():
    """A candidate saves its share of each part of the slack that it names."""
    slack = Slack(launches=1.0, library=10.0, generated=100.0)
    assert (slack.saves({}), slack.saves({"launches": 0.5, "generated": 0.1})) == (0.0, 10.5)


def test_slack_on_a_cpu():
    """Each operator counts as one launch, library kernels as their own time, and the rest as generated kernels."""
    kernel = product(count=2)
    facts = facts_of(lambda: torch.ones(2) + 1, products=(kernel,))
    assert facts.ops == 2
    slack = slack_of(pytest.fail, 1e-3, facts, {kernel: 1e-4}, CPU)
    assert (slack.launches, slack.library, slack.generated) == pytest.approx((2 * roofline.LAUNCH_S, 2e-4, 8e-4))


def test_no_part_of_the_slack_exceeds_the_call():
    """If eager's library kernels take longer than the whole compiled call, nothing counts as generated kernels."""
    kernel = product()
    facts = facts_of(lambda: torch.ones(2) + 1, products=(kernel,))
    assert slack_of(pytest.fail, 1e-6, facts, {kernel: 1e-4}, CPU) == Slack(1e-6, 1e-6, 0.0)


def test_an_opaque_graph_may_save_all():
    """All time of a graph with a higher-order operator counts as slack, since its operators are unknown."""
    assert slack_of(pytest.fail, 2.0, facts_of(lambda: None, opaque=True), {}, CPU) == Slack(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("busy", "read", "activations", "slack"),
    [
        pytest.param(8.0, 5.0, 0.0, Slack(2.0, 1.0, 4.0), id="each"),
        pytest.param(8.0, 30.0, 0.0, Slack(2.0, 1.0, 2.0), id="two seconds above the limit"),
        pytest.param(8.0, 35.0, 0.0, Slack(2.0, 1.0, 1.0), id="near the limit"),
        pytest.param(8.0, 80.0, 0.0, Slack(2.0, 1.0, 0.0), id="beyond it"),
        pytest.param(8.0, 5.0, 12.0, Slack(2.0, 1.0, 1.0), id="activations pass through memory"),
        pytest.param(12.0, 5.0, 0.0, Slack(0.0, 1.0, 6.0), id="never idle"),
    ],
)
def test_slack_on_a_gpu(monkeypatch, busy, read, activations, slack):
    """Idle time belongs to launches, a library kernel's excess to the kernel, and the rest to generated kernels."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(measure, "device_seconds", lambda call, device: busy)
    kernel = product(flops=300.0, activations=activations)  # 3 s at least, and takes 4
    facts = facts_of(lambda: None, device="cuda", bytes_read=read, products=(kernel,))
    assert slack_of(pytest.fail, 10.0, facts, {kernel: 4.0}, CUDA) == slack


def test_a_library_kernel_faster_than_its_least_takes_nothing_from_the_others(monkeypatch):
    """A library kernel faster than the measured ceiling has no slack, and does not reduce that of other kernels."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(measure, "device_seconds", lambda call, device: 8.0)
    slow, fast = product(flops=300.0), replace(product(flops=300.0), layout="fast")
    facts = facts_of(lambda: None, device="cuda", bytes_read=5.0, products=(slow, fast))
    assert slack_of(pytest.fail, 10.0, facts, {slow: 4.0, fast: 2.0}, CUDA).library == 1.0


def refused(x):
    raise RuntimeError("planted")


def test_library_kernels_are_timed_alone():
    """Each layout of a library kernel is timed once; kernels that take indices or cannot run alone are left out."""
    x, narrow = torch.randn(64, 64), torch.ones(32, 32, dtype=torch.int8)

    def run():
        for _ in range(3):
            torch.mm(x, x)
        torch.mm(x, x.t())
        torch._int_mm(narrow, narrow)

    products = facts_of(run).products
    assert [each.count for each in products] == [3, 1, 1]
    broken = replace(products[0], layout="broken", call=(refused, (torch.empty(1, device="meta"),), {}))
    timed = time_library((*products, broken), CPU)
    assert list(timed) == list(products[:2])
    assert all(0 < seconds < 1 for seconds in timed.values())


def test_a_library_kernel_is_timed_on_numbers():
    """A library kernel is timed on random operands with the sizes and layouts of the graph: zeros draw less power."""
    seen = []
    meta = torch.empty_strided((3, 4), (1, 3), device="meta")
    time_library([replace(product(), call=(seen.append, (meta,), {}))], CPU)
    assert {(t.shape, t.stride(), t.device) for t in seen} == {((3, 4), (1, 3), CPU)}
    assert seen[0].abs().min() > 0
    assert math.isfinite(seen[0].sum())


def test_activations_are_no_inputs_of_the_graph():
    """Operands that are inputs of the graph, such as weights, are not written by another kernel; activations are."""
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    storages = {weight.untyped_storage()._cdata}
    _, facts = observed_stats(lambda: x @ weight, lambda seen: 0.0, storages, **TOLD)
    (kernel,) = facts.products
    assert (kernel.bytes, kernel.activations) == (4 * (32 + 64 + 32), 4 * (32 + 32))
