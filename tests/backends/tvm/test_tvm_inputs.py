"""Unusual inputs and outputs give eager's values, types, shapes, strides and sharing, and none kills the process."""

import threading

import pytest
import torch
from torch.nn.functional import dropout, embedding, nll_loss
from torch.testing import assert_close


def assert_same(result, wanted):
    """Check that two results agree in structure, types, values and strides."""
    if isinstance(wanted, tuple | list):
        assert type(result) is type(wanted)
        assert len(result) == len(wanted)
        for one, other in zip(result, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, torch.Tensor):
        assert_close(result, wanted)
        assert result.stride() == wanted.stride()
    else:
        assert (result, type(result)) == (wanted, type(wanted))


def floats(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def halves(x):
    y = x.cos()
    a, b = y.split(4, 1)
    return a.sin() + b, a, b


def one_thrice(x):
    y = x.sin()
    return y, y, y.view(-1)


CASES = {
    "not contiguous": (lambda x: x.sin() + 1, floats(8, 4).t()),
    "every other element": (lambda x: x.sin() + 1, floats(64)[::2]),
    "misaligned": (lambda x: x.sin() + 1, floats(100)[1:65]),
    "misaligned rows": (lambda x: x @ x.t(), floats(9, 16)[1:, 1:]),
    "expanded": (lambda x: x.sin() + 1, floats(1, 8).expand(4, 8)),
    "channels last": (lambda x: x.relu() * 2, floats(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "negative bit": (lambda x: x.sin() + 1, torch._neg_view(floats(8))),
    "conjugate": (lambda z: z.imag.sin() + 1, torch.complex(floats(8), floats(8)).conj()),
    "strides of a permutation": (lambda x: (x.permute(1, 0).relu(), x.sin().t()), floats(4, 8)),
    "expanded output": (lambda x: (x.sin().expand(4, 8), x.sin().expand(4, 8) * 2), floats(1, 8)),
    "input as output": (lambda x: (x, x.sin()), floats(4, 8)),
    "same output thrice": (one_thrice, floats(4, 8)),
    "views of one base": (halves, floats(4, 8)),
    "no elements": (lambda x: (x.sin() + 1, x.sum()), floats(0, 8)),
    "no dimensions": (lambda x: (x + 1) * x.sin(), torch.tensor(3.0)),
    "one element": (lambda x: (x + 1) * x.sin(), floats(1, 1)),
    "None and literals": (lambda x: (None, x.sin(), 3, "a", 2.5, True), floats(4)),
    "no outputs": (lambda x: None, floats(4)),
    "no inputs in the computation": (lambda x: (torch.zeros(3) + 1, torch.arange(5) * 2, x.sin()), floats(4)),
    "bool": (lambda x: (x & ~x, x | x.flip(0), x.sum()), torch.tensor([True, False, True])),
    "mixed types": (lambda x: (x + x.int(), x.double() * x, x > 0), floats(5)),
    "as_strided": (lambda x: (x + 1).as_strided((2, 2), (1, 2)).sin(), floats(4, 8)),
    "list": (lambda x: [t * 2 for t in x.chunk(4, 1)], floats(4, 8)),
}


@pytest.mark.parametrize(("fn", "x"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_odd_case_is_eagers(compiled, fn, x):
    """Both the first and the second call equal eager's, since the second uses state of the first."""
    call = compiled(fn)
    assert_same(call(x), fn(x))
    assert_same(call(x), fn(x))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@torch.no_grad()
def test_integers(compiled, dtype):
    x = torch.tensor([0, 1, 5, 100, 3], dtype=dtype)
    fn = lambda x: (x + x, x * 3, x.sum(), x // 2, x == 5, x.float() / 3)  # noqa: E731
    call = compiled(fn)
    assert_same(call(x), fn(x))
    assert call.operators


@torch.no_grad()
def test_clone_is_no_alias(compiled):
    """Writing to the result does not change the argument."""
    x = floats(4, 8)
    kept = x.clone()
    copied, _ = compiled(lambda x: (x.clone(), x.sin()))(x)
    copied.zero_()
    assert_close(x, kept)


@torch.no_grad()
def test_outputs_are_fresh_at_each_call(compiled):
    """The caller may write to a returned constant and to the results of earlier calls."""
    call = compiled(lambda x: (torch.zeros_like(x) + 1, x.sin()))
    x = floats(4, 8)
    for result in (call(x), call(x)):
        result[0].add_(7)
        result[1].zero_()
    ones, sine = call(x)
    assert_close(ones, torch.ones_like(x))
    assert_close(sine, x.sin())


@torch.no_grad()
def test_results_outlive_later_calls(compiled):
    """Memory is not reused while a result is alive."""
    call = compiled(lambda x: x.sin() + 1)
    inputs = [floats(64) * i for i in range(20)]
    for x, result in zip(inputs, [call(x) for x in inputs], strict=True):
        assert_close(result, x.sin() + 1)


@torch.no_grad()
def test_argument_written_in_place(compiled):
    x, y = floats(4, 8), floats(4, 8)
    result = compiled(lambda x: x.add_(1).sin())(x)
    assert_close(x, y + 1)
    assert_close(result, (y + 1).sin())


@torch.no_grad()
def test_one_tensor_passed_twice_and_written(compiled):
    x, y = floats(4, 8), floats(4, 8)
    compiled(lambda a, b: a.add_(b).mul_(2))(x, x)
    assert_close(x, y * 4)


@torch.no_grad()
def test_random_numbers_are_eagers(compiled):
    """Random operators run in eager and in eager's order, wherever TVM's parts are."""

    def fn(x):
        return dropout(x.sin(), 0.5) * 2, torch.rand(3) + 1, dropout(x.cos(), 0.5).relu(), torch.randn_like(x)

    call, x = compiled(fn), floats(4, 8)
    for seed in (1, 2):
        torch.manual_seed(seed)
        wanted = fn(x)
        torch.manual_seed(seed)
        assert_same(call(x), wanted)
    assert call.operators


def test_bits_read_as_another_type_stay_bits(compiled):
    """float16 viewed as bfloat16 keeps its bits, without a conversion."""

    def view(x):
        return x.half().view(torch.bfloat16) + 1

    x = torch.randn(64)
    torch.testing.assert_close(compiled(view)(x), view(x))


def test_many_threads(compiled):
    """Each thread has its own virtual machine."""
    call = compiled(lambda x: (x @ x.t()).softmax(-1) + 1)
    wrong = []

    @torch.no_grad()
    def work(seed):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        wanted = (x @ x.t()).softmax(-1) + 1
        wrong.extend(seed for _ in range(50) if not torch.allclose(call(x), wanted, atol=1e-5))

    work(0)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@torch.no_grad()
def test_inference_mode(compiled):
    call, x = compiled(lambda x: x.sin() + 1), floats(8)
    with torch.inference_mode():
        assert_close(call(x), x.sin() + 1)


# ---- what eager refuses

REFUSED = {
    "embedding": lambda x, i: embedding(i, x),
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "take": torch.take,
    "scatter": lambda x, i: x.scatter(0, i[:, None], 1.0),
    "index_add": lambda x, i: x.index_add(0, i, x[: len(i)]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[: len(i)]),
    "nll_loss": lambda x, i: nll_loss(x[:2], i),
    "floor_divide": lambda x, i: i // (i - 99),
    "remainder": lambda x, i: i % (i - 99),
    "fmod": lambda x, i: i.fmod(i - 99),
}


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED)
@torch.no_grad()
def test_what_eager_refuses_is_refused(compiled, fn):
    """An index out of bounds or an int divided by zero raises in eager, with the rest of the graph in TVM."""
    x, right, wrong = floats(4, 8), torch.tensor([1, 0]), torch.tensor([1, 99])
    call = compiled(lambda x, i: fn(x.sin(), i) * 2)
    assert_close(call(x, right), fn(x.sin(), right) * 2)
    for either in (fn, call):
        with pytest.raises((IndexError, RuntimeError)):
            either(x, wrong)
    assert call.operators


# ---- sizes known when it runs

DYNAMIC = {
    "rows": (lambda x: (x - x.mean(0)).relu() / x.shape[0], [(floats(n, 6),) for n in (4, 6, 9)]),
    "flattened": (lambda x: x.sin().reshape(x.shape[0] * 2, -1).sum(0), [(floats(n, 6),) for n in (4, 6, 9)]),
    "concatenated": (lambda x, y: torch.cat([x, y]).sin(), [(floats(n, 6), floats(n + 1, 6)) for n in (4, 6, 9)]),
    "an int": (lambda x, n: x * n + 1, [(floats(n, 6), n) for n in (4, 6, 9)]),
    "a size of no tensor": (lambda x, y: x.sin().view(*y.shape) * y, [(floats(n * 6), floats(n, 6)) for n in (4, 6)]),
    "permuted": (lambda x: x.permute(1, 0).relu(), [(floats(n, 6),) for n in (4, 6, 9)]),
    "made": (lambda x: torch.arange(x.shape[0]) * 2 + 1, [(floats(n, 6),) for n in (4, 6, 9)]),
}


@pytest.mark.parametrize(("fn", "calls"), DYNAMIC.values(), ids=DYNAMIC)
@torch.no_grad()
def test_dynamic_shapes_compile_once(compiled, fn, calls):
    call = compiled(fn, dynamic=True)
    for args in calls:
        assert_same(call(*args), fn(*args))
    assert len(call.summaries) == 1
    assert call.operators
