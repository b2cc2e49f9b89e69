"""Facts about dynamo: what it attaches to a graph, its sources, guards, caches and counts."""

import copy
import gc
import operator
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.utils import _metrics_context_tls

from backend_kwargs.torch_internals import dynamo, tensors

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.ones(3, 4)


class Kept:
    """A backend that runs graphs in eager, keeps them, and calls `look` with each first."""

    def __init__(self, look=lambda gm: None):
        self.look, self.graphs = look, []

    def __call__(self, gm, example_inputs):
        self.graphs.append(gm)
        self.look(gm)
        return gm.forward


def compiled(net, look=lambda gm: None, *inputs):
    kept = Kept(look)
    call = torch.compile(net, backend=kept)
    call(*(inputs or (X,)))
    return call, kept


# --- graphs ---------------------------------------------------------------------------------------------------------


def test_parameters_have_sources_of_parameters():
    """The source of a parameter is known from that of an argument, with its table and its module."""
    _, kept = compiled(nn.Linear(4, 4))
    sources = [*map(dynamo.source_of, kept.graphs[0].graph.find_nodes(op="placeholder"))]
    parameters = [*filter(dynamo.is_parameter_source, sources)]
    assert (len(sources), [dynamo.table_and_name(each)[1] for each in parameters]) == (3, ["weight", "bias"])
    assert dynamo.module_of(parameters[0]) == dynamo.module_of(parameters[1])
    assert dynamo.source_of(kept.graphs[0].graph.output_node()) is None


def test_a_copy_has_what_dynamo_attached():
    """A copy of a graph has no sources by itself, and all of them once they are handed on."""
    _, kept = compiled(nn.Linear(4, 4))
    gm = kept.graphs[0]
    copied = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    bare = [*map(dynamo.source_of, copied.graph.find_nodes(op="placeholder"))]
    dynamo.hand_on(gm, copied)
    assert bare == [None, None, None]
    assert [*map(dynamo.source_of, copied.graph.find_nodes(op="placeholder"))] == [
        *map(dynamo.source_of, gm.graph.find_nodes(op="placeholder"))
    ]
    assert dynamo.sources_of_attributes(copied) == dynamo.sources_of_attributes(gm)


def test_a_boxed_graph_empties_its_list():
    """It takes one list, and leaves nothing in it."""
    run, args = dynamo.boxed_forward(torch.fx.symbolic_trace(lambda a, b: a + b)), [1, 2]
    assert (run(args), args) == (3, [])


def test_a_boxed_callable_is_marked():
    """The mark is an attribute of the function."""

    def run(args):
        return args

    before = hasattr(run, "_boxed_call")
    dynamo.mark_boxed(run)
    assert (before, hasattr(run, "_boxed_call")) == (False, True)


def test_erased_nodes_show():
    """A node knows that it was erased."""
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    before = dynamo.is_erased(node)
    graph.erase_node(node)
    assert (before, dynamo.is_erased(node)) == (False, True)


def test_dynamos_graphs_generate_their_code_late():
    """The class of dynamo's graphs is a subclass, made only within the context."""
    with tensors.dynamos_graph_class():
        late = torch.fx.symbolic_trace(nn.ReLU())
    assert isinstance(late, torch.fx.GraphModule)
    assert type(late).__mro__[1] is not type(torch.fx.symbolic_trace(nn.ReLU())).__mro__[1]


# --- guards ---------------------------------------------------------------------------------------------------------


def test_the_root_module_of_a_source():
    """A module in a local variable is the root of its parameters, a module in a global is none's."""
    roots = []

    def look(gm):
        sources = filter(dynamo.is_parameter_source, map(dynamo.source_of, gm.graph.find_nodes(op="placeholder")))
        roots.append(dynamo.root_of(dynamo.module_of(next(sources))) is not None)

    compiled(nn.Linear(4, 4), look)
    compiled(calls_a_global, look)
    assert roots == [True, False]


IN_A_GLOBAL = nn.Linear(4, 4)


def calls_a_global(x):
    return IN_A_GLOBAL(x)


