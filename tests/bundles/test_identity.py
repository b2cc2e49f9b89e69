"""Whether two modules are the same for a compiler: what is not known to be equal is different."""

import builtins
import copy
import dataclasses
import functools
import json
import math
import operator
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from backend_kwargs.bundles.identity.walk import identity_of, state_of
from tests.bundles.unlike_modules import COMPARED, NOT_COMPARED, STATE, UNLIKE, Applies, Environment, Scale, patched


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in COMPARED.items()])
def test_a_module_is_like_one_built_alike_and_like_no_other(make):
    two = make(2.0)
    known, result = identity_of(two), two(torch.ones(4))
    other = make(3.0)
    assert known is not None
    assert identity_of(other) != known
    assert not torch.equal(other(torch.ones(4)), result)
    assert identity_of(make(2.0)) == known


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in NOT_COMPARED.items()])
def test_a_module_that_cannot_be_compared_is_like_none(make):
    assert identity_of(make(2.0)) is None


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in UNLIKE.items()])
def test_a_module_is_not_like_another(make):
    known = identity_of(make(2.0))
    assert known is None or identity_of(make(3.0)) != known


@pytest.mark.parametrize("function", [pytest.param(function, id=name) for name, function in STATE.items()])
def test_a_module_that_reads_the_state_of_the_process_is_like_none(function):
    assert identity_of(Applies(function)) is None


class Configured(nn.Module):
    """An ordinary module with a configuration."""

    def __init__(self):
        super().__init__()
        self.config = Setting(4, "gelu")
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(self.config.width // 2)])
        for at in range(2):
            setattr(self, f"norm{at}", nn.LayerNorm(self.config.width))
        self.scale = nn.Parameter(torch.ones(4) / math.sqrt(self.config.width))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.gelu(layer(x)) if self.config.act in {"gelu", "silu"} else torch.relu(layer(x))
        with torch.no_grad():
            return getattr(self, "norm0")(x) * self.scale + torch.arange(4, dtype=torch.float32)  # noqa: B009


@dataclasses.dataclass(frozen=True)
class Setting:
    """A configuration."""

    width: int
    act: str = "relu"
    sizes: list[int] = dataclasses.field(default_factory=list)


def test_an_ordinary_module_is_like_one_built_alike():
    assert identity_of(Configured()) == identity_of(copy.deepcopy(Configured())) is not None


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        pytest.param(nn.ReLU, "forward", nn.SiLU.forward, id="another method of torch"),
        pytest.param(nn.functional, "relu", functools.partial(torch.mul, other=2), id="partial"),
        pytest.param(nn.functional, "relu", Scale(2.0), id="object"),
        pytest.param(nn.functional, "relu", nn.SiLU(), id="module"),
        pytest.param(nn.ReLU, "forward", property(lambda self: torch.sin), id="property"),
        pytest.param(nn.ReLU, "inplace", property(lambda self: True), id="attribute"),
    ],
)
def test_what_is_put_in_the_place_of_torchs_counts(owner, name, value):
    module = nn.Sequential(nn.ReLU())
    before = identity_of(module)
    if hasattr(owner, name):
        with patched(owner, name, value):
            assert identity_of(module) != before
    else:
        setattr(owner, name, value)
        try:
            assert identity_of(module) != before
        finally:
            delattr(owner, name)
    assert identity_of(module) == before is not None


def test_a_module_that_reads_the_environment_is_like_none(monkeypatch):
    monkeypatch.setenv("BACKEND_KWARGS_TEST_FACTOR", "2")
    assert identity_of(Environment()) is None


def test_a_method_by_a_computed_name_that_needs_what_cannot_be_compared_is_like_none():
    """getattr() with a computed name can find any method, also one that reads a file."""

    class Own(nn.Module):
        def forward(self, x, name="scaled"):
            return getattr(self, name)(x)

        def scaled(self, x):
            return x * 2

        def loaded(self, path):
            return Path(path).read_text()

    assert identity_of(Own()) is None


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)), id="conv"
        ),
        pytest.param(lambda: nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ModuleList([nn.GELU()])}), id="containers"),
        pytest.param(lambda: nn.MultiheadAttention(8, 2, batch_first=True), id="attention"),
        pytest.param(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), id="encoder layer"),
        pytest.param(lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), id="transformer"),
    ],
)
def test_weights_do_not_count(make):
    """Two modules of one kind are the same with other weights, and after a copy."""
    made, other = make(), make()
    assert identity_of(made) == identity_of(other) == identity_of(copy.deepcopy(made)) is not None


