"""Lower precision beside writes in place: products read what was written last, in whichever way it was written."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import backend_kwargs as bk
from backend_kwargs import BackendKwargsWarning
from tests.precision.precision_nets import BOUND, MARKS, in_precision, torchao, used

pytestmark = MARKS
FIRST, SECOND = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)) / 4
LOOSE = 0.9  # a bound that wrong values pass too, so that a wrong graph is not refused


def rows(seed: int = 1) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert (found - wanted).norm() < 0.02 * wanted.norm()


def assert_all_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Check results of one graph, so that a failure says which of them are wrong."""
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in wanted.items()}
    errors = {name: ((found[name] - each).norm() / each.norm()).item() for name, each in wanted.items()}
    assert {name: error for name, error in errors.items() if not error < 0.02} == {}


@torch.library.custom_op("backend_kwargs_tests::tripled", mutates_args=("into",))
def tripled(x: torch.Tensor, into: torch.Tensor) -> None:
    into.mul_(3)


@torch.library.custom_op("backend_kwargs_tests::all_tripled", mutates_args=("into",))
def all_tripled(into: list[torch.Tensor]) -> None:
    for each in into:
        each.mul_(3)


tripled.register_fake(lambda x, into: None)
all_tripled.register_fake(lambda into: None)


@torch.compiler.allow_in_graph
def second_is_written(x, y):
    y.mul_(3)


def by_numpy(x, y):
    array = y.numpy()
    array[:3] = 4.0


def by_fused_multiply(x, y):
    (one, other), scale = y.chunk(2), x[:4]
    torch._foreach_addcmul_([one, other], [scale, scale], [scale, scale], 3.0)


def by_iadd(x, y):
    y += torch.ones(16, dtype=torch.float64)


WRITES = {
    "slice": lambda x, y: y[2:].mul_(3),
    "item": lambda x, y: y.__setitem__(slice(2), x[:2] * 3),
    "out": lambda x, y: torch.mul(x, 3, out=y),
    "part of out": lambda x, y: torch.mul(x[:4], 3, out=y[:4]),
    "transposed": lambda x, y: y.T[2:].fill_(3),
    "data": lambda x, y: y.data.mul_(3),
    "another dtype": by_iadd,
    "list": lambda x, y: torch._foreach_mul_([y], 3),
    "list of parts": by_fused_multiply,
    "operator": tripled,
    "operator by keyword": lambda x, y: torch.ops.backend_kwargs_tests.tripled(into=y, x=x),
    "operator of a list": lambda x, y: all_tripled([y.view(-1)]),
    "numpy": by_numpy,
    "unknown function": second_is_written,
    "max_norm": lambda x, y: functional.embedding(torch.arange(4), y, max_norm=0.5),
    "statistics": lambda x, y: functional.batch_norm(x + 9, y[0], y[1], training=True),
    "statistics of an operator": lambda x, y: torch.ops.aten.native_batch_norm(
        x + 9, None, None, y[0], y[1], True, 1.0, 1e-5
    ),
    "checkpointed part": lambda x, y: checkpoint(lambda y: y.mul_(3), y, use_reentrant=False),
}

WRITTEN = ["slice", "list", "operator", "max_norm", "statistics"]  # ways to write a weight


@pytest.mark.parametrize(
    ("dynamic", "ways"),
    [pytest.param(False, [*WRITES], id=""), pytest.param(True, ["item", "list of parts", *WRITTEN], id="dynamic")],
)
def test_a_product_reads_what_was_written_to_another(dynamic, ways):
    """A product's result that is written before the next product reads it is not read as it was before."""

    def between(x):
        results = {}
        for name in ways:
            y = x @ FIRST
            WRITES[name](x, y)
            results[name] = y @ SECOND
        return results

    compiled = torch.compile(
        between, backend=bk.make_backend("tmpl-inductor", precision="bf16", max_error=LOOSE), dynamic=dynamic
    )
    with torch.no_grad():
        for seed in (1, 2):
            assert_all_close(compiled(rows(seed)), between(rows(seed)))
    assert (used(compiled).products, used(compiled).reason) == (2 * len(ways), "")


def test_a_sum_in_place_keeps_its_dtype():
    """A product to which another dtype is added in place stays float32."""

    def added(x):
        y = x @ FIRST
        y += torch.ones(16, dtype=torch.float64)
        return y

    compiled = in_precision(added, "bf16")
    with torch.no_grad():
        assert_close(compiled(rows()), added(rows()))
    assert used(compiled).reason == ""


