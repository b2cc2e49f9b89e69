"""The least time that a device needs for a graph, and how much of a call could still be saved."""

import math
from dataclasses import replace

import pytest
import torch

from backend_kwargs import measure
from backend_kwargs.auto import roofline
from backend_kwargs.auto.graph_stats import Product, observed_stats
from backend_kwargs.auto.roofline import Ceilings, Slack, slack_of, time_library
from tests.auto.graphs import TOLD

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CEILINGS = Ceilings(copy=4.0, fill=5.0, half=100.0, single=10.0)  # bytes and flops per second


def facts_of(run, **changes):
    return replace(observed_stats(run, lambda seen: 0.0, **TOLD)[1], **changes)


def product(flops=0.0, nbytes=0.0, activations=0.0, itemsize=2, count=1, written=0.0):
    return Product("mm", count, flops, nbytes, activations, itemsize, (torch.mm, (), {}), written=written)


@pytest.mark.parametrize(
    ("expected", "seconds"),
    [
        pytest.param({"bytes_read": 10}, 2.0, id="read"),
        pytest.param({"bytes_read": 8, "bytes_written": 8}, 4.0, id="copied"),
        pytest.param({"bytes_read": 10, "bytes_written": 5}, 3.5, id="mostly read"),
        pytest.param({"bytes_read": 10, "flops": 300}, 3.0, id="computed"),
        pytest.param({"bytes_read": 10, "device": "cpu"}, 0.0, id="on a CPU"),
    ],
)
def test_the_limit(monkeypatch, expected, seconds):
    """The limit is the larger of two, with the bandwidths of reading and copying."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: CEILINGS)
    assert roofline.limit_of(facts_of(lambda: None, **{"device": "cuda"} | expected), CUDA) == seconds


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
        pytest.param(product(flops=1.0, nbytes=12.0, written=6.0), 3.0, id="waits for memory"),
        pytest.param(product(flops=1.0, nbytes=12.0, written=1.0), 2.5, id="mostly reads"),
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
    assert slack_of(pytest.fail, 2.0, facts_of(lambda: None, opaque=True), {}, CPU) == Slack(2.0, 2.0, 2.0, 2.0)


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


def test_what_padding_could_save(monkeypatch):
    """Only products whose rows are unaligned count for padding, however far others are from their least time."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(measure, "device_seconds", lambda call, device: 20.0)
    aligned, unaligned = product(flops=300.0), replace(product(flops=300.0), layout="unaligned", unaligned=True)
    facts = facts_of(lambda: None, device="cuda", products=(aligned, unaligned))
    slack = slack_of(pytest.fail, 20.0, facts, {aligned: 9.0, unaligned: 5.0}, CUDA)
    assert (slack.library, slack.unaligned) == (8.0, 2.0)


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


def test_slack_in_words():
    """Each part in microseconds, with its name."""
    slack = Slack(launches=1e-6, library=2.25e-5, generated=3e-3)
    assert str(slack) == "1.0 µs (launches), 22.5 µs (library), 3000.0 µs (generated)"


def test_slack_of_faster_kernels():
    """Kernels that take half the time leave half to save; the gaps between them stay."""
    assert Slack(1.0, 10.0, 100.0, 4.0).scaled(0.5) == Slack(1.0, 5.0, 50.0, 2.0)


def test_seconds_of_traffic(monkeypatch):
    """Bytes at the speed of a copy on a GPU; on a CPU the speed is not known, and a rewrite saves by its share."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: CEILINGS)
    assert (roofline.seconds_of_traffic(12.0, CUDA), roofline.seconds_of_traffic(12.0, CPU)) == (3.0, 0.0)


@pytest.mark.parametrize(("itemsize", "seconds"), [(1, 2.0), (2, 2.0), (3, 20.0), (4, 20.0), (8, 20.0)])
def test_the_peak_of_a_dtype(itemsize, seconds):
    """Two bytes or fewer run at the speed of bf16, more at that of fp32."""
    assert CEILINGS.product_s(product(flops=200.0, itemsize=itemsize)) == seconds


def test_a_launch_takes_two_microseconds():
    """So many for each operator of a graph on a CPU."""
    facts = facts_of(lambda: None, ops=5)
    assert slack_of(pytest.fail, 1.0, facts, {}, CPU) == Slack(pytest.approx(1e-5), 0.0, 1.0)


@pytest.mark.parametrize(
    ("dtype", "zeros"),
    [
        pytest.param(torch.float32, False, id="fp32"),
        pytest.param(torch.bfloat16, False, id="bf16"),
        pytest.param(torch.float8_e4m3fn, True, id="fp8"),
    ],
)
def test_numbers_of_a_timed_kernel(dtype, zeros):
    """Random ones; zeros where a dtype of eight bits has no random numbers."""
    seen = []
    meta = torch.empty(64, dtype=dtype, device="meta")
    time_library([replace(product(), call=(seen.append, (meta,), {}))], CPU)
    assert bool((seen[0].float() == 0).all()) is zeros


def test_a_graph_on_the_limit_of_flops_or_bytes(monkeypatch):
    """A byte that is only read or only written moves at the speed of a fill, one that is turned over at a copy's."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: CEILINGS)
    facts = facts_of(lambda: None, device="cuda", bytes_read=5.0, bytes_written=10.0)
    assert roofline.limit_of(facts, CUDA) == 10 / 4 + 5 / 5
    assert roofline.limit_of(replace(facts, flops=1000.0), CUDA) == 10.0


def test_activations_of_products_that_run_more_than_once(monkeypatch):
    """What each passes through memory counts as often as it runs."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(measure, "device_seconds", lambda call, device: 40.0)
    kernel = product(flops=300.0, activations=12.0, count=3)
    facts = facts_of(lambda: None, device="cuda", products=(kernel,))
    assert slack_of(pytest.fail, 50.0, facts, {kernel: 4.0}, CUDA) == Slack(10.0, 3.0, 40.0 - 12.0 - 9.0)


def test_no_more_excess_than_the_device_works(monkeypatch):
    """Eager's kernels may take longer than the whole compiled call."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(measure, "device_seconds", lambda call, device: 2.0)
    kernel = product()
    facts = facts_of(lambda: None, device="cuda", products=(kernel,))
    assert slack_of(pytest.fail, 3.0, facts, {kernel: 9.0}, CUDA) == Slack(1.0, 2.0, 0.0)
