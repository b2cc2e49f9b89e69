"""Padding is checked on values that the example does not have, and inputs that share written memory run in eager."""

import pytest
import torch
from torch import nn

import backend_kwargs as bk

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
POSITIVE = torch.tensor([[0.5, 0.2, 0.9], [0.3, 0.8, 0.1]])
WHOLE = torch.tensor([[5, 2, 9], [3, 8, 1]])
SOME = torch.tensor([[True, False, True]] * 2)


def seal(function, *example, **kwargs):
    """Return a function sealed for sizes of dimension 1 of each input."""
    names = function.__code__.co_varnames[: len(example)]
    dims = {name: {1: "n"} for name in names}
    compiled = torch.compile(function, backend="eager")
    return bk.seal(compiled, example, dims=dims, sizes={"n": [3]}, buckets={"n": [4]}, **kwargs)


WRONG = {
    "maximum": (lambda x: x.amax(1), POSITIVE, "with 'x' negative,"),
    "position of the maximum": (lambda x: x.argmax(1), POSITIVE, "with 'x' negative,"),
    "minimum of negative numbers": (lambda x: x.amin(1), -POSITIVE, "with 'x' positive,"),
    "sum of large exponentials": (lambda x: (40 * x).logsumexp(1), POSITIVE + 1, "with 'x' negative,"),
    "largest first": (lambda x: x.sort(1, descending=True)[0], POSITIVE, "with 'x' negative,"),
    "product that is zero": (lambda x: x.prod(1), POSITIVE * 0, "with 'x' positive,"),
    "threshold": (lambda x: (x > 30).all(1), POSITIVE, "with 'x' large,"),
    "maximum of integers": (lambda x: x.amax(1), WHOLE, "with 'x' negative,"),
    "position of a token": (lambda x: (x == 3).int().argmin(1) * (x > 0).all(1), WHOLE % 3, "with 'x' "),
    "all of bools": (lambda x: x.all(1), SOME, "with 'x' all real,"),
    "maximum of real parts": (lambda x: x.real.amax(1), torch.complex(POSITIVE, POSITIVE), "with 'x' negative,"),
    "mask of nothing": (lambda x, y: (x * y).amax(1), POSITIVE, SOME & False, "with 'x' negative,"),
}


@pytest.mark.parametrize("kind", WRONG)
@torch.no_grad()
def test_padding_that_is_wrong_for_other_values_is_refused(kind):
    """The example is right when it is padded, and other values are not: the error says which."""
    function, *example, values = WRONG[kind]
    with pytest.raises(bk.BackendKwargsError) as refused:
        seal(function, *example)
    start, end = "'n' cannot be padded: '<lambda>' at n=3, ", "Pass a mask of what is real and its `fill`, or declare "
    assert str(refused.value).startswith(start + values)
    assert str(refused.value).endswith(end + "`sizes` without buckets. check=False seals it all the same.")


@torch.no_grad()
def test_another_input_decides():
    """A number that is not padded has other values too."""
    compiled = torch.compile(lambda x, least: (x > least).sum(1), backend="eager")
    with pytest.raises(bk.BackendKwargsError, match="with 'least' negative, gives other results padded to n=4, output"):
        bk.seal(compiled, (POSITIVE, torch.tensor(0.4)), dims={"x": {1: "n"}}, sizes={"n": [3]}, buckets={"n": [4]})


@torch.no_grad()
def test_positions_that_are_all_the_fill_cannot_be_checked():
    """No other position is known to be valid, so the error asks for an example that has some."""
    with pytest.raises(
        bk.BackendKwargsError, match="'n' cannot be padded: with what the example has in 'x' it cannot be"
    ):
        seal(lambda x: EMBED(x).mean(1), WHOLE * 0)


@torch.no_grad()
def test_other_values_are_not_tried_without_the_check():
    """A user who knows that values are positive seals a maximum."""
    assert seal(lambda x: x.amax(1), POSITIVE, check=False)(POSITIVE).tolist() == POSITIVE.amax(1).tolist()


EMBED = nn.Embedding(10, 4)


def attend(tokens, mask):
    """Attend as BERT does, with the lowest number for what the mask leaves out."""
    x = EMBED(tokens)
    scores = x @ x.transpose(1, 2) + (1 - mask[:, None, :].float()) * torch.finfo(x.dtype).min
    return scores.softmax(-1) @ x