def test_a_guard_of_ones_own_is_asked_at_each_call():
    """While it holds, the code serves; once it does not, dynamo compiles again."""
    holds = [True]

    def look(gm):
        if all(holds):
            source = dynamo.source_of(gm.graph.find_nodes(op="placeholder")[0])
            dynamo.add_guard(source, lambda *both: dynamo.guard_last(*both, lambda _: all(holds), "of the test"))

    call, kept = compiled(lambda x: x + 1, look)
    call(X)
    before = len(kept.graphs)
    holds.append(False)
    call(X)
    assert (before, len(kept.graphs)) == (1, 2)


def test_identity_is_guarded_without_a_reference():
    """Another object recompiles; the first is freed all the same."""
    net = nn.Linear(4, 4)

    def look(gm):
        node = next(each for each in gm.graph.find_nodes(op="placeholder") if "weight" in each.name)
        source, identity = dynamo.source_of(node), id(net.weight)
        dynamo.add_guard(source, lambda builder, guard: dynamo.guard_identity(builder, guard, source, identity))

    call, kept = compiled(net, look)
    call(X)
    before, first = len(kept.graphs), weakref.ref(net.weight)
    net.weight = nn.Parameter(torch.zeros(4, 4))
    call(X)
    kept.graphs[0] = None
    gc.collect()
    assert (before, len(kept.graphs), first()) == (1, 2, None)


def test_guards_can_be_dropped():
    """Guards that are added after the function was made are gone, the others stay."""
    counts = []

    def look(gm):
        counts.append(dynamo.guard_count())
        drop = dynamo.dropping_guards()
        dynamo.add_guard(dynamo.source_of(gm.graph.find_nodes(op="placeholder")[0]), lambda *_: pytest.fail("added"))
        counts.append(dynamo.guard_count())
        drop()
        counts.append(dynamo.guard_count())

    compiled(lambda x: x + 1, look)
    assert counts == [counts[0], counts[0] + 1, counts[0]]
    assert (dynamo.guard_count(), dynamo.is_tracing(), dynamo.compile_id()) == (0, False, None)


def test_cached_code_is_freed():
    """An entry of the cache has code and guards; invalid, it no longer serves, and the next call compiles."""

    def function(x):
        return x + 1

    call, kept = compiled(function)
    (entry,) = dynamo.cache_entries(function.__code__)
    dynamo.invalidate(entry, entry.guard_manager, "the test says so")
    call(X)
    assert len(kept.graphs) == 2


def test_code_calls_its_graph_by_a_global():
    """The bytecode loads the graph under this name."""

    def function(x):
        return x + 1

    compiled(function)
    (entry,) = dynamo.cache_entries(function.__code__)
    assert any(name.startswith(dynamo.GRAPH) for name in entry.code.co_names)


def test_the_traced_frame_is_known():
    """It is that of the function while its graph is compiled, and there is none else."""
    found = []

    def function(x):
        return x + 1

    compiled(function, lambda gm: found.append(dynamo.traced_frame().f_code))
    assert (found, dynamo.traced_frame()) == ([function.__code__], None)


def test_versions_of_a_trace_are_apart():
    """Guards and what else changes in a context apart are not there afterwards, and its fake mode is the same."""
    seen = []

    def look(gm):
        context, before = dynamo.TracingContext.get(), dynamo.guard_count()
        symbols = context.fake_mode.shape_env
        version = symbols._version_counter
        with dynamo.TracingApart().entered():
            seen.append(dynamo.TracingContext.get().fake_mode is context.fake_mode)
            symbols.unbacked_renamings["planted"] = 1
            dynamo.add_guard(dynamo.source_of(gm.graph.find_nodes(op="placeholder")[0]), lambda *_: None)
        seen.append((dynamo.TracingContext.get() is context, dynamo.guard_count() == before))
        seen.append(("planted" in symbols.unbacked_renamings, symbols._version_counter > version))

    compiled(lambda x: x + 1, look)
    assert seen == [True, (True, True), (False, True)]


