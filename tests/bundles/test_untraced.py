"""deploy(guards=False) of a bundle: dynamo's bytecode runs without tracing the module, if that is right."""

import json
import pickle
import textwrap
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

import backend_kwargs as bk
from backend_kwargs import BackendKwargsError, BackendKwargsWarning, CompiledModule
from backend_kwargs.bundles.deploying import require_comparable
from backend_kwargs.bundles.input_check import InputCheck
from backend_kwargs.bundles.samples import described
from tests import forks
from tests.bundles.small_module import scaled
from tests.bundles.unlike_modules import COMPARED, Applies

UNTRACED = "served without tracing the module"


class Pair(torch.nn.Module):
    """Two outputs in a dict, one through a layer, with a keyword and dropout."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)

    def forward(self, x, *, scale=1.0):
        hidden = self.dropout(self.linear(x)) * scale
        return {"hidden": hidden, "sum": (hidden.sum(), x)}


class Breaking(torch.nn.Module):
    """A module with two graphs."""

    def forward(self, x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()


def saved(module, data, path, **fields):
    CompiledModule(bk.CompileConfig(**fields)).build(module, [data]).save(path)
    return path


def deployed(path, module):
    loaded = CompiledModule.load(path, module, trust=True)
    loaded.deploy(guards=False)
    return loaded


def frames(path):
    return [graph["frame"] for graph in json.loads((path / "manifest.json").read_text())["graphs"]]


@pytest.mark.parametrize(
    ("module", "fields"),
    [
        pytest.param(scaled, {}, id="one tensor"),
        pytest.param(lambda: Pair().eval(), {"fullgraph": True}, id="keywords and a dict of outputs"),
        pytest.param(scaled, {"autocast_enabled": True, "autocast_dtype": "bfloat16"}, id="autocast"),
        pytest.param(scaled, {"options": {"cpp_wrapper": True}}, id="C++ wrapper"),
    ],
)
def test_a_module_of_one_graph_is_not_traced(module, fields, x, tmp_path):
    """Results equal eager's, with the bundle's weights and with changed ones, and dynamo traces nothing."""
    torch.manual_seed(1)
    original, other = module(), module()
    data = ((x,), {"scale": 2.0}) if isinstance(original, Pair) else ((x,), {})
    loaded = deployed(saved(original, data, tmp_path / "bundle", **fields), other)
    counters.clear()
    assert UNTRACED in loaded.describe()
    tolerance = 0.05 if "autocast_enabled" in fields else 1e-5
    for _ in range(2):
        torch.testing.assert_close(
            loaded(*data[0], **data[1]), other(*data[0], **data[1]), rtol=tolerance, atol=tolerance
        )
        with torch.no_grad():
            other.linear.weight.mul_(2.0)
    assert not counters["frames"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda module: module.train(), id="in training mode"),
        pytest.param(lambda module: setattr(module, "linear", torch.nn.Sequential(module.linear)), id="another layer"),
        pytest.param(lambda module: setattr(module.dropout, "p", 0.25), id="another number"),
        pytest.param(lambda module: setattr(module, "sizes", {"heads": (2, 4)}), id="another mapping"),
        pytest.param(lambda module: setattr(module, "act", torch.tanh), id="another function"),
        pytest.param(lambda module: module.linear.register_forward_hook(lambda *_: None), id="a hook"),
        pytest.param(lambda module: setattr(module, "linear", renamed(module.linear)), id="other code of a class"),
        pytest.param(lambda module: setattr(module.dropout, "weight", module.linear.weight), id="a shared parameter"),
        pytest.param(lambda module: transposed(module.linear), id="other strides"),
    ],
)
def test_another_module_is_traced(change, x, tmp_path):
    """The bytecode of a module is not used for one in another mode, with other layers or with other attributes."""
    path = saved(Pair().eval(), x, tmp_path / "bundle")
    loaded = CompiledModule.load(path, other := Pair().eval(), trust=True)
    change(other)
    loaded.deploy(guards=False)
    assert UNTRACED not in loaded.describe()


def renamed(linear):
    """A layer whose class has the name of another class, as after an edit of its source."""

    class Linear(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    Linear.__qualname__ = "Linear"
    linear.__class__ = Linear
    return linear


def transposed(linear):
    linear.weight = torch.nn.Parameter(linear.weight.detach().t().contiguous().t())


class Choosing(torch.nn.Module):
    """A module whose results depend on an attribute that is a function, a set, or an object in objects."""

    def __init__(self, chosen):
        super().__init__()
        self.linear, self.chosen = torch.nn.Linear(8, 8), chosen

    def forward(self, x):
        if isinstance(self.chosen, set):
            return self.linear(x) * (2 if "double" in self.chosen else 3)
        return self.linear(x) * self.chosen["a"]["b"]["c"]["d"] if isinstance(self.chosen, dict) else self.chosen(x)


def times(factor):
    return lambda x: x * factor


@pytest.mark.parametrize(
    ("chosen", "other"),
    [
        pytest.param(lambda x: x * 2, lambda x: x * 3, id="lambda"),
        pytest.param(times(2), times(3), id="closure"),
        pytest.param(partial(torch.mul, other=2), partial(torch.mul, other=3), id="partial"),
        pytest.param({"double"}, {"triple"}, id="set"),
        pytest.param({"a": {"b": {"c": {"d": 2}}}}, {"a": {"b": {"c": {"d": 3}}}}, id="nested mapping"),
    ],
)
def test_another_choice_gives_its_own_results(chosen, other, x, tmp_path):
    """Functions are compared by their code and what they close over, sets and mappings by their items."""
    path = saved(Choosing(chosen).eval(), x, tmp_path / "bundle")
    same, module = Choosing(chosen).eval(), Choosing(other).eval()
    torch.testing.assert_close(deployed(path, module)(x), module(x).detach())
    assert UNTRACED in deployed(path, same).describe()


@pytest.mark.parametrize("name", ["callable object", "list of a class", "shared activation", "forward hook"])
def test_a_module_that_differs_in_one_place_gives_its_own_results(name, tmp_path):
    """Whatever a module's result depends on: `test_identity.py` has them all."""
    x = torch.ones(4)
    path = saved(COMPARED[name](2.0), x, tmp_path / "bundle")
    other, same = COMPARED[name](3.0), COMPARED[name](2.0)
    torch.testing.assert_close(deployed(path, other)(x), other(x))
    assert UNTRACED in deployed(path, same).describe()


