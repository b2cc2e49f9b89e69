"""`report` on a compiled callable, compared with what torch really did."""

import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import get_compilation_metrics
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel

import backend_kwargs as bk
from backend_kwargs import compile_records
from backend_kwargs.report import Ran
from backend_kwargs.report.advice import INSTEAD_OF_CACHE, advice_on
from backend_kwargs.report.graphs import RETURNED, UNKNOWN
from backend_kwargs.torch_internals import dynamo

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
NOTHING = (
    "Nothing to report: call it first, and compile it by a backend of this package, "
    'such as torch.compile(model, backend=backend_kwargs.make_backend("inductor")).'
)


def _compiled(fn, *calls, spec="tmpl-inductor", **options):
    compiled = torch.compile(fn, backend=bk.make_backend(spec, **options))
    for args in calls:
        compiled(*args)
    return compiled


def test_graph_break_is_told_with_its_place_and_reason():
    """The advice on a graph break has the line that caused it and what to change."""

    def breaks(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    found = bk.report(_compiled(breaks, (torch.ones(3),), spec="eager"))
    place = f"{__file__}:{breaks.__code__.co_firstlineno + 2}"
    assert [graph.ended_by and graph.ended_by.place for graph in found.graphs] == [place, None]
    assert found.breaks[0].reason == "Call to `torch._dynamo.graph_break()`"
    assert found.notes == ()
    assert found.advice == (f"graph break at {place}: {found.breaks[0].reason} -> {found.breaks[0].hint}",)


def test_break_before_any_operation_is_told():
    """For a frame that breaks at once no backend is called, so the report only has the place."""

    def breaks_at_once(x):
        torch._dynamo.graph_break()
        return x * 2

    line = breaks_at_once.__code__.co_firstlineno + 1
    (note,) = bk.report(_compiled(breaks_at_once, (torch.ones(3),), spec="eager")).notes
    where, _, how = note.partition("; ")
    assert where == f"A graph break in breaks_at_once at line {line} comes before any operation"
    assert how == "TORCH_LOGS=graph_breaks shows why."


@pytest.mark.parametrize(
    ("calls", "advice"),
    [
        pytest.param(
            [(torch.ones(3), 1.0), (torch.ones(5), 1.0)],
            "x.size(0) changed once -> torch.compile(..., dynamic=True), "
            "or torch._dynamo.mark_dynamic(x, 0) before the first call",
            id="size",
        ),
        pytest.param(
            [(torch.ones(3), 1.0), (torch.ones(3).double(), 1.0)],
            "the dtype of x changed once -> pass tensors of one dtype",
            id="dtype",
        ),
        pytest.param(
            [(torch.ones(3), True), (torch.ones(3), False)],
            "flag was True and changed once -> keep it at one value: each value has a graph of its own",
            id="python_bool",
        ),
        pytest.param(
            [(torch.ones(3), "a b"), (torch.ones(3), "c")],
            "flag was 'a b' and changed once -> keep it at one value: each value has a graph of its own",
            id="python_text",
        ),
        pytest.param(
            [(torch.ones(3), None), (torch.ones(3), True)],
            "flag was None and changed once -> keep it at one value: each value has a graph of its own",
            id="python_none",
        ),
        pytest.param(
            [(torch.ones(3), 2), (torch.ones(3), 3)],
            "flag was 2 and changed once -> pass it as a tensor, or torch.compile(..., dynamic=True)",
            id="python_number",
        ),
        pytest.param(
            [(torch.ones(3), (1,)), (torch.ones(3), (1, 2))],
            "len(flag) == 1 failed once -> keep it as it was at the first call",
            id="python_tuple",
        ),
    ],
)
def test_recompile_is_told_with_the_guard_that_failed(calls, advice):
    """Each problem with recompiles has its cause and what to change."""

    def varies(x, flag):
        return x + 1 if flag else x - 1

    found = bk.report(_compiled(varies, *calls, spec="eager"))
    assert (len(found.graphs), len(found.recompiles), found.advice) == (2, 1, (advice,))


@pytest.mark.parametrize(
    ("first", "second", "advice"),
    [
        pytest.param(
            torch.no_grad,
            torch.enable_grad,
            "grad_mode changed once -> call it in one such state, for instance always under torch.no_grad()",
            id="grad",
        ),
        pytest.param(
            functools.partial(torch.autocast, "cpu", torch.bfloat16),
            contextlib.nullcontext,
            "autocast changed once -> call it in one such state",
            id="autocast",
        ),
        pytest.param(
            torch.inference_mode,
            torch.no_grad,
            "the dispatch key set of x changed once, as in torch.inference_mode() -> "
            "call it always in torch.inference_mode(), or never",
            id="inference",
        ),
    ],
)
def test_recompile_in_another_state_names_the_state(first, second, advice):
    """A recompile for another state of torch says which state to keep."""

    def in_a_state(x):
        return x + 2

    x, compiled = torch.ones(3), torch.compile(in_a_state, backend=bk.make_backend("eager"))
    for state in (first, second):
        with state():
            compiled(x)
    assert bk.report(compiled).advice == (advice,)


def test_recompile_for_an_input_from_outside_inference_mode_says_where_to_make_it():
    """A loop under inference_mode whose first input was made outside: the advice is to make it inside too."""

    def step(x):
        return x + 3

    x, compiled = torch.ones(3), torch.compile(step, backend=bk.make_backend("eager"))
    with torch.inference_mode():
        compiled(compiled(x))
    (advice,) = bk.report(compiled).advice
    changed, _, remedy = advice.partition(" -> ")
    assert changed == "whether x was made in torch.inference_mode() changed once"
    assert remedy == "make it always in torch.inference_mode(), or never"


@pytest.mark.parametrize(
    ("sizes", "dynamic"),
    [
        pytest.param((1, 3), None, id="from_one"),
        pytest.param((3, 1), None, id="to_one"),
        pytest.param((3, 0), True, id="dynamic_to_zero"),
    ],
)
def test_recompile_for_a_size_of_zero_or_one_is_not_blamed_on_static_sizes(sizes, dynamic):
    """The sizes 0 and 1 have graphs of their own whatever `dynamic` is, so the advice is another; it works."""

    def sized(x):
        return x + 1

    compiled = torch.compile(sized, backend=bk.make_backend("eager"), dynamic=dynamic)
    for size in sizes:
        compiled(torch.ones(size))
    (advice,) = bk.report(compiled).advice
    cause, _, change = advice.partition(" -> ")
    assert cause == "x.size(0) changed once, and 0 and 1 have graphs of their own"
    assert change == "avoid these sizes, or torch._dynamo.decorators.mark_unbacked(x, 0) before the first call"
    torch.compiler.reset()
    for size in sizes:
        x = torch.ones(size)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        compiled(x)
    assert len(bk.report(compiled).graphs) == 1


def test_modules_that_share_torch_code_are_not_blamed_for_each_other():
    """torch calls its own modules through one function: the guard of another one's graph gives no advice."""
    backend = bk.make_backend("eager")
    modules = (torch.nn.Sequential(torch.nn.Linear(n, n)) for n in (2, 3, 4))
    first, second, third = (torch.compile(module, backend=backend) for module in modules)
    with torch._dynamo.config.patch(recompile_limit=2):
        first(torch.ones(1, 2))
        others = bk.report().advice  # on what other tests have left
        second(torch.ones(1, 3))
        third(torch.ones(1, 4))
        assert "size mismatch" in bk.report(second).graphs[0].recompiled
        assert bk.report(second).advice == ()
        assert "size" not in str({*bk.report().advice} - {*others})
        (note,) = bk.report(third).notes
    first_part, _, second_part = note.partition(" too where ")
    assert first_part == "Compiled for another torch.compile of the same code: these graphs serve this one"
    assert second_part == "their guards hold. Elsewhere it runs in eager, if the recompile limit is reached."


def test_graph_in_eager_from_before_a_reset_is_left_out():
    """After torch.compiler.reset(), the report has the new graphs alone, also of a graph in a reference cycle."""

    def reset(x):
        return x.sin() + 43

    compiled = _compiled(reset, (torch.ones(3),), spec="eager")
    torch.compiler.reset()
    compiled(torch.ones(3))
    assert len(bk.report(compiled).graphs) == 1


def test_limit_of_recompiles_is_told():
    """The report says that torch silently runs in eager beyond the recompile limit."""

    def shape_of(x):
        return x + x.shape[0]

    compiled = torch.compile(shape_of, backend=bk.make_backend("eager"), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        for n in range(2, 5):
            compiled(torch.ones(n))
        assert bk.report(compiled).advice[-1].startswith("3 variants of frame ")


def test_cache_misses_then_hits():
    """A second compile of one graph with the same cache is reported as a hit."""

    def cached(x):
        return x.sin() + 41

    def outcome():
        torch._dynamo.reset()
        return bk.report(_compiled(cached, (torch.ones(8),))).graphs[0].cache

    with fresh_cache():
        assert [outcome(), outcome()] == ["miss", "hit"]


def test_cache_that_is_off_is_told():
    """If an option turns the cache off, the report claims neither a hit nor a miss."""

    def uncached(x):
        return x.sin() + 42

    found = bk.report(_compiled(uncached, (torch.ones(8),), options={"force_disable_caches": True}))
    assert found.graphs[0].cache in {"off", "bypass: FX graph cache is not enabled"}


def test_bypassed_cache_is_told_with_its_reason():
    """The report contains torch's own reason."""

    def uncached(x):
        return x.sin() + 43

    found = bk.report(_compiled(uncached, (torch.ones(8),), options={"fx_graph_cache": False}))
    assert found.graphs[0].cache == "bypass: FX graph cache is not enabled"
    again = f"each later process compiles again, {found.graphs[0].seconds:.1f} s"
    assert found.advice == (f"cache bypass: FX graph cache is not enabled: {again} -> {INSTEAD_OF_CACHE}",)
    pinned = replace(found.graphs[0], options={"reproducible": "pinned", "lock": "k.lock"})
    assert [*advice_on([pinned])] == []  # a lock's graphs are never cached


@pytest.mark.parametrize("options", [pytest.param({}, id="python"), pytest.param({"cpp_wrapper": True}, id="cpp")])
def test_kernels_are_told_by_kind(options):
    """A graph's fused kernel and library call are both reported, with either wrapper."""

    def mm_softmax(x, w):
        return torch.softmax(x @ w, -1)

    compiled = _compiled(mm_softmax, (torch.ones(8, 8), torch.ones(8, 8)), options=options)
    code = bk.report(compiled).graphs[0].codes[0]
    assert code.kernels == {"C++": ("cpp_fused__softmax_0",), "extern": ("mm_out" if options else "mm",)}


def test_backward_compiled_later_is_found():
    """After the first backward call the report also has the backward graph."""

    def sines(x):
        return (x.sin() * x).sum()

    compiled = torch.compile(sines, backend=bk.make_backend("tmpl-inductor"))
    with fresh_cache():
        loss = compiled(torch.ones(8, requires_grad=True))
        assert [code.direction for code in bk.report(compiled).graphs[0].codes] == ["forward"]
        loss.backward()
    codes = bk.report(compiled).graphs[0].codes
    assert [code.direction for code in codes] == ["forward", "backward"]
    assert codes[1].kernels.keys() == {"C++"}
    assert codes[1].seconds > 0


def test_backwards_of_two_graphs_are_told_apart():
    """Each trained graph has the seconds of its own backward pass, and the total is their sum."""
    calls = [_compiled(fn) for fn in (lambda x: (x.sin() * x).sum(), lambda x: (x.cos() * x).sum())]
    with fresh_cache(), torch._functorch.config.patch(force_non_lazy_backward_lowering=False):
        losses = [call(torch.ones(8, requires_grad=True)) for call in calls]
        for loss in reversed(losses):
            loss.backward()
        found = [bk.report(call) for call in calls]
    kept = {m.compile_id: m.duration_us / 1e6 for m in get_compilation_metrics() if not m.is_forward and m.duration_us}
    for each in found:
        (graph,) = each.graphs
        forward, backward = graph.codes
        assert backward.seconds == kept[graph.compile_id]
        assert (forward.seconds, each.seconds) == (graph.seconds, graph.seconds + backward.seconds)


@pytest.mark.parametrize(
    ("options", "differs"),
    [pytest.param({"epilogue_fusion": True}, False, id="same"), pytest.param({"cpp.simdlen": 1}, True, id="other")],
)
def test_code_is_compared_with_the_default(options, differs):
    """An option that changes the generated code is distinguished from one that does not."""

    default = _compiled(lambda x: x.cos() * 2, (torch.ones(64),))
    with fresh_cache():  # generated again, with another graph number in the code's comments
        other = _compiled(lambda x: x.cos() * 2, (torch.ones(64),), options=options)
    found = bk.report(other, against=default)
    assert [code.differs for code in found.graphs[0].codes] == [differs]


def test_skipped_cudagraphs_are_told():
    """On a CPU the report says for each graph that CUDA graphs cannot be used."""
    if torch.cuda.is_available():
        pytest.skip("here CUDA graphs might act")

    def plus(x):
        return x + 44

    with pytest.warns(bk.BackendKwargsWarning):
        found = bk.report(_compiled(plus, (torch.ones(8),), spec="tmpl-inductor:cudagraphs"))
    assert found.graphs[0].codes[0].cudagraphs == "skipped: no tensor is on a GPU"
    assert found.advice == (
        "CUDA graphs skipped: no tensor is on a GPU -> leave them out here: they replay work of a GPU alone",
    )


class _Twice(torch.nn.Module):
    def forward(self, x):
        return x * 2


def test_module_and_module_compile_are_found():
    """torch's modules, users' modules and `Module.compile()`, which start in three ways, are found."""
    in_place = _Twice()
    in_place.compile(backend=bk.make_backend("eager"))
    in_place(torch.ones(2, 4))
    wrapped = [_compiled(module, (torch.ones(2, 4),), spec="eager") for module in (_Twice(), torch.nn.Linear(4, 4))]
    assert [len(bk.report(each).graphs) for each in (in_place, *wrapped)] == [1, 1, 1]


def test_graphs_of_other_modules_are_not_told():
    """torch compiles all its own modules through one function; their graphs are kept apart."""
    called = _compiled(torch.nn.ReLU(), (torch.ones(2, 4),), spec="eager")
    assert len(bk.report(called).graphs) == 1
    uncalled = torch.compile(torch.nn.Linear(4, 4), backend=bk.make_backend("eager"))
    with pytest.raises(bk.BackendKwargsError):
        bk.report(uncalled)


def test_functions_that_are_not_inlined_count():
    """A function called from uncompiled code below the compiled one is compiled too, and is reported with it."""

    @torch._dynamo.disable(recursive=False)
    def uncompiled(x):
        return below(x)

    def below(x):
        return x * 3

    found = bk.report(_compiled(lambda x: uncompiled(x + 1), (torch.ones(3),), spec="eager"))
    assert [graph.function for graph in found.graphs] == ["<lambda>", "below"]


def test_graphs_shared_by_two_compiles_of_one_code_are_told():
    """A second torch.compile of a function runs the first one's graphs, and its report says so."""

    def shared(x):
        return x + 45

    _compiled(shared, (torch.ones(3),), spec="eager")
    second = _compiled(shared, (torch.ones(3),), spec="eager")
    assert len(bk.report(second).graphs) == 1


@pytest.mark.parametrize(
    ("backend", "called"), [pytest.param("eager", True, id="torchs_own"), pytest.param("ours", False, id="not_called")]
)
def test_nothing_to_report_is_an_error(backend, called):
    """Without a compiled call, `report` raises one line that says what is missing."""
    compiled = torch.compile(lambda x: x + 46, backend=bk.make_backend("eager") if backend == "ours" else backend)
    if called:
        compiled(torch.ones(3))
    with pytest.raises(bk.BackendKwargsError) as error:
        bk.report(compiled)
    assert str(error.value) == NOTHING


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x):
        return self.lstm(x)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_place(module, backend):
    module.compile(backend=backend)
    return module


SKIPPED = (
    "dynamo skips torch's own modules, such as {}, unless torch.compile is given one -> "
    "torch.compile(module), or call it in a function or a module of your own"
)
NO_RNN = (
    "Attempted to wrap RNN, GRU, or LSTM -> "
    "Set torch._dynamo.config.allow_rnn=True to enable experimental support for RNN, GRU, and LSTM in Dynamo"
)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        pytest.param(
            lambda backend: in_place(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend),
            SKIPPED.format("Sequential"),
            id="Sequential().compile()",
        ),
        pytest.param(
            lambda backend: in_place(nn.Linear(8, 8), backend), SKIPPED.format("Linear"), id="Linear().compile()"
        ),
        pytest.param(
            lambda backend: torch.compile(DistributedDataParallel(nn.Sequential(nn.Linear(8, 8))), backend=backend),
            SKIPPED.format("Sequential"),
            id="DDP of torch's own modules",
        ),
        pytest.param(lambda backend: torch.compile(nn.LSTM(8, 8), backend=backend), NO_RNN, id="LSTM"),
        pytest.param(lambda backend: torch.compile(Recurrent(), backend=backend), NO_RNN, id="LSTM in a module"),
        pytest.param(
            lambda backend: torch.compile(lambda x: x.shape, backend=backend),
            "dynamo found no operation on tensors in it -> nothing, as there is nothing to compile",
            id="no operation",
        ),
        pytest.param(
            lambda backend: torch.compile(lambda x: id(x) and None, backend=backend),
            "dynamo found no operation on tensors in it -> nothing, as there is nothing to compile",
            id="no tensor",
        ),
    ],
)
def test_no_graph_is_told_with_its_reason(make, why):
    """If dynamo had no graph for the backend, the report says so and why, even after others were compiled."""
    torch.compile(nn.Linear(8, 8), backend=bk.make_backend("eager"))(torch.ones(3, 8))
    compiled = make(bk.make_backend("eager"))
    compiled(torch.ones(3, 8))
    reported = bk.report(compiled)
    assert (reported.graphs, reported.advice) == ((), (f"no graph reached a backend: {why}",))
    assert str(reported).splitlines()[-1] == f"advice: {reported.advice[0]}"


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", id="torch's own"),
        pytest.param(lambda gm, inputs: gm.forward, id="a function"),
        pytest.param(bk.make_backend("tmpl-inductor", epilogue_fusion=False), id="ours with an option"),
    ],
)
def test_another_backends_graph_is_not_missing(backend):
    """A module is reported neither as having no graph nor as served by another one's, under another backend."""
    ours = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="tmpl-inductor")
    ours(torch.ones(3, 8))
    compiled = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend=backend)
    if not isinstance(backend, bk.Backend):
        compiled(torch.ones(3, 8))
    with pytest.raises(bk.BackendKwargsError) as error:
        bk.report(compiled)
    assert str(error.value) == NOTHING


