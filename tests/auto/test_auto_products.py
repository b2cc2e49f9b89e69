"""Tuning only the products that are far from what they need."""

from dataclasses import replace

import pytest
import torch

from backend_kwargs.auto import products, roofline
from backend_kwargs.auto.candidates import Costs, trusted, tuning
from backend_kwargs.auto.graph_stats import Product, observed_stats
from backend_kwargs.auto.products import READING, SHARE, after_tuning, candidate_of_products
from backend_kwargs.auto.roofline import Ceilings, excess_of, time_library
from tests.auto.graphs import TOLD

CPU = torch.device("cpu")


def meta(*shape):
    return torch.empty(shape, device="meta")


def product(operator="mm", *operands, layout="", count=1):
    operands = operands or (meta(8, 16), meta(16, 32))
    return Product(f"{operator}[{layout}]", count, 99.0, 1.0, 1.0, 4, (torch.mm, operands, {}))


def always(candidate):
    return True


@pytest.mark.parametrize(
    ("made", "name"),
    [
        pytest.param(product(), "8x32x16", id="mm"),
        pytest.param(product("addmm", meta(32), meta(8, 16), meta(16, 32)), "8x32x16", id="with a bias"),
        pytest.param(product("bmm", meta(4, 8, 16), meta(4, 16, 32)), "8x32x16", id="a batch"),
        pytest.param(product("_grouped_mm", meta(8, 16), meta(4, 16, 32)), "8x32x16", id="grouped"),
        pytest.param(product("convolution", meta(2, 16, 5, 5), meta(32, 16, 3, 3), None), "50x32x16", id="convolution"),
        pytest.param(product("_int_mm"), "", id="int8"),
        pytest.param(product("convolution_backward"), "", id="a backward pass"),
        pytest.param(product("_scaled_dot_product_flash_attention"), "", id="attention"),
    ],
)
def test_names_are_those_of_inductors_sizes(made, name):
    """A product is named by its rows, columns and summands; what cannot be chosen has no name."""
    assert products._name(made) == name


SMALL, LARGE = product(layout="small"), product("mm", meta(64, 64), meta(64, 64), layout="large")
GROUPED = product("_grouped_mm", meta(8, 16), meta(4, 16, 24))


@pytest.mark.parametrize(
    ("excess", "names", "count", "saved_s"),
    [
        pytest.param({SMALL: 1.0, LARGE: 9.0}, ["64x64x64"], 1, 9.0, id="those far from what they need"),
        pytest.param({SMALL: 8.0, LARGE: 9.0}, ["64x64x64", "8x32x16"], 2, 17.0, id="both"),
        pytest.param({LARGE: 9.0, GROUPED: 0.0}, ["64x64x64", "8x24x16"], 2, 9.0, id="grouped ones in any case"),
    ],
)
def test_which_products_are_tuned(excess, names, count, saved_s):
    """Those that are expected to save the least that is asked for; grouped ones are tuned with them."""
    found = candidate_of_products(excess, SHARE * 5, always)
    assert found.options == {"max_autotune_gemm": True, "tuned_products": names}
    assert (found.costs.products, found.saved_s) == (count, pytest.approx(SHARE * saved_s))


def test_the_products_that_save_most_are_tuned():
    """Where one fits, it is the one that is expected to save most, not the one that is furthest from its limit."""
    vector, square = replace(product(layout="1"), flops=2.0, bytes=2.0), product(layout="2")
    found = candidate_of_products({square: 1.0, vector: 0.9}, 0.1, lambda each: each.costs.products == 1)
    assert found.saved_s == pytest.approx(0.9 * READING)


def test_what_waits_for_memory_gains_more_by_tuning():
    """A product of few rows is expected to lose half of what it takes beyond its bytes' time."""
    vector = replace(product(), flops=2.0, bytes=2.0)
    assert candidate_of_products({vector: 9.0}, 1.0, always).saved_s == pytest.approx(9 * READING)


