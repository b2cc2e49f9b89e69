"""Products with a transposed weight, and products and convolutions of all sizes."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch.testing import assert_close

pytest.importorskip("tvm")


def bias_of_rows(x, weight):
    return torch.addmm(weight[:, :1].t().expand(len(x), -1), x, weight.t())


PRODUCTS = {
    "bias": lambda x, weight: F.linear(x, weight, weight[:, 0]),
    "no bias": lambda x, weight: x @ weight.t(),
    "one bias for all": lambda x, weight: torch.addmm(weight[0, :1], x, weight.t()),
    "a bias for each element": bias_of_rows,
    "scaled": lambda x, weight: torch.addmm(weight[:, 0], x, weight.t(), beta=0.5, alpha=2),
    "not turned": lambda x, weight: x @ weight[:16].permute(0, 1),
    "the transposed weight is a result too": lambda x, weight: x @ weight.t() + weight.t().sum(),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_by_a_transposed_weight_is_eagers(compiled, product):
    x, weight = torch.randn(8, 16), torch.randn(24, 16)
    assert_close(compiled(product, fallback="error")(x, weight), product(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 4, 17, 32])
@pytest.mark.parametrize("columns", [1, 7, 28, 37, 64])
def test_a_product_of_any_size_is_eagers(compiled, rows, columns):
    layer, x = torch.nn.Linear(20, columns), torch.randn(rows, 20)
    assert_close(compiled(layer, fallback="error")(x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("size", [16, 17, 28])
def test_a_convolution_of_any_stride_is_eagers(compiled, stride, padding, size):
    layer, x = torch.nn.Conv2d(4, 8, 3, stride, padding), torch.randn(2, 4, size, size)
    assert_close(compiled(layer, fallback="error")(x), layer(x), rtol=1e-4, atol=1e-4)
