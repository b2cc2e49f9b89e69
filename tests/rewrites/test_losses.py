"""Cross-entropy as one operator, alone and in chunks with its linear layer."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import backend_kwargs
from backend_kwargs.rewrites.linear_cross_entropy import linear_cross_entropy
from tests.rewrites.lowering import Changed, gradients

SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
CHANGES = ("cross_entropy", "linear_cross_entropy")


def agree(changed, fn, args):
    """Raise unless loss and gradients equal float64's up to rounding, with eager's dtypes."""
    got, eager = gradients(changed, args), gradients(fn, args)
    want = gradients(fn, [arg.double() if arg.is_floating_point() else arg for arg in args])
    logits = F.linear(*args[:2])
    for one, plain, exact in zip(got, eager, want, strict=True):
        assert one.dtype == plain.dtype
        own = (plain.double() - exact).abs().max()
        # A share near 1 less 1 keeps few digits, and is multiplied by a weight.
        largest = max(exact.abs().max(), *(arg.abs().max() for arg in args if arg.is_floating_point()))
        # A logit's rounding changes a share p by p (1 - p) of it, at most a quarter.
        rounded = torch.finfo(torch.float32).eps * logits.abs().max() / 4
        limit = 2 * own + (16 * torch.finfo(one.dtype).eps + rounded) * largest + 1e-6
        assert (one.double() - exact).abs().max() <= limit


@SETTINGS
@example("linear_cross_entropy", torch.float32, 6, 28, -100, False, 50.0, 1)
@given(
    name=st.sampled_from(CHANGES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.integers(1, 20),
    classes=st.integers(2, 40),
    ignored=st.sampled_from([-100, 0]),
    wide=st.booleans(),
    scale=st.sampled_from([1.0, 50.0]),
    seed=st.integers(0, 9),
)
def test_computes_the_same(name, dtype, rows, classes, ignored, wide, scale, seed):
    """Loss and gradients agree with float64, whichever targets are ignored, as long as one counts."""
    torch.manual_seed(seed)
    x, w = torch.randn(rows, 6).to(dtype), (torch.randn(classes, 6) * scale).to(dtype)
    target = torch.randint(classes, (rows,))
    target[::2] = ignored
    target[-1] = classes - 1

    def fn(x, w, target):
        logits = F.linear(x, w)
        return (
            F.cross_entropy(
                logits.float() if wide and dtype == torch.bfloat16 else logits, target, ignore_index=ignored
            )
            * 3
        )

    changed = Changed(fn, name)
    agree(changed, fn, (x, w, target))
    assert changed.counts[name] == 1


def test_dynamic_rows():
    """The number of rows may vary: counting bytes makes no size constant."""
    changed = Changed(F.cross_entropy, "cross_entropy")
    for rows in (3, 5, 7):
        args = torch.randn(rows, 4), torch.randint(4, (rows,))
        torch.testing.assert_close(gradients(changed, args), gradients(F.cross_entropy, args))
    assert changed.counts["cross_entropy"] == 2


def test_all_rows_ignored():
    """If all targets are ignored the loss is nan, as in eager."""
    x, target = torch.randn(4, 5), torch.full((4,), -100)
    changed = Changed(lambda x: F.cross_entropy(x, target), "cross_entropy")
    with torch.no_grad():
        assert changed(x).isnan()


T = torch.tensor([1, 2, 3, 0])
P = torch.softmax(torch.randn(4, 4), 1)
NEAR = {
    "no rows": lambda x: F.cross_entropy(x[:0], T[:0]).nan_to_num(),
    "sum": lambda x: F.cross_entropy(x, T, reduction="sum"),
    "each row": lambda x: F.cross_entropy(x, T, reduction="none").sum(),
    "weights": lambda x: F.cross_entropy(x, T, weight=torch.arange(4.0)),
    "smoothing": lambda x: F.cross_entropy(x, T, label_smoothing=0.1),
    "probabilities": lambda x: F.cross_entropy(x, P),
    "pixels": lambda x: F.cross_entropy(x[:, :, None], T[:, None]),
    "columns apart": lambda x: F.cross_entropy(x.t(), T),
    "sum, as it once was said": lambda x: F.cross_entropy(x, T, size_average=False),
    "each row, as it once was said": lambda x: F.cross_entropy(x, T, reduce=False).sum(),
    "float64": lambda x: F.cross_entropy(x.double(), T),
    "one row": lambda x: F.cross_entropy(x[0], T[0]),
}


W = torch.randn(4, 4)
NEAR_LINEAR = {
    "bias": lambda x: F.cross_entropy(F.linear(x, W, W[0]), T),
    "the logits have another user": lambda x: F.cross_entropy(y := F.linear(x, W), T) + y.sum(),
    "something between": lambda x: F.cross_entropy(F.linear(x, W) * 2, T),
    "a product with a weight that is not transposed": lambda x: F.cross_entropy(x @ W, T),
    "fewer classes": lambda x: F.cross_entropy(F.linear(x, W).view(8, 2), torch.tensor([0, 1]).repeat(4)),
    "flattened logits with another user": lambda x: (
        F.cross_entropy(y := F.linear(x.view(2, 2, 4), W).view(4, 4), T) + y.sum()
    ),
    "widened logits with another user": lambda x: (
        F.cross_entropy(y := F.linear(x.bfloat16(), W.bfloat16()).float(), T) + y.sum()
    ),
    "float64": lambda x: F.cross_entropy(F.linear(x.double(), W.double()), T),
    "a sum of rows": lambda x: F.cross_entropy(F.linear(x, W), T, reduction="sum"),
}


def test_half_precision_is_not_chunked():
    """Gradients in float16 would underflow before a scaler's factor reaches them, which it multiplies at the end."""
    fn = lambda x, w: F.cross_entropy(F.linear(x, w), T)  # noqa: E731
    changed = Changed(fn, "linear_cross_entropy")
    args = [torch.randn(4, 4).half(), torch.randn(4, 4).half()]
    torch.testing.assert_close(gradients(changed, args), gradients(fn, args), atol=1e-3, rtol=1e-2)
    assert changed.counts["linear_cross_entropy"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_linear_layer_under_autocast_stays(dtype):
    """Autocast computes the product in another dtype than that of its inputs, which the operator would keep."""

    def fn(x, w):
        with torch.autocast("cpu", dtype):
            return F.cross_entropy(F.linear(x, w), T)

    changed = Changed(fn, "linear_cross_entropy")
    args = [torch.randn(4, 4), torch.randn(4, 4)]
    torch.testing.assert_close(gradients(changed, args), gradients(fn, args))
    assert changed.counts["linear_cross_entropy"] == 0


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        *(pytest.param("cross_entropy", fn, id=near) for near, fn in NEAR.items()),
        *(pytest.param("linear_cross_entropy", fn, id=f"{near}, linear") for near, fn in NEAR_LINEAR.items()),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_near_miss(name, fn):
    """Other losses, and those without a linear layer right before them, stay unchanged."""
    changed, x = Changed(fn, name), torch.randn(4, 4)
    torch.testing.assert_close(gradients(changed, [x]), gradients(fn, [x]))
    assert changed.counts[name] == 0


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("fresh_dynamo")
def test_rows_that_only_the_run_tells(name):
    """A number of rows that depends on values compiles, and the loss equals eager's."""

    def fn(x, w, target):
        rows = (target > 0).nonzero().squeeze(1)
        torch._check(rows.shape[0] > 1)
        return F.cross_entropy(F.linear(x[rows], w), target[rows])

    args = torch.randn(9, 4), torch.randn(7, 4), torch.arange(9) % 3
    compiled = torch.compile(fn, backend=backend_kwargs.make_backend("tmpl-inductor", rewrites=(name,)))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(compiled(*args), fn(*args))


def logits_without_gradients(x, w):
    with torch.no_grad():
        logits = F.linear(x, w)
    return F.cross_entropy(logits, T) + w.sum()


def widened_without_gradients(x, w):
    with torch.no_grad():
        logits = F.linear(x, w).float()
    return F.cross_entropy(logits, T) + w.sum()


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("fn", [logits_without_gradients, widened_without_gradients])
def test_logits_without_gradients(fn, name):
    """A loss of logits that were computed without gradients has none for what they were computed of."""
    torch.manual_seed(0)  # in bfloat16 a loss and a sum that cancel each other differ by more than rounding
    changed = Changed(fn, name)
    args = [torch.randn(4, 4).bfloat16(), torch.randn(4, 4).bfloat16()]
    got, want = ([torch.zeros(()) if each is None else each for each in gradients(f, args)] for f in (changed, fn))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", CHANGES)
def test_the_bits_of_logits_as_another_dtype(name):
    """A view as another dtype keeps the sizes of logits and changes their values."""
    fn = lambda x, w: F.cross_entropy(F.linear(x, w).view(torch.float16), T)  # noqa: E731
    changed, args = Changed(fn, name), (torch.randn(4, 4).bfloat16(), torch.randn(4, 4).bfloat16())
    with torch.no_grad():
        torch.testing.assert_close(changed(*args), fn(*args))


TRANSFORMS = {
    "grad": lambda loss, w, x, y: torch.func.grad(loss)(w, x, y),
    "vmap": lambda loss, w, x, y: torch.func.vmap(loss, (None, 0, 0))(w, x[:, None], y[:, None]),
    "both": lambda loss, w, x, y: torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(w, x[:, None], y[:, None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("name", [*CHANGES, "layer_norm_backward"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_transforms_of_torch_func(name, transform):
    """A graph that contains a transform of torch.func is left as it is."""

    def loss(w, x, y):
        return F.cross_entropy(F.linear(F.layer_norm(x, (4,), w[0], w[1]), w), y)

    def fn(w, x, y):
        return transform(loss, w, x, y)

    args = torch.randn(5, 4), torch.randn(6, 4), torch.randint(5, (6,))
    compiled = torch.compile(fn, backend=backend_kwargs.make_backend("tmpl-inductor", rewrites=(name,)))
    torch.testing.assert_close(compiled(*args), fn(*args))


def test_without_gradients_there_are_none():
    """In inference the operator returns no gradients, of the sizes that its fake kernel gives."""
    args = torch.randn(6, 4), torch.randn(5, 4), torch.randint(5, (6,)), -100, False
    real = linear_cross_entropy(*args)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = linear_cross_entropy(*(mode.from_tensor(a) if torch.is_tensor(a) else a for a in args))
    assert [each.shape for each in real] == [each.shape for each in fake] == [(), (0,), (0,)]


def test_memory():
    """In chunks the compiled graph contains no tensor of all logits."""
    x, w = torch.randn(64, 8, requires_grad=True), torch.randn(512, 8, requires_grad=True)
    target = torch.randint(512, (64,))

    def fn(x, w):
        return F.cross_entropy(F.linear(x, w), target)

    torch._dynamo.reset()
    compiled = torch.compile(
        fn, backend=backend_kwargs.make_backend("tmpl-inductor", rewrites=("linear_cross_entropy",))
    )
    compiled(x, w).backward()
    got = [x.grad, w.grad]
    x.grad = w.grad = None
    fn(x, w).backward()
    torch.testing.assert_close(got, [x.grad, w.grad])
    (graph,) = backend_kwargs.report(compiled).graphs
    assert graph.rewritten == {"linear_cross_entropy": 1}
    assert not any("(64, 512)" in code.source for code in graph.codes)