RIGHT = {
    "each alone": (lambda x: x.relu() + 1, POSITIVE),
    "sum": (lambda x: x.sum(1), POSITIVE),
    "running sum": (lambda x: x.cumsum(1), POSITIVE),
    "largest magnitude": (lambda x: x.abs().amax(1), POSITIVE),
    "sum of integers": (lambda x: x.sum(1), WHOLE),
    "any of bools": (lambda x: x.any(1), SOME),
    "tokens": (lambda x: EMBED(x) * 2, WHOLE),
    "position in a table": (lambda x: EMBED.weight[x].sum(2), WHOLE),
    "attention, mask of ones": (attend, WHOLE, torch.ones(2, 3, dtype=torch.long)),
    "attention, mask of bools": (attend, WHOLE, SOME),
    "attention, mask of floats": (attend, WHOLE, SOME.float()),
}


@pytest.mark.parametrize("kind", RIGHT)
@torch.no_grad()
def test_padding_that_is_right_is_accepted(kind):
    """Valid positions stay valid, and no row of a mask becomes empty."""
    function, *example = RIGHT[kind]
    sealed = seal(function, *example)
    torch.testing.assert_close(sealed(*example), function(*example))
    assert sealed.counters == {"compiled": 0, "padded": 1, "missed": 0}


def double_if_any(x):
    return torch.cond(x.any(), lambda x: x * 2, lambda x: x.clone(), (x,))


@torch.no_grad()
def test_a_condition_is_accepted():
    """Operators that run graphs of their own are tried on other values too."""
    sealed = seal(double_if_any, POSITIVE, on_miss="raise")  # eager's torch.cond compiles
    torch.testing.assert_close(sealed(-POSITIVE), -2 * POSITIVE)
    assert sealed.counters == {"compiled": 0, "padded": 1, "missed": 0}


def largest_real(x, lengths):
    return x.where(torch.arange(x.shape[1]) < lengths[:, None], -torch.inf).amax(1)


@torch.no_grad()
def test_lengths_keep_their_values():
    """Whole numbers that are not padded are not tried beyond the size."""
    example = -POSITIVE, torch.tensor([3, 2])
    compiled = torch.compile(largest_real, backend="eager")
    sealed = bk.seal(compiled, example, dims={"x": {1: "n"}}, sizes={"n": [3]}, buckets={"n": [4]})
    torch.testing.assert_close(sealed(*example), largest_real(*example))
    assert sealed.counters == {"compiled": 0, "padded": 1, "missed": 0}


# ---- memory


def add(x, y):
    x.add_(1)
    return x * y


def add_each(x, y):
    torch._foreach_add_([x], 1)  # changes no version
    return x * y


def apart():
    return torch.ones(4), torch.ones(4)


def overlapping():
    memory = torch.ones(8)
    return memory[:4], memory[2:6]


@pytest.mark.parametrize("function", [add, add_each])
@torch.no_grad()
def test_inputs_that_share_written_memory_run_in_eager(function):
    """A function that writes into an input was compiled for inputs that are apart."""
    sealed = bk.seal(torch.compile(function, backend="aot_eager"), apart())
    assert sealed(*overlapping()).tolist() == [4, 4, 2, 2]
    assert sealed.misses == {"inputs share memory that it writes": 1}
    memory = torch.ones(8)
    assert sealed(memory[:4], memory[4:]).tolist() == [2, 2, 2, 2]
    assert sealed.counters == {"compiled": 1, "padded": 0, "missed": 1}


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count[:4]


@torch.no_grad()
def test_an_input_in_a_buffer_that_is_written_runs_in_eager():
    """The buffer is written before the input is read."""
    net = Counting()
    sealed = bk.seal(torch.compile(net, backend="aot_eager"), torch.ones(4))
    assert sealed(net.count[2:6]).tolist() == [2, 2, 2, 2]
    assert sealed.misses == {"inputs share memory that it writes": 1}


class CountingCalls(Counting):
    def forward(self, x, y):
        self.count.add_(1)
        return x * y


@pytest.mark.parametrize("function", [lambda x, y: x * y, CountingCalls()], ids=["function", "module that counts"])
@torch.no_grad()
def test_inputs_that_are_only_read_may_share_memory(function):
    """Views of one tensor that nothing writes run compiled code, also beside a buffer that is written."""
    sealed = bk.seal(torch.compile(function, backend="aot_eager"), apart())
    assert sealed(*overlapping()).tolist() == [1, 1, 1, 1]
    assert sealed.counters == {"compiled": 1, "padded": 0, "missed": 0}


class Averaging(Counting):
    def forward(self, x):
        self.count.data.add_(x.mean())
        return x + 1


@torch.no_grad()
def test_what_a_call_writes_is_part_of_its_result():
    """Padding that changes a buffer is refused, and the module is as it was before."""
    net, dims = torch.compile(Averaging(), backend="eager"), {"x": {1: "n"}}
    with pytest.raises(bk.BackendKwargsError, match=r"other results padded to n=4, buffer\['count'\]: error 0.25, "):
        bk.seal(net, POSITIVE, dims=dims, sizes={"n": [3]}, buckets={"n": [4]})
    assert not net.count.any()