@pytest.mark.parametrize("rewrites", [(), ("packed", "contraction")], ids=["", "rewrites"])
def test_a_cache_made_and_filled_within_the_graph(rewrites):
    """Attention over a cache that the graph makes and fills step by step is measured and computed right."""

    def steps(x):
        keys, q = torch.zeros(3, 8, 16), x @ FIRST
        for at in range(3):
            k = functional.linear(q, SECOND)
            keys[at] = k
            k *= 2
            q = functional.scaled_dot_product_attention(q[None], keys, keys)[0] + functional.linear(k, FIRST)
            torch._foreach_mul_([q, k], 0.5)
        return q + k @ SECOND

    compiled = in_precision(steps, "bf16", rewrites=rewrites)
    with torch.no_grad():
        assert_close(compiled(rows()), steps(rows()))
    assert (used(compiled).products, used(compiled).reason) == (11, "")


def test_writes_in_training():
    """Gradients pass through results that are written, also through views and lists."""

    def written(x):
        y = x @ FIRST
        y[2:] *= 3
        torch._foreach_mul_([y], 0.5)
        return functional.relu_(y @ SECOND) @ FIRST

    compiled, found, wanted = in_precision(written, "bf16", LOOSE), rows().requires_grad_(), rows().requires_grad_()
    compiled(found).sum().backward()
    written(wanted).sum().backward()
    assert_close(found.grad, wanted.grad)
    assert (used(compiled).products, used(compiled).reason) == (3, "")


class Written(nn.Module):
    """Two products with one weight, which is written between them."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.how = nn.Linear(16, 16), how

    def forward(self, x):
        y = self.layer(x)
        WRITES[self.how](x, self.layer.weight)
        return y + self.layer(x)


def assert_writes_as_eager(how, precision, **options):
    """Check three calls, and the weight that they leave."""
    model = Written(how).eval()
    eager, compiled = copy.deepcopy(model), in_precision(model, precision, LOOSE, **options)
    with torch.no_grad():
        for seed in (1, 2, 3):
            assert_close(compiled(rows(seed)), eager(rows(seed)))
    assert_close(model.layer.weight, eager.layer.weight)
    return used(compiled)


@pytest.mark.parametrize(
    ("how", "freezing"), [*((how, False) for how in WRITTEN), ("slice", True), ("operator", True)], ids=str
)
def test_weights_that_the_graph_writes(how, freezing):
    """A weight that the graph writes is not cast beforehand, and each call writes it once."""
    assert assert_writes_as_eager(how, "bf16", freezing=freezing).reason == ""


@torchao
@pytest.mark.parametrize("how", WRITTEN)
def test_weights_that_the_graph_writes_are_not_quantised(how):
    """A weight that the graph writes is not quantised, and the reason says so."""
    why = "the weight of the first of its 2 linear layers is not a parameter, or the graph writes it"
    with pytest.warns(BackendKwargsWarning) as warned:
        assert assert_writes_as_eager(how, "int8-weight").reason == why
    assert str(warned[-1].message) == f"A graph is compiled without precision 'int8-weight': {why}."


def test_what_the_model_makes_of_a_weight_itself():
    """A model's own copy of a weight in the precision is its to write, and stays its own."""
    layer = nn.Linear(16, 16)

    def centred(x):
        weight = layer.weight.to(torch.bfloat16)
        weight.mul_(2)
        return layer(x) + functional.linear(x.bfloat16(), weight).float(), weight

    compiled = in_precision(centred, "bf16", LOOSE)
    with torch.no_grad():
        for _ in range(3):
            found, weight = compiled(rows())
            assert_close(found, centred(rows())[0])
            weight.zero_()


def test_running_statistics():
    """Batch norm in training updates its running statistics once per step, close to eager's."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3))
    eager, compiled = copy.deepcopy(model), in_precision(model, "bf16")
    for seed in (1, 2, 3):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        compiled(x).sum().backward()
        eager(x).sum().backward()
    assert used(compiled).reason == ""
    assert norm.num_batches_tracked == 3
    assert_close(norm.running_var, eager[1].running_var)
    assert (norm.running_mean - eager[1].running_mean).abs().max() < BOUND
