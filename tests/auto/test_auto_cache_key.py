"""The parts of a key: the graph, its inputs, torch, the machine, and the settings of the race."""

import os
import subprocess
import sys

import pytest
import torch
from graphs import chain

from backend_kwargs.compilers.auto import decide
from backend_kwargs.compilers.auto.cache_key import ambient, computation_of, spelled, structure


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: (chain, torch.randn(8, 32)), id="shape"),
        pytest.param(lambda x: (chain, x.double()), id="dtype"),
        pytest.param(lambda x: (chain, x.t().contiguous().t()), id="strides"),
        pytest.param(lambda x: (lambda x: torch.relu(x * 3 + 1).sum(-1), x), id="constant"),
        pytest.param(lambda x: (chain, x.clone().requires_grad_()), id="gradient"),
    ],
)
def test_another_graph_is_another_decision(auto, races, store, change):
    """Shape, type, strides, constants and gradients are part of the key."""
    x = torch.randn(8, 64)
    auto(chain)(x)
    torch._dynamo.reset()
    fn, other = change(x)
    auto(fn)(other)
    assert races.count == 2


def test_an_input_that_stays_is_another_decision(auto, races):
    """Whether an input is static is part of the key: CUDA graphs do not copy static inputs."""
    x = torch.randn(8, 64)
    auto(chain)(x)
    torch._dynamo.reset()
    torch._dynamo.mark_static_address(x)
    auto(chain)(x)
    assert races.count == 2


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"effort": "full"}, id="effort"),
        pytest.param({"objective": "memory"}, id="objective"),
        pytest.param({"tolerance": 1e-5}, id="tolerance"),
        pytest.param({"candidates": ["cpp_wrapper"]}, id="candidates"),
        pytest.param({"epilogue_fusion": False}, id="option of Inductor's"),
    ],
)
def test_another_question_is_another_decision(auto, races, options):
    """The settings of a race are part of the key: a decision with a loose tolerance is not used for a strict one."""
    for asked in ({}, options):
        auto(chain, **asked)(torch.randn(8, 64))
        torch._dynamo.reset()
    assert races.count == 2


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_other_threads_are_another_decision(auto, races, threads):
    """The number of threads is part of the key: the winner on one thread may not win on sixteen."""
    for count in (threads, threads + 1):
        torch.set_num_threads(count)
        auto(chain)(torch.randn(8, 64))
        torch._dynamo.reset()
    assert races.count == 2


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(torch.no_grad, id="no_grad"),
        pytest.param(torch.inference_mode, id="inference"),
        pytest.param(lambda: torch.autocast("cpu", torch.bfloat16), id="autocast"),
    ],
)
def test_another_state_is_another_decision(auto, races, state):
    """Grad mode and autocast are part of the key."""
    x = torch.randn(8, 64)
    auto(chain)(x)
    torch._dynamo.reset()
    with state():
        auto(chain)(x)
    assert races.count == 2


@pytest.mark.parametrize(
    ("change", "back"),
    [
        pytest.param(
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
            id="deterministic",
        ),
        pytest.param(
            lambda: torch.set_float32_matmul_precision("high"),
            lambda: torch.set_float32_matmul_precision("highest"),
            id="float32",
        ),
    ],
)
def test_settings_of_the_process_are_part_of_the_key(change, back):
    """Deterministic algorithms and the precision of float32 products affect speed, so they are part of the key."""
    before = ambient()
    change()
    try:
        assert ambient() != before
    finally:
        back()


def test_other_candidates_are_another_decision(auto, races, monkeypatch):
    """The table of steps is part of the key: a release with more steps races again."""
    auto(chain)(torch.randn(8, 64))
    torch._dynamo.reset()
    decide.forget_process()
    monkeypatch.setattr(decide, "STEPS", decide.STEPS[1:])
    auto(chain)(torch.randn(8, 64))
    assert races.count == 2


