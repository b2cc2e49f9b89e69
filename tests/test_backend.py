"""A backend is a value: compared, hashed, copied, printed, pickled, saved."""

import base64
import copy
import gc
import json
import pickle
from functools import partial

import pytest
import torch
import torch._dynamo.backends.registry
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from backend_kwargs import Backend, make_backend
from backend_kwargs.options.catalogue import inductor_options
from backend_kwargs.options.templates import BUILT_IN

INDUCTOR = "tmpl-inductor"


def target(gm, example_inputs, *, level=1, extra=None):
    return gm.forward


SIMPLE = {
    bool: st.booleans(),
    int: st.integers(-(2**40), 2**40),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=20),
    bool | None: st.none() | st.booleans(),
    int | None: st.none() | st.integers(),
    str | None: st.none() | st.text(max_size=20),
    list[str]: st.lists(st.text(max_size=9), max_size=3),
}
DRAWN = {name: SIMPLE[option.type] for name, option in inductor_options().items() if option.type in SIMPLE}
# cuda.* and xpu.* hold unread copies of cutlass.*, which are refused; `auto` refuses to leave out CUDA-graph trees.
TAKEN = sorted(name for name in DRAWN if not name.startswith(("cuda.", "xpu.", "triton.cudagraph_trees")))
OPTION_DICTS = st.lists(st.sampled_from(TAKEN), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: DRAWN[name] for name in names})
)
SPECS = st.lists(st.sampled_from([*BUILT_IN]), max_size=2, unique=True).map(
    lambda names: f"{INDUCTOR}:{'+'.join(names)}" if names else INDUCTOR
)


@st.composite
def backends(draw):
    return make_backend(draw(SPECS), draw(OPTION_DICTS))


# The fixture round each test resets names, and these tests leave none behind. Contradicting templates warn.
of_any_backend = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
contradictions_are_fine = pytest.mark.filterwarnings("ignore::backend_kwargs.BackendKwargsWarning")


def test_catalogue_gives_enough_to_draw():
    """The random backends below are drawn from hundreds of real options."""
    assert len(TAKEN) > 250


@contradictions_are_fine
@of_any_backend
@given(backends())
@example(make_backend(f"{INDUCTOR}:auto", budget_s=float("inf")))
def test_repr_makes_it_again(b):
    """Evaluating a backend's repr gives an equal backend."""
    assert eval(repr(b)) == b


@contradictions_are_fine
@of_any_backend
@given(backends())
def test_config_makes_it_again(b):
    """to_config and from_config are inverse, also through JSON and its base64."""
    text = json.dumps(b.to_config())
    forms = (b.to_config(), text, base64.b64encode(text.encode()).decode(), base64.encodebytes(text.encode()).decode())
    assert [Backend.from_config(form, trust=True) for form in forms] == [b] * 4


@contradictions_are_fine
@of_any_backend
@given(backends())
def test_pickle_makes_it_again(b):
    """Pickling a backend gives an equal one."""
    assert pickle.loads(pickle.dumps(b)) == b


@contradictions_are_fine
@of_any_backend
@given(backends(), backends())
def test_equal_backends_hash_and_write_alike(a, b):
    """For any two backends equality, key and config agree; equal ones have the same hash."""
    assert (a == b) == (a.key() == b.key()) == (a.to_config() == b.to_config())
    assert a != b or hash(a) == hash(b)
    again = make_backend(a.spec, dict(a.options))
    assert (again, hash(again), again.key()) == (a, hash(a), a.key())


def test_order_of_options_does_not_matter():
    """Options in another order give an equal backend with the same key."""
    a = make_backend(INDUCTOR, {"freezing": True, "max_autotune": True})
    b = make_backend(INDUCTOR, {"max_autotune": True, "freezing": True})
    assert (a, hash(a), a.key(), repr(a.to_config())) == (b, hash(b), b.key(), repr(b.to_config()))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param((INDUCTOR,), (f"{INDUCTOR}:default",), id="templates"),
        pytest.param((INDUCTOR,), ("inductor",), id="name"),
        pytest.param((INDUCTOR, {"freezing": True}), (INDUCTOR, {"freezing": False}), id="value"),
        pytest.param((INDUCTOR, {"freezing": False}), (INDUCTOR,), id="default-said"),
        pytest.param((target, {"level": 1}), (target, {"level": True}), id="type"),
        pytest.param((target, {"extra": [1]}), (target, {"extra": (1,)}), id="container"),
        pytest.param(("eager",), ("aot_eager",), id="function"),
    ],
)
def test_unequal(a, b):
    """Backends that differ in name, templates, or the value or type of an option are unequal, both ways."""
    a, b = make_backend(*a), make_backend(*b)
    assert a != b
    assert b != a


def test_unequal_to_anything_else():
    """A backend equals no string and no function."""
    assert make_backend("eager") != "eager"
    assert make_backend(target) != target


def test_two_spellings_of_one_function_are_equal():
    """A function given by name or as an object is the same backend."""
    a, b = make_backend(target, level=2), make_backend(f"{__name__}:target", level=2)
    assert (a, hash(a)) == (b, hash(b))


@pytest.mark.parametrize(
    "value",
    [pytest.param([{"a": {1}}], id="nested"), pytest.param(torch.ones(2), id="tensor"), pytest.param({}, id="mapping")],
)
def test_unhashable_values(value):
    """Backends with unhashable option values can be compared and hashed."""
    a, b = (make_backend(target, extra=copy.deepcopy(value)) for _ in range(2))
    assert (a, hash(a)) == (b, hash(b))
    assert a != make_backend(target, extra=torch.ones(3))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda b: copy.deepcopy({"compile": [b]})["compile"][0]])