@pytest.mark.parametrize(
    "excess",
    [
        pytest.param({}, id="none"),
        pytest.param({SMALL: 1.0, LARGE: 2.0}, id="near what they need"),
        pytest.param({GROUPED: 1.0}, id="grouped, near what it needs"),
        pytest.param({product("_int_mm"): 99.0}, id="not tunable"),
    ],
)
def test_nothing_is_tuned_for_little(excess):
    """There is no candidate where no product is far from what it needs."""
    assert candidate_of_products(excess, SHARE * 5, always) is None


def test_what_fits_is_tuned():
    """Where there is no time for all, those that save most are tuned."""
    found = candidate_of_products({SMALL: 8.0, LARGE: 9.0}, SHARE * 5, lambda each: each.costs.products < 2)
    assert found.options["tuned_products"] == ["64x64x64"]
    assert candidate_of_products({SMALL: 8.0}, SHARE * 5, lambda each: False) is None


def test_only_the_tuned_ones_cost_time():
    """The predicted time counts the tuned products alone."""
    stats = replace(observed_stats(lambda: None, lambda seen: 0.0, **TOLD)[1], products=(SMALL, LARGE, GROUPED))
    assert tuning(["8x32x16"], 1, 0.0).costs.seconds(10.0, stats) == pytest.approx(0.65 * 10 + 4)
    assert Costs(0.0, product_s=4.0).seconds(10.0, stats) == 12


def test_what_tuning_saved_is_saved():
    """After tuning, its products take as much less as the call does; the others take what they took."""
    assert after_tuning({SMALL: 1.0, LARGE: 3.0}, ["64x64x64"], 1.5) == {SMALL: 1.0, LARGE: 1.5}
    twice = replace(LARGE, count=2)
    assert after_tuning({twice: 3.0}, ["64x64x64"], 1.5) == {twice: pytest.approx(2.25)}
    assert after_tuning({LARGE: 3.0}, ["64x64x64"], 9.0) == {LARGE: 0.0}
    assert after_tuning({SMALL: 1.0}, ["64x64x64"], 1.0) == {SMALL: 1.0}


def test_the_excess_of_library_kernels(monkeypatch):
    """A kernel's time beyond its least, times how often it runs; 0 if it is faster than the device was measured."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: Ceilings(copy=4.0, fill=5.0, half=100.0, single=10.0))
    slow, fast = replace(LARGE, flops=20.0, count=3), replace(SMALL, flops=20.0)
    assert excess_of({slow: 5.0, fast: 1.0}, CPU) == {slow: 9.0, fast: 0.0}


def test_a_decision_may_tune_products():
    """A stored decision may name any products, since it chooses only among those of the graph."""
    allowed = [tuning((), 0, 0.0)]
    options = {"max_autotune_gemm": True, "tuned_products": ["1x2x3"]}
    assert trusted("tuned_products", options, "", allowed)
    assert not trusted("tuned_products", {**options, "tuned_products": "1x2x3"}, "", allowed)
    assert not trusted("tuned_products", {**options, "cpp.cxx": "x"}, "", allowed)


def test_grouped_products_are_timed_with_their_offsets():
    """A grouped product keeps its offsets, since its time depends on them."""
    rows, weights = torch.randn(32, 16, dtype=torch.bfloat16), torch.randn(2, 16, 16, dtype=torch.bfloat16)
    offsets = torch.tensor([8, 32], dtype=torch.int32)
    try:
        torch._grouped_mm(rows, weights, offs=offsets)
    except (RuntimeError, AttributeError):
        pytest.skip("this torch has no grouped product on a CPU")
    (found,) = observed_stats(lambda: torch._grouped_mm(rows, weights, offs=offsets), lambda seen: 0.0, **TOLD)[
        1
    ].products
    operands = [each for each in (*found.call[1], *found.call[2].values()) if isinstance(each, torch.Tensor)]
    assert [each.device.type for each in operands] == ["meta", "meta", "cpu"]
    assert operands[2].tolist() == [8, 32]
    assert operands[2] is not offsets
    assert time_library([found], CPU)[found] > 0
