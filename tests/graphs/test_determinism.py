"""Graphs whose bits may differ between runs of equal code."""

import operator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.graphs.determinism import ASK, check_deterministic, check_no_atomics

AT = torch.tensor([0, 1, 0])


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


REFUSED = [
    pytest.param(lambda x: x.index_add(0, AT, x), "aten.index_add.default", id="index_add"),
    pytest.param(lambda x: x.scatter_add(0, AT[:, None], x), "aten.scatter_add.default", id="scatter_add"),
    pytest.param(lambda x: x.scatter(0, AT[:, None], x), "aten.scatter.src", id="scatter of a tensor"),
    pytest.param(lambda x: x.index_put((AT,), x, accumulate=True), "aten.index_put.default", id="index_put"),
    pytest.param(
        lambda x: torch.ops.aten.embedding_dense_backward(x, AT, 3, -1, False),
        "aten.embedding_dense_backward.default",
        id="an embedding's gradient",
    ),
]


@pytest.mark.parametrize(("function", "name"), REFUSED)
def test_an_operator_is_named(function, name):
    """A graph that writes to one place in any order is refused by its operator's name."""
    with pytest.raises(BackendKwargsError) as raised:
        check_deterministic(make_fx(function)(torch.ones(3, 1)))
    assert str(raised.value) == f"{name!r} may compute in another order in each run: {ASK}."


@pytest.mark.parametrize(("function", "name"), REFUSED)
@pytest.mark.usefixtures("deterministic")
def test_deterministic_algorithms_allow_it(function, name):
    """Under torch's deterministic algorithms torch computes it in one order, or raises itself."""
    check_deterministic(make_fx(function)(torch.ones(3, 1)))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x.scatter(0, AT[:, None], 1.0), id="a number written twice"),
        pytest.param(lambda x: nn.functional.gelu(x @ x.T).cumsum(0), id="products and sums"),
        pytest.param(lambda x: x[AT], id="a gather"),
    ],
)
def test_what_is_determined(function):
    """Graphs that write each place once pass."""
    check_deterministic(make_fx(function)(torch.ones(3, 1)))


@torch.library.custom_op("nearmiss::drawn", mutates_args=(), tags=(torch.Tag.nondeterministic_bitwise,))
def drawn(x: torch.Tensor) -> torch.Tensor:
    """Return other bits in each run, as its tag says."""
    return x.clone()


@drawn.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_users_operator_that_says_so():
    """An operator whose tag says that its bits differ is refused, whoever made it."""
    with pytest.raises(BackendKwargsError) as raised:
        check_deterministic(make_fx(drawn)(torch.ones(3)))
    assert str(raised.value) == f"'nearmiss.drawn.default' may compute in another order in each run: {ASK}."


# ---- on a GPU, whose tensors are fake here


def on_cuda(function):
    with FakeTensorMode():
        return make_fx(function)(torch.empty(3, 3, device="cuda"))


@pytest.fixture
def quiet_libraries(monkeypatch):
    """What cuBLAS and cuDNN need to give the same bits."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with torch.backends.cudnn.flags(benchmark=False):  # torch's own tests forbid to set it otherwise
        yield


@pytest.mark.parametrize(
    ("function", "name"),
    [
        pytest.param(lambda x: x.cumsum(0), "aten.cumsum.default", id="a tensor"),
        pytest.param(lambda x: x.median(0), "aten.median.dim", id="two results"),
    ],
)
@pytest.mark.usefixtures("quiet_libraries")
def test_operators_of_a_gpu(function, name):
    """What CUDA computes in any order is refused there, and not on a CPU."""
    with pytest.raises(BackendKwargsError) as raised:
        check_deterministic(on_cuda(function))
    assert str(raised.value) == f"{name!r} may compute in another order in each run: {ASK}."
    check_deterministic(make_fx(function)(torch.ones(3, 3)))


@pytest.mark.parametrize("workspace", [":4096:8", ":16:8", ":4096:2", None])
@pytest.mark.usefixtures("quiet_libraries", "deterministic")
def test_the_workspace_of_cublas(monkeypatch, workspace):
    """Only two settings promise equal bits, and a graph on a CPU needs none."""
    if workspace is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    check_deterministic(make_fx(torch.sin)(torch.ones(3)))
    if workspace in (":4096:8", ":16:8"):
        return check_deterministic(on_cuda(torch.sin))
    with pytest.raises(BackendKwargsError) as raised:
        check_deterministic(on_cuda(torch.sin))
    assert str(raised.value) == (
        "cuBLAS may compute otherwise in each run: set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process starts."
    )
    return None


@pytest.mark.usefixtures("quiet_libraries", "deterministic")
def test_cudnn_that_times():
    """Its benchmark mode chooses kernels by timing, which no lock can name."""
    with torch.backends.cudnn.flags(benchmark=True), pytest.raises(BackendKwargsError) as raised:
        check_deterministic(on_cuda(torch.sin))
    assert str(raised.value) == "cuDNN times its kernels: set torch.backends.cudnn.benchmark = False."


def test_a_graph_within_a_graph():
    """What a branch does is found too."""
    branch = make_fx(lambda x: x.index_add(0, AT, x))(torch.ones(3, 1))
    graph = torch.fx.Graph()
    graph.output(graph.call_function(operator.truth, (graph.get_attr("branch"),)))
    with pytest.raises(BackendKwargsError, match=r"aten\.index_add"):
        check_deterministic(torch.fx.GraphModule({"branch": branch}, graph))


@pytest.mark.parametrize("code", ["tl.atomic_add(p, x)", "atomic_add(&out[0], x);", "atomic_add_vec<float, 1, 1>(o)"])
def test_code_that_adds_atomically(code):
    """Generated code is refused by what it calls."""
    with pytest.raises(BackendKwargsError) as raised:
        check_no_atomics(code)
    assert str(raised.value) == f"The code that Inductor generates for a graph adds atomically: {ASK}."
