"""The parts of a key: the graph, its inputs, torch, the machine, and the settings of the race."""

import operator
import os
import subprocess
import sys

import pytest
import torch

from backend_kwargs.auto.machine import machine
from backend_kwargs.graphs import spelling
from backend_kwargs.graphs.spelling import SYMBOL, ambient, signature, spelled, structure
from tests.auto.graphs import chain


def test_an_input_that_stays_is_another_decision(auto, races):
    """Whether an input is static is part of the key: CUDA graphs do not copy static inputs."""
    x = torch.randn(8, 64)
    auto(chain)(x)
    torch._dynamo.reset()
    torch._dynamo.mark_static_address(x)
    auto(chain)(x)
    assert races.count == 2


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_other_threads_are_another_decision(auto, races, threads):
    """On a CPU the graph is raced again: the winner on one thread may not win on sixteen."""
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
        pytest.param(
            lambda: torch.backends.cuda.enable_flash_sdp(False),
            lambda: torch.backends.cuda.enable_flash_sdp(True),
            id="kernels of attention",
        ),
    ],
)
def test_settings_of_the_process_are_part_of_the_key(change, back):
    """Deterministic algorithms, float32's precision and attention's kernels affect speed, so the key has them."""
    before = ambient()
    change()
    try:
        assert ambient() != before
    finally:
        back()


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
    assert spelled(("cpu:0", "mps:0", "xpu:12", "cuda")) == "(cpu, mps, xpu, 'cuda')"


def test_a_key_is_the_same_in_every_process():
    """Neither addresses nor the order of sets, which differ between processes, are part of the key."""
    script = "from backend_kwargs.graphs.spelling import spelled\nprint(spelled([{'a', 'b', 'c'}, spelled, object()]))"
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
    sizes = [triton.Config({"n": size}) for size in (1, 2)]
    for name, given in {"key": ["n"], "reset_to_zero": ["x"], "restore_value": ["x"]}.items():
        made[name] = triton.autotune(sizes, **{"key": []} | {name: given})(plus)
    return made | {"by a rule": chosen[0], "by another rule": chosen[1]}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        pytest.param(("plus", 1), ("like plus", 1), True, id="same source"),
        pytest.param(("plus", 1), ("times", 1), False, id="source"),
        pytest.param(("plus", 1), ("plus", 2), False, id="constant"),
        pytest.param(("plus", 1), ("tuned", 1), False, id="autotuned"),
        pytest.param(("tuned", 1), ("tuned otherwise", 1), False, id="configurations"),
        *[pytest.param(("tuned", 1), (name, 1), False, id=name) for name in ("key", "reset_to_zero", "restore_value")],
        pytest.param(("by a rule", 1), ("by another rule", 1), False, id="heuristics"),
    ],
)
def test_the_source_of_a_triton_kernel_is_part_of_the_key(kernels, one, other, same):
    """The key contains a kernel's source, since a kernel's number can mean another kernel in another process."""
    texts = [structure(calling(kernels[name], n=constant)) for name, constant in (one, other)]
    assert (texts[0] == texts[1]) is same


def written(*nodes, root=None):
    """Return a graph of nodes, each (op, target, args), whose first input is x."""
    graph = torch.fx.Graph()
    last = graph.placeholder("x")
    for op, target, *args in nodes:
        last = graph.create_node(op, target, (last, *args) if op.startswith("call") else ())
    graph.output((last,))
    return torch.fx.GraphModule(root or torch.nn.Module(), graph)


class Held(torch.nn.Module):
    """A module with something of each kind that a graph can hold."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
        self.inner.body = written(("call_function", torch.ops.aten.sin.default))
        self.act = torch.nn.ReLU()


@pytest.mark.parametrize(
    ("node", "line"),
    [
        pytest.param(
            ("call_function", operator.add, 2), "%1 = call_function _operator.add((%0, 2), {})", id="function"
        ),
        pytest.param(("call_function", min, 2), "%1 = call_function builtins.min((%0, 2), {})", id="builtin"),
        pytest.param(
            ("call_function", torch.ops.aten.add.Tensor, "cuda:3"),
            "%1 = call_function aten.add.Tensor((%0, cuda), {})",
            id="operator, on a device",
        ),
        pytest.param(("call_method", "relu_"), "%1 = call_method relu_((%0,), {})", id="method"),
        pytest.param(("call_module", "act"), "%1 = call_module ReLU((%0,), {})", id="module"),
        pytest.param(("get_attr", "inner.weight"), "%1 = get_attr (2, 3) torch.bfloat16 cpu((), {})", id="parameter"),
        pytest.param(
            ("get_attr", "inner.body"),
            "%1 = get_attr {%0 = placeholder \n%1 = call_function aten.sin.default((%0,), {})\n"
            "%2 = output output(((%1,),), {})}((), {})",
            id="graph",
        ),
        pytest.param(
            ("call_function", operator.add, frozenset({"b", "a"})),
            "%1 = call_function _operator.add((%0, {'a', 'b'}), {})",
            id="set",
        ),
        pytest.param(
            ("call_function", operator.add, "cuda:x"),
            "%1 = call_function _operator.add((%0, 'cuda:x'), {})",
            id="no device",
        ),
    ],
)
def test_a_graph_as_text(node, line):
    """Each node has its number, its kind, what it calls or holds, and its arguments."""
    whole = f"%0 = placeholder \n{line}\n%2 = output output(((%1,),), {{}})"
    assert structure(written(node, root=Held())) == whole


def test_keywords_are_part_of_the_text():
    """Positional arguments come first, then keywords."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.add.Tensor, (x, x), {"alpha": 2})
    graph.output(())
    text = structure(torch.fx.GraphModule(torch.nn.Module(), graph))
    assert text.splitlines()[1] == "%1 = call_function aten.add.Tensor((%0, %0), {'alpha': 2})"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(torch.zeros(2, 3), "2 torch.float32 cpu False (2, 3) (3, 1)", id="tensor"),
        pytest.param(
            torch.zeros(2, 3, dtype=torch.float64).t().requires_grad_(),
            "2 torch.float64 cpu True (3, 2) (1, 3)",
            id="transposed, trained",
        ),
        pytest.param(torch.eye(2).to_sparse(), "2 torch.float32 cpu False (2, 2) torch.sparse_coo", id="sparse"),
        pytest.param(3, "int ", id="number"),
    ],
)
def test_an_input_as_text(value, text):
    """Rank, dtype, device, gradient, sizes and strides."""
    assert signature(written(), [value]) == [text]


