"""The keys of a decision, field by field: each is varied alone, and the test says which of the keys have it.

`key` is that of the stored decision, `graph` is shared by other sizes, and `scope` by graphs that inherit a winner.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace

import pytest
import torch
from torch.fx import symbolic_trace
from torch.nn.attention import SDPBackend, sdpa_kernel

from backend_kwargs.auto import cache_key, decide
from backend_kwargs.auto.request import Request, Tools
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.backends import CapturedGraph, declared
from backend_kwargs.options.requirements import installed_version, machine
from tests.auto.graphs import chain

X = torch.randn(8, 64)
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]


def keys(fn=chain, inputs=(X,), fixed=None, rewrites=(), template=None, **settings):
    """Return the three keys of a question."""
    tools = Tools(lambda name: template or {}, lambda options: {}, fixed or {}, rewrites)
    asked = decide._Question(
        Request(CapturedGraph(symbolic_trace(fn), inputs), RaceSettings(**settings), pytest.fail, tools)
    )
    return {"key": asked.key, "graph": asked.graph, "scope": asked.scope}


def differing(one, other):
    return {name for name in one if one[name] != other[name]}


class Weighted(torch.nn.Module):
    """A module with a parameter in its graph."""

    def __init__(self, *shape, dtype=torch.float32):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype))

    def forward(self, x):
        return x * self.weight


def static(x):
    x._dynamo_static_input_type = "unguarded"
    return x


ALL, COMPUTATION, EXACT = {"key", "graph", "scope"}, {"key", "graph"}, {"key"}
# What the question has otherwise, where it has it, and what both have.
GIVEN = {
    "operator": ({"fn": lambda x: torch.sigmoid(x * 2 + 1).sum(-1)}, COMPUTATION, {}),
    "order of operators": ({"fn": lambda x: (torch.relu(x * 2) + 1).sum(-1)}, COMPUTATION, {}),
    "order of arguments": ({"fn": lambda x: 2 - x}, COMPUTATION, {"fn": lambda x: x - 2}),
    "number": ({"fn": lambda x: torch.relu(x * 3 + 1).sum(-1)}, COMPUTATION, {}),
    "type of a number": ({"fn": lambda x: torch.relu(x * 2.0 + 1).sum(-1)}, COMPUTATION, {}),
    "keyword": ({"fn": lambda x: x.sum(dim=0)}, COMPUTATION, {"fn": lambda x: x.sum(dim=-1)}),
    "name of a keyword": ({"fn": lambda x: x.std(correction=1)}, COMPUTATION, {"fn": lambda x: x.std(unbiased=1)}),
    "result": ({"fn": lambda x: (x.sin(), x)}, COMPUTATION, {"fn": lambda x: (x, x.sin())}),
    "shape of a parameter": ({"fn": Weighted(1)}, COMPUTATION, {"fn": Weighted(64)}),
    "dtype of a parameter": ({"fn": Weighted(64, dtype=torch.float64)}, COMPUTATION, {"fn": Weighted(64)}),
    "class of a module": ({"fn": torch.nn.Sequential(torch.nn.ReLU())}, COMPUTATION, {"fn": torch.nn.Tanh()}),
    "rows": ({"inputs": (torch.randn(4, 64),)}, EXACT, {}),
    "columns": ({"inputs": (torch.randn(8, 32),)}, EXACT, {}),
    "strides": ({"inputs": (X.t().contiguous().t(),)}, EXACT, {}),
    "layout": ({"inputs": (X.to_sparse(),)}, EXACT, {}),
    "rank": ({"inputs": (X[None],)}, COMPUTATION, {}),
    "dtype": ({"inputs": (X.double(),)}, COMPUTATION, {}),
    "device": ({"inputs": (X.to("meta"),)}, ALL, {}),
    "gradient": ({"inputs": (X.clone().requires_grad_(),)}, COMPUTATION, {}),
    "static address": ({"inputs": (static(X.clone()),)}, COMPUTATION, {}),
    "type of an input": ({"inputs": (3.0,)}, COMPUTATION, {"inputs": (3,)}),
    "options": ({"fixed": {"epilogue_fusion": False}}, ALL, {}),
    "value of an option": ({"fixed": {"epilogue_fusion": False}}, ALL, {"fixed": {"epilogue_fusion": True}}),
    "rewrites": ({"rewrites": ("packed",)}, ALL, {}),
    "options of a template": ({"template": {"debug": True}}, ALL, {"candidates": ["mine"]}),
    "options of a compiler": ({"candidates": ["tmpl-tvm[opt_level=1]"]}, ALL, {"candidates": ["tmpl-tvm"]}),
}
# Each option of a race, alone.
SETTINGS = {
    "objective": ("memory", ALL, {}),
    "effort": ("full", ALL, {}),
    "candidates": (["cpp_wrapper"], ALL, {}),
    "tolerance": (1e-5, ALL, {}),
    "precision": (("fp16",), ALL, {"precision": ("bf16",), "max_error": 0.1}),
    "max_error": (0.2, ALL, {"precision": ("bf16",), "max_error": 0.1}),
    "store": ("other.sqlite", {"scope"}, {}),
    # They say whether and when to race, not what is the fastest.
    "budget_s": (1.0, set(), {}),
    "process_budget_s": (1.0, set(), {}),
    "most_races": (9, set(), {}),
    "race": ("always", set(), {}),
    "race_custom_ops": (False, set(), {}),
    "on_progress": (print, set(), {}),
}


@pytest.mark.parametrize(("changed", "having", "base"), GIVEN.values(), ids=GIVEN)
def test_what_is_given(changed, having, base):
    """Each part of the graph, of its inputs and of the question, alone."""
    assert differing(keys(**base), keys(**base | changed)) == having


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name):
    """What the race looks for is part of the keys; how long it may take is not."""
    value, having, base = SETTINGS[name]
    assert differing(keys(**base), keys(**base | {name: value})) == having


def test_every_setting_is_varied():
    """A new option of `auto` has a row above, which says whether it is part of the keys."""
    assert {*SETTINGS} == {field.name for field in fields(RaceSettings)} - {"auto"}


def set_to(set_, value, before):
    """Return a context that calls `set_` with a value, and then with the one from before."""

    @contextmanager
    def changed():
        set_(value)
        try:
            yield
        finally:
            set_(before)

    return changed


def precision_of(kind):
    before = kind.fp32_precision
    return set_to(lambda value: setattr(kind, "fp32_precision", value), "ieee" if before == "tf32" else "tf32", before)


def without(kernel):
    return lambda: sdpa_kernel([each for each in KERNELS if each is not kernel])


def autocast_of_a_gpu(dtype=torch.float16):
    """Return autocast's state for CUDA; `torch.autocast` itself is inert without a GPU."""
    before = torch.get_autocast_dtype("cuda")

    def set_(state):
        torch.set_autocast_enabled("cuda", state[0])
        torch.set_autocast_dtype("cuda", state[1])

    return set_to(set_, (True, dtype), (False, before))


