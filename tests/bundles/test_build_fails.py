"""`build` where the module raises: one line, and nothing has changed."""

import copy
import tempfile

import pytest
import torch

import backend_kwargs as bk
from tests.bundles.small_module import Scaled


class Raising(Scaled):
    """Counts its calls, and raises for inputs of one row."""

    def __init__(self, error):
        super().__init__()
        self.error, self.calls = error, 0

    def forward(self, x):
        self.calls += 1
        if len(x) == 1:
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(KeyError("no layer\nof this name"), r"KeyError: 'no layer\nof this name'", id="two lines"),
        pytest.param(RuntimeError("size"), "RuntimeError: size", id="torch's"),
        pytest.param(SystemExit(3), "SystemExit: 3", id="exit"),
        pytest.param(RecursionError("deep"), "RecursionError: deep", id="recursion"),
    ],
)
def test_the_users_error_is_one_line(tmp_path, monkeypatch, error, said):
    """The error names the sample and the user's error, whose traceback is its cause; nothing is left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    module, made = Raising(error).eval(), bk.CompiledModule()
    before, drawn = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    with pytest.raises(bk.BackendKwargsError) as raised:
        made.build(module, [torch.randn(4, 8, generator=torch.Generator()), torch.ones(1, 8)])
    assert str(raised.value) == f"The module fails on sample 1 in eager: {said}."
    assert type(raised.value.__cause__) is type(error)
    assert (made.state.value, module.calls) == ("init", 0)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert list(tmp_path.iterdir()) == []


def test_a_sample_that_needs_more_memory_than_there_is_is_one_line(tmp_path, monkeypatch):
    """Its elements share memory, and its results' would not fit; nothing is left behind, and another build works."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = bk.CompiledModule()
    with pytest.raises(bk.BackendKwargsError) as raised:
        made.build(Scaled().eval(), [torch.zeros(1).expand(2**42, 8)])
    message = str(raised.value)
    assert message.startswith("The module fails on sample 0 in eager: RuntimeError: ")
    assert "you tried to allocate 140737488355328 bytes" in message
    assert message.isprintable()
    assert made.state.value == "init"
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_compiler_is_one_line():
    """The error of a backend is looked through torch's wrapping."""

    def backend(gm, example_inputs):
        raise NotImplementedError("no such operator")

    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.CompiledModule(bk.CompileConfig(backend=backend)).build(Scaled().eval(), [torch.randn(4, 8)])
    assert str(raised.value) == ("The module cannot be compiled for sample 0: NotImplementedError: no such operator.")