def test_the_callable_of_a_compile_is_known():
    """It is what torch.compile was given, also for code after a graph break; there is none outside a compile."""
    found = []

    def function(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    compiled(function, lambda gm: found.append(dynamo.compiling().given))
    assert (found, dynamo.compiling().given) == ([function, function], None)


def test_the_reason_of_a_recompile_is_known():
    """A first compile has none, and a second names the guard that failed; the records keep both."""
    reasons, before = [], len(dynamo.recent_compiles())
    call, _ = compiled(lambda x: x + 1, lambda gm: reasons.append(dynamo.compiling().guard))
    call(X.double())
    assert reasons[0] == ""
    assert "dtype" in reasons[1]
    assert len(dynamo.recent_compiles()) > before or before == 64


def test_outcomes_of_caches_are_counted():
    """AOTAutograd's and Inductor's counts are added; nothing bypasses outside a compile."""
    before = dynamo.cache_counts()["hit"]
    dynamo.counters["inductor"]["fxgraph_cache_hit"] += 1
    dynamo.counters["aot_autograd"]["autograd_cache_hit"] += 2
    assert dynamo.cache_counts()["hit"] == before + 3
    assert dynamo.bypass_reason() == ""


# --- the process ----------------------------------------------------------------------------------------------------


def test_limits():
    """Eight graphs of a function, and many more for all modules together."""
    assert dynamo.config.recompile_limit == 8
    assert dynamo.config.accumulated_recompile_limit >= 64


def test_limits_can_be_lifted():
    """They are higher within."""
    with dynamo.limits_lifted():
        assert min(dynamo.config.recompile_limit, dynamo.config.accumulated_recompile_limit) == 10_000
    assert dynamo.config.recompile_limit == 8


def test_modules_of_torch_are_skipped():
    """dynamo compiles no frame of torch's own modules, and those of a user's."""
    assert dynamo.skips(nn.Linear.forward)
    assert not dynamo.skips(calls_a_global)


def test_restarts_come_through_a_backend():
    """dynamo's restarts are exceptions of dynamo's."""
    assert all(issubclass(each, dynamo.TorchDynamoException) for each in dynamo.RESTARTS)


def test_metrics_are_apart_in_this_thread():
    """Within, another recorder has this thread's metrics; other threads keep theirs."""
    before, others = getattr(_metrics_context_tls, "metrics_context", None), []
    with dynamo.metrics_apart():
        thread = threading.Thread(target=lambda: others.append(hasattr(_metrics_context_tls, "metrics_context")))
        thread.start()
        thread.join()
        assert _metrics_context_tls.metrics_context is not before
        assert dynamo.get_metrics_context() is _metrics_context_tls.metrics_context
    assert others == [False]
    assert before is None or _metrics_context_tls.metrics_context is before


def test_the_count_of_buckets_is_kept():
    """What AOTAutograd counts meanwhile is forgotten."""
    counts = dynamo.counters["aot_autograd"]
    before = counts["total"]
    with dynamo.bucket_count_kept():
        counts["total"] += 3
    assert counts["total"] == before


def test_dynamos_own_wrapper_is_looked_through():
    """`innermost_fn` and `without_disabling` return the function that `disable` wraps."""
    wrapped = torch._dynamo.disable(operator.add, recursive=False)
    assert dynamo.innermost_fn(torch._dynamo.disable(test_limits)) is test_limits
    assert dynamo.without_disabling(wrapped) is operator.add


def test_a_backend_counts_as_registered(fresh_dynamo):
    """A backend of the name of a registered one is equal to a value of dynamo's table."""
    backend = Kept()
    backend.compiler_name = "inductor"
    dynamo.REGISTERED.setdefault(*dynamo.BY_NAME)
    assert backend in dynamo.registry._COMPILER_FNS.values()
    backend.compiler_name = "no such name"
    assert backend not in dynamo.registry._COMPILER_FNS.values()


def test_names_and_backends():
    """A name of the list is found by its name."""
    assert "eager" in dynamo.list_backends()
    assert callable(dynamo.lookup_backend("eager"))