def test_a_module_is_traced_if_the_default_dtype_is_another(tmp_path):
    """A number of Python and an integer give a result of the default dtype."""
    x = torch.arange(8)
    path = saved(Applies(third), x, tmp_path / "bundle")
    torch.set_default_dtype(torch.float64)
    try:
        assert deployed(path, Applies(third))(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def third(x):
    return x / 3


class Adding(torch.nn.Module):
    """A module that writes to its first input."""

    def forward(self, x, y):
        x.mul_(2)
        return x + y


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(lambda x: (x, x), id="one tensor twice"),
        pytest.param(lambda x: (x[1:], x[:-1]), id="tensors that overlap"),
    ],
)
def test_inputs_that_share_memory_with_one_that_is_written_are_refused(inputs, bundle_of_adding):
    loaded = deployed(bundle_of_adding, Adding())
    with pytest.raises(BackendKwargsError) as caught:
        loaded(*inputs(torch.ones(4 + (inputs(torch.ones(4))[0].numel() == 3))))
    assert str(caught.value) == (
        "Inputs args[0] and args[1] must not share memory, as the module writes to one of them: pass a clone()."
    )


def test_inputs_in_one_storage_may_be_written_if_they_do_not_overlap(bundle_of_adding):
    memory = torch.ones(8)
    torch.testing.assert_close(deployed(bundle_of_adding, Adding())(memory[:4], memory[4:]), torch.full((4,), 3.0))


@pytest.fixture(scope="module")
def bundle_of_adding(tmp_path_factory):
    path = tmp_path_factory.mktemp("adding") / "bundle"
    CompiledModule().build(Adding(), [(torch.ones(4), torch.ones(4))]).save(path)
    return path


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.ones(1, 3).expand(4, 3), id="expanded"),
        pytest.param(torch.ones(4, 8)[:, :4], id="sliced"),
        pytest.param(torch.arange(6.0).as_strided((4, 3), (1, 1)), id="overlapping"),
    ],
)
def test_samples_keep_their_strides(x, tmp_path):
    """clone() would change these strides, and the code for others would be built."""
    loaded = deployed(saved(Applies(third), x, tmp_path / "bundle"), Applies(third))
    torch.testing.assert_close(loaded(x), x / 3)
    assert UNTRACED in loaded.describe()


class Own(torch.Tensor):
    """A tensor that may be anything."""


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        pytest.param(torch.ones(4).to_sparse(), "torch.Tensor that is not dense", id="sparse"),
        pytest.param(torch.ones(4).as_subclass(Own), f"{__name__}.Own", id="subclass"),
    ],
)
def test_a_sample_that_is_not_dense_needs_guards(x, kind):
    with pytest.raises(BackendKwargsError) as caught:
        require_comparable([described(((x,), {}))])
    assert str(caught.value) == (
        f"deploy(guards=False) must have samples of dense tensors, numbers and texts, got one with a {kind}, "
        "which only dynamo's guards can check."
    )


