"""The keys of a decision, field by field: each is varied alone, and the test says which of the keys have it.

`key` is that of the stored decision, `graph` is shared by other sizes, and `scope` by graphs that inherit a winner.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace
from torch.nn.attention import SDPBackend, sdpa_kernel

from backend_kwargs import backends
from backend_kwargs.auto import candidates, machine
from backend_kwargs.auto.question import Question, Request
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.graphs import spelling
from backend_kwargs.rewrites import table
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.stores import Store
from tests.auto.graphs import chain

X = torch.randn(8, 64)
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]


def keys(fn=chain, inputs=(X,), fixed=None, rewrites=(), template=None, **settings):
    """Return the three keys of a question."""
    given = CapturedGraph(symbolic_trace(fn), inputs), RaceSettings(**settings), pytest.fail
    asked = Question(Request(*given, lambda name: template or {}, lambda options: {}, fixed or {}, rewrites))
    return {"key": asked.key, "graph": asked.graph, "scope": asked.scope}


def test_how_long_keys_are():
    """A key is a whole hash, which TOML checks, and begins with that of the computation."""
    found = keys()
    assert (len(found["key"]), len(found["graph"]), found["key"][:16]) == (64, 16, found["graph"])


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
SAID = Store("kept", connect_s=1, lookup_s=1, label="team", min_generation=2, signing_key="a", trusted_keys=["b"])
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
    "what is said of a store": ({"store": SAID}, set(), {"store": "kept"}),
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
    "store": ("other", {"scope"}, {}),
    # They say whether and when to race, not what is the fastest.
    "budget_s": (1.0, set(), {}),
    "process_budget_s": (1.0, set(), {}),
    "most_races": (9, set(), {}),
    "race": ("always", set(), {}),
    "race_custom_ops": (False, set(), {}),
    "on_progress": (print, set(), {}),
    # They say which decisions are used, and how those that are made are kept.
    "match": ("device", set(), {}),
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


def attribute(owner, name, value):
    return set_to(lambda given: setattr(owner, name, given), value, getattr(owner, name))


def without_library(library):
    """Return a context without it; `torch.testing` lets nobody set this alone in a process that has imported it."""
    return lambda: library.flags(
        False, deterministic=library.deterministic, allow_tf32=library.allow_tf32, fp32_precision=library.fp32_precision
    )


def precision_of(kind):
    return attribute(kind, "fp32_precision", "ieee" if kind.fp32_precision == "tf32" else "tf32")


def without(kernel):
    return lambda: sdpa_kernel([each for each in KERNELS if each is not kernel])


def autocast_default(kind):
    before = torch.get_autocast_dtype(kind)
    other = torch.float16 if before == torch.bfloat16 else torch.bfloat16
    return set_to(lambda dtype: torch.set_autocast_dtype(kind, dtype), other, before)


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
    **{f"default of {kind}'s autocast": (autocast_default(kind), nullcontext) for kind in spelling.AUTOCAST},
    "cache of autocast": (set_to(torch.set_autocast_cache_enabled, False, True), nullcontext),
    "default dtype": (set_to(torch.set_default_dtype, torch.float64, torch.float32), nullcontext),
    "default device": (set_to(torch.set_default_device, "meta", None), nullcontext),
    "fast path of attention": (set_to(torch.backends.mha.set_fastpath_enabled, False, True), nullcontext),
    "cuDNN": (without_library(torch.backends.cudnn), nullcontext),
    "oneDNN": (without_library(torch.backends.mkldnn), nullcontext),
    "uninitialized memory": (attribute(torch.utils.deterministic, "fill_uninitialized_memory", False), nullcontext),
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


HERE = {
    "device": "NVIDIA H100",
    "threads": 16,
    "torch": "2.13.0",
    "triton": "3.9.0",
    "backend-kwargs": "0.1.0",
    "gpu": "NVIDIA H100",
    "cpu": "AVX2",
    "cuda": "13.0",
    "driver": "13.1",
    "world": 1,
}
THERE = {name: value * 2 if isinstance(value, int) else f"9{value}" for name, value in HERE.items()}
# Where each field counts: for graphs on a CPU, and on a GPU.
COUNTS = {
    "device": ("key", "key"),
    "threads": ("near", ""),
    "torch": ("near", "near"),
    "triton": ("", "near"),
    **dict.fromkeys(("backend-kwargs", "gpu", "cpu", "cuda", "driver", "world"), ("", "")),
}


def counting(here, there):
    """Return where two machines differ: "key", "near" or nowhere."""
    if machine.device_of(here) != machine.device_of(there):
        return "key"
    return "near" if machine.variant_of(here) != machine.variant_of(there) else ""


@pytest.mark.parametrize("device", ["cpu AVX2", "NVIDIA H100"])
@pytest.mark.parametrize("name", machine.FIELDS)
def test_machines(name, device):
    """Each property of the machine and its releases, alone; all that differs is named."""
    here = {**HERE, "device": device}
    there = {**here, name: "cpu AVX512" if name == "device" and device.startswith("cpu") else THERE[name]}
    where = COUNTS[name][not device.startswith("cpu")]
    assert counting(here, there) == where
    assert len(machine.nearly(there, here)) == (where == "near")
    assert machine.difference(there, here) == f"{name} {there[name]!r} (here {here[name]!r})"


def test_what_is_known_of_this_machine():
    """Every field has a place in the table, and the test above a value for it."""
    assert {*machine.machine()} == {*machine.FIELDS} == {*HERE} == {*COUNTS}


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_patch_of_a_release_is_recorded_only(name):
    """The patches of one series compile the same way."""
    there = {**HERE, name: f"{HERE[name]}.post1+cu130"}
    assert counting(HERE, there) == ""
    assert machine.difference(there, HERE) != ""


def test_the_device_is_that_of_the_inputs():
    """A graph on the CPU has the CPU as its device, whether the machine has a GPU or not; one on a GPU its name."""
    cpu = machine.machine(["cpu"])
    assert machine.device_of(cpu) == f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
    assert machine.device_of({**cpu, "gpu": "NVIDIA H100 80GB HBM3"}) == machine.device_of(cpu)
    assert machine.device_of({**cpu, "device": "NVIDIA H100 80GB HBM3"}) == "nvidia-h100-80gb-hbm3"
    assert machine.device_of(machine.machine(["mps"])) == "mps"


def test_a_key_begins_with_its_computation():
    """So a store lists what it has for a computation at any sizes."""
    asked = keys()
    assert asked["key"][:16] == asked["graph"]
    assert len(asked["key"]) == 64


def known(name, *, ours=False, **changed):
    """Return what makes a rewrite known, as one of ours or a user's own, or what changes one that is."""

    def change(patch):
        row = replace(table.BUILT_IN.get(name) or Rewrite("", patterns=print), **changed)
        if ours or name in table.BUILT_IN:
            patch.setattr(table, "BUILT_IN", {**table.BUILT_IN, name: row})
            patch.setattr(table, "_REWRITES", replace(table._REWRITES, built_in=table.BUILT_IN))
            patch.setattr(table, "find_rewrite", table._REWRITES.find)
        else:
            patch.setitem(table._registered, name, row)

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(known("packed", version=2), id="version of a rewrite that is named"),
        pytest.param(known("mine", patterns=lambda passes: None), id="source of a user's own"),
        pytest.param(known("mine", version=2), id="version of a user's own"),
        pytest.param(
            lambda patch: patch.setattr(backends, "installed_version", lambda name: "0"), id="release of a compiler"
        ),
    ],
)
@pytest.mark.parametrize("option", ["rewrites", "candidates"])
def test_what_a_race_would_try(monkeypatch, option, change):
    """Versions of rewrites that are named, sources of a user's own, and releases of other compilers, alone."""
    known("mine")(monkeypatch)
    given = {"rewrites": (), "candidates": ["tmpl-tvm"]}
    given[option] = [*given[option], "packed", "mine"]
    before = keys(**given)
    change(monkeypatch)
    assert differing(before, keys(**given)) == ALL


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(known("new", ours=True), id="another rewrite"),
        pytest.param(known("attention", version=2), id="version of one that every race may try"),
        pytest.param(lambda patch: patch.setattr(table, "_module_text", lambda module: "other"), id="source of ours"),
        pytest.param(lambda patch: patch.setattr(candidates, "STEPS", candidates.STEPS[1:]), id="steps"),
        pytest.param(lambda patch: patch.setattr(candidates, "PRODUCTS", 9.0), id="estimate"),
    ],
)
def test_what_forgets_no_decision(monkeypatch, change):
    """Another step or rewrite of ours, their code, and what they are expected to cost are in no key."""
    before = keys(rewrites=table.raced_rewrites(("packed",)))
    change(monkeypatch)
    assert keys(rewrites=table.raced_rewrites(("packed",))) == before


def test_no_rewrites_are_another_question():
    """What was decided where none may be tried is not what is decided where those of every race may."""
    assert differing(keys(rewrites=()), keys(rewrites=table.raced_rewrites(None))) == ALL


def test_the_card_of_a_graph_is_its_inputs():
    """The GPU that is recorded is the one that the graph runs on, not the current one."""
    with FakeTensorMode():
        inputs = [3, torch.empty(2), torch.empty(2, device="cuda:1")]
    assert spelling.card_of(inputs) == 1
    assert spelling.card_of(inputs[:2]) is None


def test_inputs_for_people_to_read():
    """Dtypes and sizes of tensors, a type's name of what is none, and no parameters."""
    inputs = [torch.ones(8, 64), torch.nn.Parameter(torch.ones(3)), torch.tensor(1), 7, torch.ones(2).bfloat16()]
    assert spelling.described(inputs) == ("float32 8x64", "int64 scalar", "int", "bfloat16 2")