def gives_back(gm, example_inputs):
    return gm.forward


def rewrites(gm, example_inputs):
    for node in gm.graph.nodes:
        if node.target is torch.sin:
            node.target = torch.cos
    gm.recompile()
    return gm.forward


def wraps(gm, example_inputs):
    return lambda *args: list(gm(*args))


def on_inductor(gm, example_inputs):
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs)


@pytest.mark.parametrize(
    ("backend", "ran"),
    [
        pytest.param("inductor", None, id="Inductor"),
        pytest.param("dynamo:inductor", None, id="torch's Inductor"),
        pytest.param(gives_back, RETURNED, id="gm.forward"),
        pytest.param("eager", RETURNED, id="torch's eager"),
        pytest.param(rewrites, UNKNOWN, id="gm.forward, rewritten"),
        pytest.param(wraps, UNKNOWN, id="a wrapper"),
        pytest.param("aot_eager", UNKNOWN, id="another of torch's"),
        pytest.param(
            on_inductor,
            Ran("unknown", "ran by Inductor, which this backend is built on or falls back to"),
            id="built on Inductor",
        ),
    ],
)
def test_what_ran_is_told(backend, ran):
    """A report says what ran a graph if it is not clearly the backend: eager, or unknown."""
    reported = bk.report(_compiled(lambda x: torch.sin(x) + 47, (torch.ones(3),), spec=backend))
    assert reported.ran == reported.graphs[0].ran == ran
    assert (ran is None) or f"  {ran.what}" in str(reported).splitlines()