def test_copies_are_itself(copied):
    """A copy of a backend is the backend itself, also with options that cannot be copied."""
    b = make_backend(target, extra=(i for i in range(3)))
    assert copied(b) is b


def test_the_callers_dict_stays():
    """The caller's dict is neither kept nor changed."""
    mine = {"extra": [1]}
    b = make_backend(target, mine)
    mine["extra"].append(2)
    mine["level"] = 3
    assert dict(b.options) == {"extra": [1]}
    make_backend(target, mine)
    assert mine == {"extra": [1, 2], "level": 3}


def test_options_are_read_only():
    """Options can be read but not set."""
    with pytest.raises(TypeError, match="does not support item assignment"):
        make_backend(f"{INDUCTOR}:freezing").options["freezing"] = False


def test_options_hold_copies():
    """Changing a list returned by `options` does not change the backend."""
    b = make_backend(target, extra=[1])
    b.options["extra"].append(2)
    assert dict(b.options) == {"extra": [1]}


def test_interned():
    """A plain spec returns the same object each time, which dynamo's guard compares fastest."""
    assert make_backend(f"{INDUCTOR}:freezing") is make_backend(f"{INDUCTOR}:freezing")
    assert make_backend("eager") is make_backend("eager")
    assert make_backend("eager") is not make_backend(INDUCTOR)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        pytest.param((INDUCTOR,), "make_backend('tmpl-inductor')", id="plain"),
        pytest.param((f"{INDUCTOR}:aten",), "make_backend('tmpl-inductor:aten')", id="template"),
        pytest.param((INDUCTOR, {"template": "aten"}), "make_backend('tmpl-inductor:aten')", id="template-as-option"),
        pytest.param(
            (f"{INDUCTOR}:aten", {"template": "freezing"}), "make_backend('tmpl-inductor:aten+freezing')", id="both"
        ),
        pytest.param(
            (f"{INDUCTOR}:freezing", {"freezing": True}), "make_backend('tmpl-inductor:freezing')", id="as-the-template"
        ),
        pytest.param(
            (f"{INDUCTOR}:freezing", {"freezing": False}),
            "make_backend('tmpl-inductor:freezing', {'freezing': False})",
            id="against-the-template",
        ),
        pytest.param(
            (INDUCTOR, {"mode": "reduce-overhead"}),
            "make_backend('tmpl-inductor', {'triton.cudagraphs': True})",
            id="mode",
        ),
        pytest.param(("dynamo:inductor",), "make_backend('dynamo:inductor')", id="forced"),
        pytest.param((target, {"level": 2}), f"make_backend('{__name__}:target', {{'level': 2}})", id="function"),
        pytest.param((partial(target, level=2),), f"make_backend('{__name__}:target', {{'level': 2}})", id="partial"),
    ],
)
def test_repr(args, text):
    """The repr is the shortest make_backend call that gives an equal backend."""
    b = make_backend(*args)
    assert repr(b) == text
    assert eval(text) == b


def test_repr_of_what_has_no_name_does_not_evaluate():
    """If no spec can find the function, the repr shows the function, and cannot be evaluated."""
    with pytest.raises(SyntaxError):
        eval(repr(make_backend(lambda graph, inputs=None: graph)))


def test_get_compiler_config_is_as_torchs():
    """It returns the whole patched config, as torch's wrapper for "inductor" does with the same options."""
    options = {"freezing": True, "triton.cudagraphs": False}
    torchs = torch._TorchCompileInductorWrapper(None, options, None).get_compiler_config()
    ours = make_backend(f"{INDUCTOR}:freezing", {"triton.cudagraphs": False}).get_compiler_config()
    assert ours == torchs


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        pytest.param(INDUCTOR, INDUCTOR, id="plain"),
        pytest.param(f"{INDUCTOR}:freezing", f"{INDUCTOR}:freezing", id="template"),
        pytest.param(f"{INDUCTOR}:freezing+aten", INDUCTOR, id="composed"),
        pytest.param("inductor", "inductor", id="inductor"),
        pytest.param("inductor:freezing", "inductor", id="inductor-with-template"),
        pytest.param("eager", "eager", id="eager"),
    ],
)
def test_names_are_registered_ones(spec, name):
    """The compiler's name is in dynamo's registry."""
    b = make_backend(spec)
    assert (b.__name__, b.compiler_name) == (name, name)


@pytest.mark.parametrize("spec", ["eager", "aot_eager", f"{INDUCTOR}:aten"])
def test_no_reference_to_a_parameter_is_left(spec, fresh_dynamo):
    """After a compile parameters can be swapped, since dynamo drops its references, with a value as with a name."""
    linear = torch.nn.Linear(4, 4)
    torch.compile(linear, backend=make_backend(spec))(torch.ones(2, 4))
    gc.collect()
    torch.utils.swap_tensors(linear.weight, torch.nn.Parameter(torch.zeros(4, 4)))
    assert linear.weight.sum() == 0


def test_a_compiled_value_equals_an_entry_of_dynamos_registry(fresh_dynamo):
    """torch 2.15 checks this before it drops its references; older releases check the name."""
    backend = make_backend("aot_eager")
    torch.compile(torch.nn.Linear(4, 4), backend=backend)(torch.ones(2, 4))
    assert backend in torch._dynamo.backends.registry._COMPILER_FNS.values()


def test_another_function_is_not_taken_for_a_registered_one(fresh_dynamo):
    """A backend of a user's function is not taken for a registered one."""
    backend = make_backend(own)
    torch.compile(torch.nn.Linear(4, 4), backend=backend)(torch.ones(2, 4))
    assert not torch._dynamo.backends.registry._is_registered_backend(backend)
    assert backend != make_backend("eager")


def own(gm, example_inputs):
    return gm.forward