# A state of torch, and the state that it differs from.
STATES = {
    "no_grad": (torch.no_grad, nullcontext),
    "inference mode": (torch.inference_mode, torch.no_grad),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), nullcontext),
    "dtype of autocast": (lambda: torch.autocast("cpu", torch.float16), lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast of a GPU": (autocast_of_a_gpu(), nullcontext),
    "dtype of a GPU's autocast": (autocast_of_a_gpu(torch.bfloat16), autocast_of_a_gpu()),
    "deterministic": (set_to(torch.use_deterministic_algorithms, True, False), nullcontext),
    "float32 of products": (precision_of(torch.backends.cuda.matmul), nullcontext),
    "float32 of convolutions": (precision_of(torch.backends.cudnn.conv), nullcontext),
    "float32 of oneDNN": (precision_of(torch.backends.mkldnn.matmul), nullcontext),
    **{f"attention without {kernel.name}": (without(kernel), nullcontext) for kernel in KERNELS},
    "order of attention's kernels": (
        lambda: sdpa_kernel(KERNELS[::-1], set_priority=True),
        lambda: sdpa_kernel(KERNELS, set_priority=True),
    ),
}


@pytest.mark.parametrize(("state", "other"), STATES.values(), ids=STATES)
def test_states_of_torch(state, other):
    """Each part of torch's state that affects how the graph computes, alone."""
    with other():
        before = keys()
    with state():
        assert differing(before, keys()) == ALL
    with other():
        assert keys() == before


def release(name):
    def change(patch):
        patch.setattr(cache_key, "_versions", cache_key._versions.__wrapped__)
        patch.setattr(cache_key, "installed_version", lambda each: "0" if each == name else installed_version(each))

    return change


def a_gpu(name):
    def change(patch):
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_name", lambda: name)

    return change


def probed(**properties):
    return lambda patch: patch.setattr(cache_key, "probed", lambda: replace(machine(), **properties))


def patched(place, name, value):
    return lambda patch: patch.setattr(place, name, lambda: value)


# A property of the machine, and the one that it differs from.
MACHINES = {
    "torch": (release("torch"), lambda patch: None),
    "triton": (release("triton"), lambda patch: None),
    "backend-kwargs": (release("backend-kwargs"), lambda patch: None),
    "GPU": (a_gpu("one"), a_gpu("other")),
    "CUDA": (probed(cuda="1.0"), probed(cuda="1.1")),
    "driver": (probed(driver="1.0"), probed(driver="1.1")),
    "threads": (patched(torch, "get_num_threads", 1), patched(torch, "get_num_threads", 2)),
    "instructions": (patched(torch.backends.cpu, "get_cpu_capability", "AVX9"), lambda patch: None),
    "ranks": (patched(cache_key, "ranks", 2), lambda patch: None),
}


@pytest.mark.parametrize(("here", "there"), MACHINES.values(), ids=MACHINES)
def test_machines(monkeypatch, here, there):
    """Each property of the machine and its releases, alone; a computation has the same name on every machine."""
    found = []
    for change in (there, here):
        with monkeypatch.context() as patch:
            change(patch)
            found.append(keys())
    assert differing(*found) == EXACT


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda patch: patch.setattr(decide, "STEPS", decide.STEPS[1:]), id="steps"),
        pytest.param(
            lambda patch: patch.setattr(decide, "fingerprint", lambda names: "other"), id="source of a rewrite"
        ),
        pytest.param(
            lambda patch: patch.setattr(declared, "installed_version", lambda name: "0"), id="release of a compiler"
        ),
    ],
)
def test_what_a_race_would_try(monkeypatch, change):
    """The table of steps, the sources of rewrites and the releases of other compilers, alone."""
    given = {"rewrites": ("packed",), "candidates": ["tmpl-tvm"]}
    before = keys(**given)
    change(monkeypatch)
    assert differing(before, keys(**given)) == ALL


def test_the_text_of_a_step_stays():
    """A key has each step as the first release wrote it, so that stored decisions stay valid."""
    (step,) = [step for step in decide.STEPS if step.name == "padded"]
    assert cache_key.spelled([step]) == (
        "[RaceCandidate(name='padded', options={'force_shape_pad': True}, can_gain=<function <lambda> at >, over=True, "
        "without=(), shares={'unaligned': 0.3}, costs=Costs(compiles=1.0, op_s=0.0, product_s=0.0, products=None, "
        "norm_s=0.0), effort='quick', rank=1, saved_s=0.0, gain=None, compiler='')]"
    )