def test_names_of_the_user_are_no_part_of_the_key(auto, races):
    """The same computation with other names has the same key."""

    def same(tensor):
        doubled = tensor * 2
        return torch.relu(doubled + 1).sum(-1)

    for fn in (chain, same):
        torch._dynamo.reset()
        auto(fn)(torch.randn(8, 64))
    assert races.count == 1


def test_which_of_equal_devices_is_no_part_of_the_key():
    """The index of a device is not part of the key: ranks compile one graph on cuda:0 and cuda:1."""
    assert spelled(({"device": torch.device("cuda:1")}, "cuda:0")) == "({'device': cuda}, cuda)"


def test_a_key_is_the_same_in_every_process():
    """Neither addresses nor the order of sets, which differ between processes, are part of the key."""
    script = (
        "from backend_kwargs.compilers.auto.cache_key import spelled\n"
        "print(spelled([{'a', 'b', 'c'}, spelled, object()]))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "12"
    }
    assert len(seen) == 1


def calling(kernel, **constants):
    """Return a graph that calls a user's Triton kernel as dynamo writes it, with the first numbers of a process."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

    kernel_side_table.reset_table()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    numbers = {
        "kernel_idx": kernel_side_table.add_kernel(kernel),
        "constant_args_idx": kernel_side_table.add_constant_args(constants),
    }
    launch = {"grid": [(4, 1, 1)], "tma_descriptor_metadata": {}, "kwargs": {"x": x}}
    graph.call_function(triton_kernel_wrapper_mutation, (), numbers | launch)
    graph.output(x)
    return torch.fx.GraphModule({}, graph)


@pytest.fixture
def kernels():
    """User's Triton kernels: two with the same name, two that differ only in their configurations."""
    triton = pytest.importorskip("triton")

    def kernel(x, n):
        x + n

    plus, like_plus = triton.jit(kernel), triton.jit(kernel)

    def kernel(x, n):
        x * n

    times = triton.jit(kernel)
    tuned = [
        triton.autotune([triton.Config({"n": size}) for size in sizes], key=[])(plus) for sizes in ((1, 2), (1, 4))
    ]
    chosen = [triton.heuristics({"n": rule})(plus) for rule in (lambda args: 16, lambda args: 64)]
    made = {"plus": plus, "like plus": like_plus, "times": times, "tuned": tuned[0], "tuned otherwise": tuned[1]}
    return made | {"by a rule": chosen[0], "by another rule": chosen[1]}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        pytest.param(("plus", 1), ("like plus", 1), True, id="same source"),
        pytest.param(("plus", 1), ("times", 1), False, id="source"),
        pytest.param(("plus", 1), ("plus", 2), False, id="constant"),
        pytest.param(("plus", 1), ("tuned", 1), False, id="autotuned"),
        pytest.param(("tuned", 1), ("tuned otherwise", 1), False, id="configurations"),
        pytest.param(("by a rule", 1), ("by another rule", 1), False, id="heuristics"),
    ],
)
def test_the_source_of_a_triton_kernel_is_part_of_the_key(kernels, one, other, same):
    """The key contains a kernel's source, since a kernel's number can mean another kernel in another process."""
    texts = [structure(calling(kernels[name], n=constant)) for name, constant in (one, other)]
    assert (texts[0] == texts[1]) is same


@pytest.mark.parametrize(
    ("x", "asked", "same"),
    [
        pytest.param(torch.randn(8, 32), {}, True, id="size"),
        pytest.param(torch.randn(8, 64).double(), {}, False, id="dtype"),
        pytest.param(torch.randn(8, 64), {"objective": "memory"}, False, id="objective"),
    ],
)
def test_kin_differ_in_size_alone(x, asked, same):
    """Graphs that differ only in sizes are recompiles; another dtype or other settings make another computation."""
    gm, first = torch.fx.symbolic_trace(chain), torch.randn(8, 64)
    assert (computation_of(gm, [x], asked) == computation_of(gm, [first], {})) is same