def test_a_tensor_whose_sign_or_imaginary_part_is_a_bit_is_not_dense(tmp_path):
    """Compiled code reads the memory of a tensor, in which conj() changes nothing."""
    conjugated = torch.full((4,), 1 + 2j).conj()
    check = InputCheck([described(((torch.ones(4),), {}))], torch.device("cpu"), dynamic=False, values=True)
    check((torch.ones(4),), {})
    with pytest.raises(BackendKwargsError, match="must be float32"):
        check((conjugated.imag,), {})


def test_a_sign_of_zero_is_part_of_the_sample(tmp_path):
    check = InputCheck([described(((0.0, float("nan")), {}))], torch.device("cpu"), dynamic=False, values=True)
    check((0.0, float("nan")), {})
    with pytest.raises(BackendKwargsError, match=r"Input args\[0\] must be 0.0, got -0.0"):
        check((-0.0, float("nan")), {})


def with_attribute(x):
    x.factor = 2
    return x


def unguarded(module, *args):
    named = {"owned": [*module.parameters(), *module.buffers()]}
    return InputCheck([described((args, {}))], torch.device("cpu"), dynamic=False, values=True, **named)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        pytest.param(torch.nn.Parameter, "that is a Parameter", id="parameter"),
        pytest.param(torch.Tensor.requires_grad_, "that requires a gradient", id="gradient"),
        pytest.param(with_attribute, "with the attributes ['factor']", id="attribute"),
    ],
)
@pytest.mark.parametrize("gradients", [True, False])
def test_without_guards_inputs_are_plain_tensors(change, got, gradients):
    """Samples are copied without these, and a module may read them, also after plain tensors have passed."""
    check = unguarded(scaled(), torch.ones(4))
    odd = change(torch.ones(4))
    with torch.set_grad_enabled(gradients):
        check((torch.ones(4),), {})
        with pytest.raises(BackendKwargsError) as caught:
            check((odd,), {})
    wanted = "float32[4] on cpu with strides (1,)"
    assert str(caught.value) == f"Input args[0] must be {wanted}, got {wanted} {got}. Pass its detach()."


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(torch.ones(5), id="size"),
        pytest.param(torch.ones(8)[::2], id="stride"),
        pytest.param(torch.ones(4, dtype=torch.float64), id="dtype"),
        pytest.param(torch.ones(4, 1), id="dimension"),
        pytest.param(torch.ones(4, device="meta"), id="device"),
        pytest.param(torch.ones(4).to_sparse(), id="layout"),
        pytest.param(torch.full((4,), 1 + 2j).conj().imag, id="bit"),
        pytest.param([1.0] * 4, id="no tensor"),
    ],
)
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda mode: mode.__name__
)
@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
def test_each_input_is_compared_after_others_have_passed(other, mode, by_name):
    """Inputs like those of an earlier call are compared by guards, others with the samples again."""

    def called(x):
        return check((), {"x": x, "y": torch.ones(2)}) if by_name else check((x, torch.ones(2)), {})

    sample = ((), {"x": torch.ones(4), "y": torch.ones(2)}) if by_name else ((torch.ones(4), torch.ones(2)), {})
    check = InputCheck([described(sample)], torch.device("cpu"), dynamic=False, values=True)
    with mode():
        for _ in range(3):
            called(torch.ones(4))
        with pytest.raises(BackendKwargsError):
            called(other)
        called(torch.ones(4))


def test_without_guards_no_tensor_is_given_twice():
    """A module may compare its inputs with `is`."""
    x = torch.ones(4)
    check = unguarded(scaled(), x, x)
    for _ in range(2):
        check((x, x.clone()), {})
    with pytest.raises(BackendKwargsError) as caught:
        check((x, x), {})
    assert str(caught.value) == "Inputs args[0] and args[1] must not be one tensor: pass a clone()."


@pytest.mark.parametrize("at", [slice(None), slice(4, 8)], ids=["all of it", "a part of it"])
def test_without_guards_no_input_shares_memory_with_the_module(at):
    """A module may write to a buffer and then read its input."""
    module = scaled()
    check = unguarded(module, module.scale[at])
    for _ in range(2):
        check((module.scale[at].clone(),), {})
    with pytest.raises(BackendKwargsError) as caught:
        check((module.scale[at],), {})
    assert str(caught.value) == (
        "Input args[0] must not share memory with the module's parameters or buffers: pass a clone()."
    )


class Counting(torch.nn.Module):
    """A module whose calls count in a global."""

    def forward(self, x):
        COUNTED["calls"] += 1
        return x * COUNTED["calls"]


COUNTED = {"calls": 0}


