"""What does not go to a worker: the ticket has a reason, in one line, and nothing raises."""

import os
import subprocess
import sys
import textwrap
from operator import mul

import pytest
import torch
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode

from backend_kwargs.auto.workers.cores import share_of, spare_workers
from backend_kwargs.auto.workers.graphs import PackedGraph, packed
from backend_kwargs.auto.workers.pool import Workers
from backend_kwargs.rewrites.apply import with_rewrites
from backend_kwargs.rewrites.table import Rewrite, register_rewrite
from backend_kwargs.torch_internals.lowered_graphs import UnportableError, pickled, received_graph
from tests.auto.workers.lowering import LONG_S, Measuring, lowered


@torch.library.custom_op("backend_kwargs_tests::twice_elsewhere", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_operator_of_the_program():
    """A custom operator is in no other process."""
    (graph,) = lowered(lambda x: twice(x) + 1, torch.randn(4))
    assert graph.graph == PackedGraph(
        refused="it calls backend_kwargs_tests::twice_elsewhere, which a worker does not have"
    )


@pytest.mark.parametrize("view", [lambda x: x.T.conj(), lambda x: x.conj().imag], ids=["conjugated", "negated"])
def test_a_view_that_changes_values(view):
    """Its memory has other numbers than it shows, which what is sent would not say."""
    with FakeTensorMode(), pytest.raises(UnportableError) as raised:
        pickled([view(torch.ones(4, 4, dtype=torch.complex64))])
    assert str(raised.value) == "it holds a view that is conjugated or negated"


def launching(kernel, seen):
    """Return a backend that adds a launch of a kernel, and passes what it lowers to `seen`, which raises."""

    def backend(gm, example_inputs):
        (x,), (twice,) = gm.graph.find_nodes(op="placeholder"), gm.graph.find_nodes(op="call_function", target=mul)
        numbers = kernel_side_table.add_kernel(kernel), kernel_side_table.add_constant_args({"WIDE": True, "N": 8})
        names = ("kernel_idx", "constant_args_idx", "grid", "tma_descriptor_metadata", "kwargs")
        with gm.graph.inserting_after(twice):
            values = (*numbers, [(4, 1, 1)], {}, {"x": x, "out": twice})
            gm.graph.call_function(triton_kernel_wrapper_mutation, kwargs=dict(zip(names, values, strict=True)))
        gm.recompile()
        return compile_fx(gm, example_inputs, inner_compile=seen)

    return backend


@pytest.mark.parametrize("warps", [None, 8])
def test_a_triton_kernel_of_a_module(warps):
    """A graph that launches a kernel of an importable module is sent, and has the same key where it arrives."""
    triton = pytest.importorskip("triton")
    from backend_kwargs.rewrites.kernels.rotary import turned

    # What torch makes of a kernel that is launched with a number of warps.
    kernel = triton.autotune(configs=[triton.Config({}, num_warps=warps)], key=[])(turned) if warps else turned
    keys = []

    def seen(gm, example_inputs, **kwargs):
        keys.append(compiled_fx_graph_hash(gm, example_inputs, kwargs, [])[0])
        graph = packed(gm, example_inputs, kwargs)
        assert not graph.refused
        kernel_side_table.add_constant_args({})  # elsewhere, the numbers of kernels are others
        arrived = received_graph(graph.data)
        with torch._guards.tracing(arrived.context):
            keys.append(compiled_fx_graph_hash(arrived.gm, arrived.example_inputs, arrived.kwargs, [])[0])
        raise NotImplementedError("seen")

    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="seen"):
        torch.compile(lambda x: x * 2, backend=launching(kernel, seen))(torch.randn(4, 4))
    assert keys[0] == keys[1]


def refused(kernel):
    """Return why a graph that launches a kernel is not sent."""
    reasons = []

    def seen(gm, example_inputs, **kwargs):
        reasons.append(packed(gm, example_inputs, kwargs).refused)
        raise NotImplementedError("seen")

    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="seen"):
        torch.compile(lambda x: x * 2, backend=launching(kernel, seen))(torch.randn(4, 4))
    (reason,) = reasons
    return reason


def test_a_triton_kernel_of_the_program():
    """A kernel that no module has by its name is in no other process."""
    triton = pytest.importorskip("triton")

    @triton.jit
    def here(x, out, WIDE: triton.language.constexpr, N: triton.language.constexpr):  # noqa: N803
        pass

    name = "test_a_triton_kernel_of_the_program.<locals>.here"
    assert refused(here) == f"it launches {name}, which only the running program has"


def test_hooks_round_a_triton_kernel():
    """What the program calls before a module's kernel is in no other process."""
    triton = pytest.importorskip("triton")
    from backend_kwargs.rewrites.kernels.rotary import turned

    wrap = triton.autotune(configs=[triton.Config({})], key=[], pre_hook=lambda *_, **__: None)
    assert refused(wrap(turned)) == "it launches turned, which only the running program has"