def test_a_parametrized_layer_is_like_one_built_alike():
    """And not like its copy, whose property refers to the layer that was copied."""
    made, other = (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(2))
    assert identity_of(made) == identity_of(other) is not None
    assert identity_of(copy.deepcopy(made)) != identity_of(made)


class Calls(nn.Module):
    """Functions of torch and of Python's library."""

    def forward(self, x):
        return torch.relu(x) * math.floor(2.5) + nn.functional.relu(x) + nn.functional.gelu(x).sin() + abs(-1)


@pytest.mark.parametrize("make", [Calls, lambda: nn.Sequential(nn.GELU(), nn.ReLU())], ids=["calls", "layers"])
@pytest.mark.parametrize(
    ("owner", "name", "function"),
    [
        pytest.param(torch, "relu", torch.tanh, id="a function of C"),
        pytest.param(nn.functional, "gelu", lambda x, approximate="none": x, id="function"),
        pytest.param(nn.functional, "relu", nn.functional.silu, id="another one of torch"),
        pytest.param(torch.Tensor, "sin", torch.Tensor.cos, id="method of tensors"),
        pytest.param(nn.Module, "__call__", lambda self, x: self.forward(x) * 2, id="call of a module"),
    ],
)
def test_a_patched_function_of_torch_counts(make, owner, name, function):
    before = identity_of(make())
    with patched(owner, name, function):
        assert identity_of(make()) != before
    assert identity_of(make()) == before is not None


@pytest.mark.parametrize(
    ("owner", "name", "function"),
    [
        pytest.param(math, "floor", math.ceil, id="module of C"),
        pytest.param(builtins, "abs", lambda number: number, id="builtin"),
    ],
)
def test_a_patched_function_of_python_counts(owner, name, function):
    before = identity_of(Calls())
    with patched(owner, name, function):
        assert identity_of(Calls()) != before


def from_environment(*args, **kwargs):
    """A function that cannot be compared, since it reads what is not in the module."""
    return os.environ["BACKEND_KWARGS_TEST_FACTOR"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(nn.Module, "smart_apply", id="a method that transformers adds to all modules"),
        pytest.param(torch.Tensor, "from_elsewhere", id="a method of tensors"),
    ],
)
def test_what_others_add_to_torch_does_not_count_where_no_code_reads_it(owner, name, monkeypatch):
    """As after a model of transformers was made: modules are as in a process without it."""
    before = [identity_of(make()) for make in (Configured, lambda: nn.MultiheadAttention(8, 2))]
    monkeypatch.setattr(owner, name, from_environment, raising=False)
    assert [identity_of(make()) for make in (Configured, lambda: nn.MultiheadAttention(8, 2))] == before
    assert None not in before


def test_a_patched_function_that_no_code_reads_makes_no_module_like_none(monkeypatch):
    """As lightning patches torch.compile: modules can still be compared with each other."""
    monkeypatch.setattr(torch, "compile", from_environment)
    assert identity_of(Configured()) == identity_of(Configured()) is not None


class Asks(nn.Module):
    """A module that calls a method which others add to tensors."""

    def forward(self, x):
        return x.from_elsewhere()


class Copies(nn.Module):
    """A module that calls a function which calls a method by name."""

    def forward(self, x):
        return copy.deepcopy(x)