def test_a_call_that_changes_a_global_is_followed_by_guards(tmp_path):
    """As for a counter of the module: each later call would return what the first one did."""
    built = CompiledModule(bk.CompileConfig(backend="eager")).build(Counting(), [torch.ones(4)])
    built.save(tmp_path / "bundle")
    loaded = deployed(tmp_path / "bundle", Counting())
    COUNTED["calls"] = 0
    with pytest.warns(BackendKwargsWarning) as warned:
        first = loaded(torch.ones(4))
    assert "The module changes what it reads when it is called, so it is served with dynamo's guards." in [
        str(each.message) for each in warned
    ]
    assert [each[0].item() for each in (first, loaded(torch.ones(4)), loaded(torch.ones(4)))] == [1, 2, 3]


class Printing(torch.nn.Module):
    """A module with a graph break in front of its graph."""

    def forward(self, x, factor):
        torch._dynamo.graph_break()
        return x.sin() * factor


class PrintingInside(torch.nn.Module):
    """A module with a graph in an inner function."""

    def forward(self, x, factor):
        torch._dynamo.graph_break()
        return self.inner(factor, x)

    def inner(self, factor, x):
        return x.sin() * factor


@pytest.mark.parametrize("kind", [Printing, PrintingInside])
def test_bytecode_after_a_graph_break_is_not_kept(kind, tmp_path):
    """It takes other arguments than the module."""
    args = torch.ones(4), torch.full((4,), 2.0)
    path = saved(kind(), args, tmp_path / "bundle")
    assert frames(path) == [None]
    torch.testing.assert_close(deployed(path, kind())(*args), kind()(*args))


def test_a_module_that_differs_in_an_attribute_gives_its_own_results(x, tmp_path):
    """Exact GELU's bytecode is not run on a module of the same types and weights with tanh-GELU."""
    path = saved(torch.nn.Sequential(torch.nn.GELU()).eval(), 3 * x, tmp_path / "bundle")
    other = torch.nn.Sequential(torch.nn.GELU(approximate="tanh")).eval()
    torch.testing.assert_close(deployed(path, other)(3 * x), other(3 * x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "fields"),
    [
        pytest.param(Breaking, {}, id="two graphs"),
        pytest.param(scaled, {"options": {"freezing": True}}, id="frozen parameters"),
        pytest.param(scaled, {"backend": "eager"}, id="another compiler"),
    ],
)
def test_other_modules_are_traced(module, fields, x, tmp_path):
    """If there is more than one graph, or more than its code to call, no bytecode is kept."""
    path = saved(module(), x, tmp_path / "bundle", **fields)
    assert not any(frames(path))
    loaded = deployed(path, module())
    torch.testing.assert_close(loaded(x), module()(x), rtol=1e-5, atol=1e-5)
    assert UNTRACED not in loaded.describe()


def test_bytecode_with_a_global_of_main_is_not_kept(tmp_path):
    """Bytecode that reads a global of __main__, which is another module when served, is not kept."""
    program = """
        import sys, torch, backend_kwargs as bk

        FACTOR = torch.tensor(3.0)

        class Scaling(torch.nn.Module):
            def forward(self, x):
                return x.sin() * FACTOR

        bk.CompiledModule().build(Scaling(), [torch.ones(4)]).save(sys.argv[1])
    """
    ran = forks.run("-c", textwrap.dedent(program), tmp_path / "bundle")
    assert ran.returncode == 0, ran.stderr
    assert frames(tmp_path / "bundle") == [None]


def test_bytecode_that_is_not_trusted_is_not_run(x, tmp_path):
    path = saved(scaled(), x, tmp_path / "bundle")
    assert all(frames(path))
    with pytest.warns(BackendKwargsWarning, match="it is not trusted"):
        loaded = CompiledModule.load(path, scaled())
    loaded.deploy(guards=False)
    assert UNTRACED not in loaded.describe()


def test_bytecode_of_a_module_that_is_gone_gives_way_to_tracing(x, tmp_path):
    """If the bytecode needs a Python module that cannot be imported, a warning says so, and the module is traced."""
    loaded = CompiledModule.load(saved(scaled(), x, tmp_path / "bundle"), scaled(), trust=True)
    ((key, graph),) = loaded._built.graphs.items()
    frame = replace(pickle.loads(graph.frame), modules={"torch": "no_such_module"})
    loaded._built.graphs[key] = replace(graph, frame=pickle.dumps(frame))
    with pytest.warns(BackendKwargsWarning) as warned:
        loaded.deploy(guards=False)
    assert str(warned[0].message) == (
        "The bundle's bytecode does not load, and the module is traced: "
        "ModuleNotFoundError: No module named 'no_such_module'."
    )
    torch.testing.assert_close(loaded(x), scaled()(x).detach())