def test_what_is_not_compiled_is_an_error():
    """A callable that torch.compile did not return raises."""
    with pytest.raises(bk.BackendKwargsError) as error:
        bk.report(len)
    assert str(error.value) == (
        "report's argument must be what torch.compile returned, or hold it, as a module or a Trainer does, "
        "got <built-in function len> (builtin_function_or_method)."
    )


def test_threads_do_not_mix():
    """Each thread's graph is reported for the callable compiled in that thread."""

    def work(at):
        compiled[at] = _compiled(functions[at], (torch.ones(at + 2),), spec="eager")

    functions = [eval(f"lambda x: x + {at}") for at in range(4)]
    compiled = {}
    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = {record.owner() for record in compile_records.records()}
    assert owners >= set(functions)
    assert [len(bk.report(compiled[at]).graphs) for at in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("spec", ["eager", "tmpl-inductor"])
def test_record_goes_with_the_compiled_graph(spec):
    """A record lives exactly as long as its graph."""
    gc.collect()
    before = len(compile_records.records())
    compiled = _compiled(torch.nn.Linear(4, 4), (torch.ones(2, 4),), spec=spec)
    gc.collect()
    assert len(compile_records.records()) == before + 1
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert len(compile_records.records()) == before


def test_what_the_compiler_returned_is_not_wrapped():
    """A call costs the same as without a report."""
    made = []

    def compiler_fn(gm, example_inputs):
        made.append(gm.forward)
        return made[-1]

    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    assert bk.make_backend(compiler_fn)(gm, [torch.ones(3)]) is made[0]


def test_report_reads_as_text_and_as_json():
    """The text has one line for the whole, then the graphs; the dict is plain and contains no code."""

    def plus(x):
        return x + 47

    found = bk.report(_compiled(plus, (torch.ones(3),), epilogue_fusion=False))
    lines = str(found).splitlines()
    assert lines[0].startswith("1 graph, 0 breaks, 0 recompiles, ")
    assert lines[2:] == ["  options: epilogue_fusion=False", "  forward: 1 C++ (cpp_fused_add_0); CUDA graphs off"]
    data = json.loads(json.dumps(found.to_dict()))
    assert data["graphs"][0]["codes"][0]["kernels"] == {"C++": ["cpp_fused_add_0"]}
    assert "source" not in data["graphs"][0]["codes"][0]


TRACED = """
import torch, backend_kwargs as bk
def fn(gm, example_inputs, *, table=None, level=1): return gm.forward
mine = bk.make_backend(fn, table={(1, 2): 3}, level=2)
for backend in bk.make_backend("tmpl-inductor:aten", epilogue_fusion=False), mine:
    print(torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3)).tolist())
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return the options of two graphs as TORCH_TRACE has them: torch reads the variable when it is imported."""
    folder = tmp_path_factory.mktemp("trace")
    env = {**os.environ, "TORCH_TRACE": str(folder)}
    done = subprocess.run([sys.executable, "-c", TRACED], env=env, check=True, capture_output=True, text=True)
    assert done.stdout == "[2.0, 2.0, 2.0]\n" * 2
    lines = next(folder.iterdir()).read_text().splitlines()
    return [json.loads(lines[at + 1]) for at, line in enumerate(lines) if '"backend_kwargs_options"' in line]


def test_options_are_in_torchs_structured_trace(traced):
    """With TORCH_TRACE the graph's effective options are among torch's artifacts."""
    written, _ = traced
    assert written["backend"] == "tmpl-inductor:aten"
    assert written["options"]["epilogue_fusion"] is False
    assert written["options"]["max_autotune_gemm_backends"] == "ATEN"


def test_trace_tells_what_json_cannot(traced):
    """An option's value without a JSON form is traced as its repr, and the graph compiles."""
    assert traced[1] == {"backend": "__main__:fn", "options": {"table": "{(1, 2): 3}", "level": 2}}


@pytest.mark.parametrize(
    ("module", "step", "graphs"),
    [
        pytest.param(dynamo, "trace_structured", 1, id="trace"),
        pytest.param(dynamo, "cache_counts", 1, id="cache"),
        pytest.param(compile_records, "Record", 0, id="record"),
    ],
)
def test_recording_never_fails_a_compile(monkeypatch, module, step, graphs):
    """A graph compiles whatever recording fails; without trace or counts of the caches its record is still kept."""

    def breaks(*_, **__):
        raise TypeError("moved elsewhere")

    monkeypatch.setattr(module, step, breaks)
    plus = eval("lambda x: x + 48")
    compiled = _compiled(plus, spec="eager")
    assert compiled(torch.ones(2)).tolist() == [49, 49]
    assert len([record for record in compile_records.records() if record.owner() is plus]) == graphs