def test_a_static_input_as_text():
    """An input at a static address is marked; so is one without, by its absence."""
    value = torch.zeros(2)
    value._dynamo_static_input_type = "unguarded"
    assert signature(written(), [value]) == ["1 torch.float32 cpu False static (2,) (1,)"]


def test_sizes_that_vary_are_numbered_as_they_come():
    """Symbols have other numbers in another process, so each is named by the place where it comes first."""
    graph = torch.fx.Graph()
    for sizes in ((7, 3), (3, 7)):
        fake = graph.placeholder(f"x{sizes[0]}")
        fake.meta["example_value"] = torch.empty(sizes, device="meta")
    graph.output(())
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    lines = signature(gm, [torch.zeros(1, 1), torch.zeros(1, 1)])
    assert [line.partition("False ")[2] for line in lines] == ["(7, 3) (3, 1)", "(3, 7) (7, 1)"]
    names = [SYMBOL.findall(text) for text in ("s12*u3 + z1", "ps1 s1x s", "(s0, s0)")]
    assert names == [["s12", "u3", "z1"], [], ["s0", "s0"]]


def test_symbols_of_dynamo():
    """A size that varies is the same text whichever number dynamo gave it."""
    seen = []

    def backend(gm, example_inputs):
        seen.append(signature(gm, example_inputs))
        return gm

    x = torch.zeros(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    torch.compile(lambda x: x + 1, backend=backend)(x)
    assert [line for line in seen[0] if "float32" in line] in (
        ["2 torch.float32 cpu False (n0, n1) (n1, 1)"],
        ["2 torch.float32 cpu False (n1, n0) (n0, 1)"],
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param({"b": 1, "a": (2, [3])}, "['a: [\\'2\\', \"[\\'3\\']\"]', 'b: 1']", id="containers"),
        pytest.param(None, "None", id="none"),
    ],
)
def test_a_decorators_argument_as_text(value, text):
    """Mappings are sorted, since their order has no meaning."""
    assert spelling._said(value) == text


def test_a_decorators_function_as_text():
    """By its code, the names that it uses and its constants."""
    one, same, other = (eval(text) for text in ("lambda a: abs(a) + 1", "lambda a: abs(a) + 1", "lambda a: abs(a) + 2"))
    assert spelling._said(one) == spelling._said(same)
    assert len({spelling._said(each) for each in (one, other, eval("lambda a: int(a) + 1"), eval("lambda a: a"))}) == 4


def test_the_ambient_state_as_it_is():
    """All of it, under a state that is set here."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = ambient()
    assert (found["grad"], found["autocast"], found["deterministic"]) == ("no_grad", {"cpu": "torch.bfloat16"}, False)
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul)
    assert found["float32"] == [each.fp32_precision for each in backends]
    with torch.inference_mode():
        assert ambient()["grad"] == "inference"
    assert (ambient()["grad"], ambient()["autocast"]) == ("grad", {})
    torch.set_autocast_enabled("cuda", True)
    try:
        assert ambient()["autocast"] == {"cuda": "torch.float16"}
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_the_machine_as_it_is():
    """Releases, device, driver, threads, the CPU's instructions, and how many ranks there are."""
    found = machine()
    wanted = ["torch", "triton", "backend-kwargs", "device", "gpu", "cuda", "driver", "cpu", "threads", "world"]
    assert list(found) == wanted
    assert (found["torch"], found["threads"], found["world"]) == (str(torch.__version__), torch.get_num_threads(), 1)
    assert found["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert (found["gpu"] is None) is (not torch.cuda.is_available())