@pytest.mark.parametrize(
    ("make", "owner", "name"),
    [
        pytest.param(Asks, torch.Tensor, "from_elsewhere", id="by the user's code"),
        pytest.param(
            lambda: nn.MultiheadAttention(8, 2), nn.functional, "_in_projection_packed", id="by a function of torch"
        ),
        pytest.param(lambda: nn.TransformerEncoderLayer(8, 2, 16), torch, "relu", id="by a layer of torch"),
        pytest.param(nn.ReLU, nn.Module, "__getattr__", id="by Python itself"),
        pytest.param(Copies, torch.Tensor, "__deepcopy__", id="by a function of Python's library"),
    ],
)
def test_a_patched_function_that_is_read_and_cannot_be_compared_makes_a_module_like_none(
    make, owner, name, monkeypatch
):
    module = make()
    known = identity_of(module)
    monkeypatch.setattr(owner, name, from_environment, raising=False)
    result = identity_of(module)
    monkeypatch.undo()
    assert result is None
    assert known is not None


def test_a_layer_with_a_patched_forward_counts():
    before = identity_of(nn.Sequential(nn.ReLU()))
    with patched(nn.ReLU, "forward", lambda self, x: x):
        assert identity_of(nn.Sequential(nn.ReLU())) != before


def test_a_hook_of_all_modules_counts():
    before = identity_of(nn.ReLU())
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        assert identity_of(nn.ReLU()) != before
    finally:
        handle.remove()
    assert identity_of(nn.ReLU()) == before


def test_hooks_are_compared_by_their_order_and_not_by_their_number_in_the_process():
    def hooked(*factors):
        module = nn.Sequential(nn.ReLU())
        for factor in factors:
            module.register_forward_hook(Hook(factor))
        return identity_of(module)

    class Hook(Scale):
        def __call__(self, module, args, out):
            return out * self.factor

    assert hooked(2.0, 3.0) == hooked(2.0, 3.0) != hooked(3.0, 2.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1, True), (1, 1.0), (1.0, 1 + 0j), ("1", 1), ((1,), [1])],
    ids=["sign of zero", "bool", "float", "complex", "text", "list"],
)
def test_numbers_are_compared_with_their_type_and_sign(one, other):
    assert identity_of(Applies(torch.sin, number=one)) != identity_of(Applies(torch.sin, number=other))


def test_nan_equals_nan():
    same = [identity_of(Applies(torch.sin, number=float("nan"))) for _ in range(2)]
    assert same[0] == same[1] is not None


def test_the_default_dtype_counts():
    before = identity_of(nn.ReLU())
    torch.set_default_dtype(torch.float64)
    try:
        assert identity_of(nn.ReLU()) != before
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_identity_is_the_same_in_every_process():
    """Neither addresses nor the seed of Python's hashes matter, which is the order of sets."""
    program = """
        import json, sys
        sys.path.insert(0, sys.argv[1])
        from tests.bundles.unlike_modules import COMPARED
        from backend_kwargs.bundles.identity.walk import identity_of
        print(json.dumps({name: identity_of(make(2.0)) for name, make in COMPARED.items()}))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), Path(__file__).parents[2]]
    printed = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in "12"
    ]
    first, second = map(json.loads, printed)
    assert first == second
    assert None not in first.values()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda module: setattr(module, "count", 1), id="number"),
        pytest.param(lambda module: module.function.__dict__.update(factor=3.0), id="attribute of an object"),
        pytest.param(lambda module: module.seen.append(1), id="list"),
        pytest.param(lambda module: module.unknown.__dict__.update(count=1), id="object that cannot be compared"),
    ],
)
def test_a_changed_attribute_changes_the_state(change):
    module = Applies(Scale(2.0), seen=[], count=0, unknown=type("Own", (Exception,), {})())
    before = state_of(module)
    module(torch.ones(4))
    assert state_of(module) == before
    change(module)
    assert state_of(module) != before


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda name: operator.attrgetter(f"mT.{name}"), id="attrgetter"),
        pytest.param(operator.methodcaller, id="methodcaller"),
    ],
)
def test_a_name_that_is_computed_is_not_compared(read):
    """`operator` reads attributes whose names no code has, so anything may have been put there."""
    assert identity_of(Reads(read("relu"))) is None


class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x):
        return self.read(x)


class Pair(NamedTuple):
    first: float
    second: float


def test_fields_of_a_named_tuple_are_told_apart():
    """What reads the first field is not like what reads the second."""
    first, second, again = (identity_of(Applies(vars(Pair)[name])) for name in ("first", "second", "first"))
    assert first is not None
    assert second is not None
    assert first == again != second