def test_sizes_of_data():
    """Sizes that depend on data are known to this process alone."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (graph,) = lowered(lambda x: torch.nonzero(x) + 1, torch.ones(4))
    assert graph.graph.refused == "some of its sizes depend on data"


def test_a_large_constant():
    """A graph that holds a large tensor is not sent through a pipe."""
    (graph,) = lowered(lambda x: x + 1, torch.randn(4))
    graph.gm.register_buffer("held", torch.zeros(1 << 20))
    with torch._guards.tracing(graph.context):
        again = packed(graph.gm, graph.inputs, graph.kwargs)
    assert again.refused == "it holds 4194304 bytes of constants"


def test_outside_torch_compile():
    """Without dynamo's context there is no key."""
    gm = torch.fx.symbolic_trace(nn.Linear(4, 4))
    assert packed(gm, [torch.randn(2, 4)], {}).refused == "it is compiled outside torch.compile"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param({"fx_graph_cache": False}, "Inductor's cache of graphs is off", id="no cache"),
        pytest.param(
            {"post_grad_custom_post_pass": lambda graph: None},
            "it holds <lambda>, which only the running program has",
            id="a pass that is a lambda",
        ),
    ],
)
def test_options(workers, options, reason):
    """Options that another process cannot have, or that leave nothing to find, are refused at once."""
    (graph,) = lowered(lambda x: x + 1, torch.randn(4))
    ticket = workers.submit(graph.graph, options)
    assert ticket.done()
    assert ticket.result().reason == reason


def test_a_rewrite_of_the_program(workers):
    """A rewrite that this program has registered is unknown to a worker."""
    register_rewrite("only_here", Rewrite("of this test", patterns=f"{__name__}:no_patterns"))
    (graph,) = lowered(lambda x: x + 1, torch.randn(4))
    reply = workers.submit(graph.graph, with_rewrites({}, ["only_here"])).result(LONG_S)
    assert reply.reason.startswith("BackendKwargsError: Unknown rewrite 'only_here'.")
    assert "\n" not in reply.reason


def no_patterns(found):
    """Add no patterns."""


def test_tuning(workers):
    """Nothing is measured in a worker, where it would compete for cores: the process that races does it."""
    (graph,) = lowered(lambda x: x @ x, torch.randn(4, 4))
    reply = workers.submit(graph.graph, {"post_grad_custom_post_pass": Measuring()}).result(LONG_S)
    assert reply.reason == "it is tuned while it is lowered, which the racing process does"


@pytest.mark.parametrize(
    ("cores", "ranks", "bound", "number"),
    [
        (1, None, False, 0),
        (2, None, False, 0),
        (4, None, False, 1),
        (16, None, False, 6),
        (16, "4", False, 1),
        (16, "8", False, 0),
        (16, "8", True, 6),
        (128, "8", False, 6),
        (16, "x", False, 6),
    ],
)
def test_number_of_workers(cores, ranks, bound, number):
    """Half of a process's cores are for itself; ranks share them unless each is bound to some; two leave no worker."""
    environ = {} if ranks is None else {"LOCAL_WORLD_SIZE": ranks}
    assert spare_workers(share_of(cores, 1000, is_bound=bound, environ=environ)) == number


def test_ranks_share_a_quota():
    """A cgroup's quota is of all its processes, also of those that are bound to cores."""
    assert share_of(16, 16, is_bound=True, environ={"LOCAL_WORLD_SIZE": "8"}) == 2


def test_no_spare_core(monkeypatch):
    """On two cores nothing is started, and the ticket says why."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})  # also the parent's
    ticket = Workers().submit(PackedGraph(b"graph"), {})
    assert ticket.result().reason == "2 cores leave none for a worker"


def test_a_refused_graph_starts_nothing():
    """A graph that stays here starts no worker."""
    pool = Workers(1)
    assert pool.submit(PackedGraph(refused="why"), {}).result().reason == "why"
    assert not pool.processes()


def asked(code):
    """Run a program that asks a worker, and return what it prints."""
    program = textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_loader_worker():
    """A DataLoader's worker is daemonic, and may have no children."""
    answer = asked(
        """
        import torch
        from backend_kwargs.auto.workers.graphs import PackedGraph
        from backend_kwargs.auto.workers.pool import Workers

        class Reasons(torch.utils.data.Dataset):
            def __len__(self):
                return 1

            def __getitem__(self, index):
                return Workers(1).submit(PackedGraph(b"graph"), {}).result().reason

        print(next(iter(torch.utils.data.DataLoader(Reasons(), batch_size=None, num_workers=1))))
        """
    )
    assert answer == "this process is daemonic, as a DataLoader's worker is, and may have no children"


def test_a_fork():
    """A forked process has the workers of its parent in memory, neither asks nor ends them."""
    answer = asked(
        """
        import os, time
        from backend_kwargs.auto.workers.graphs import PackedGraph
        from backend_kwargs.auto.workers.pool import Workers

        pool = Workers(1)
        pool.start()
        while not pool.processes():
            time.sleep(0.01)
        if os.fork() == 0:
            print(pool.submit(PackedGraph(b"graph"), {}).result().reason, flush=True)
            pool.stop()
            os._exit(0)
        os.wait()
        print(len(pool.processes()))
        """
    )
    assert answer == "this process was forked from the one that has the workers\n1"
