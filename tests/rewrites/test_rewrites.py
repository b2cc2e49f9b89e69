"""Rewrites as values: names, the option, plug-ins, and the state after a compile."""

import dataclasses
import operator
import os
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, register_graph_pattern
from torch._inductor.utils import fresh_cache
from torch.testing._internal.two_tensor import TwoTensor

import backend_kwargs
from backend_kwargs import BackendKwargsError, make_backend
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.facts import Compiled
from backend_kwargs.rewrites import (
    Rewrite,
    register_rewrite,
    traced,
)
from backend_kwargs.rewrites import table as rewrites
from backend_kwargs.rewrites.matching import with_fallback
from backend_kwargs.rewrites.traced import RewritePass, with_rewrites
from tests import forks
from tests.rewrites.on_a_cpu import compiled_by

PLACES = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo):
    before = dict(rewrites._registered)
    yield
    rewrites._registered.clear()
    rewrites._registered.update(before)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # tables of the host are left alone where there is a GPU
OF_A_SUBCLASS = {
    "contraction": (lambda a, b: (a[:, None] * b).sum(-1), (torch.randn(16, 8), torch.randn(16, 8))),
    "gather_sum": (
        lambda i, t: F.embedding(i, t).sum(1),
        (torch.randint(50, (6, 5), device=DEVICE), torch.randn(50, 16, device=DEVICE)),
    ),
    "cross_entropy": (F.cross_entropy, (torch.randn(5, 8), torch.randint(8, (5,)))),
}


@pytest.mark.parametrize("name", OF_A_SUBCLASS)
@torch.no_grad()
def test_tensors_of_a_subclass(name):
    """A subclass such as DTensor has no rules for our operators, so its tensors' patterns stay as they are."""
    fn, args = OF_A_SUBCLASS[name]
    compiled, counts = compiled_by(rewrites.resolved(rewrites.find_rewrite(name).traced), fn)
    torch.testing.assert_close(compiled(*(TwoTensor(arg, arg.clone()) for arg in args)).a, fn(*args))
    assert counts == [0]
    torch.testing.assert_close(compiled(*args), fn(*args))
    assert counts == [0, 1]


def feed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def rewritten(compiled):
    (graph,) = backend_kwargs.report(compiled).graphs
    return dict(graph.rewritten)


def calls_in(compiled, operator):
    """Return whether the generated code calls `operator`: `rewritten` looks only for those of the option's rewrites."""
    (graph,) = backend_kwargs.report(compiled).graphs
    return any(operator in code.source for code in graph.codes)


def called(fn, x, **options):
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=make_backend("tmpl-inductor", options))
    with torch.no_grad():
        compiled(x)
    return compiled


WRONG = {
    "name": (
        {"rewrites": ("convolutions",)},
        "Unknown rewrite 'convolutions'. Did you mean 'convolution'?",
    ),
    "far from all": (
        {"rewrites": ("zzz",)},
        (
            "Unknown rewrite 'zzz'. Rewrites are stem_convolution, convolution, grouped_convolution, "
            "depthwise_convolution, patches, transposed_convolution, interpolation, scaled_product, "
            "convolution_as_product, linear_activation, onednn, attention, window_attention, attention_mask, "
            "multihead_attention, decode_attention, fused_attention, cross_entropy, linear_cross_entropy, "
            "layer_norm_backward, contraction, matrix_vector, aligned_products, gather_sum, byte_sort, scatter_reduce, "
            "packed, approximate_gelu."
        ),
    ),
    "removed": (
        {"rewrites": ("cudnn_attention",)},
        "Rewrite 'cudnn_attention' was removed: leave it out; torch chooses cuDNN's kernel itself where it is faster.",
    ),
    "type": (
        {"rewrites": 3},
        "Option 'rewrites' must be tuple[str, ...] | None, got 3 (int).",
    ),
    "of a part": (
        {"rewrites": (1,)},
        "Option 'rewrites' must be tuple[str, ...] | None, got (1,) (tuple).",
    ),
    "strict": (
        {"rewrites": ("grouped_convolution",), "strict": True},
        ("Rewrite 'grouped_convolution' cannot work here: no CUDA GPU is visible."),
    ),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options(options, message):
    """A wrong name, type or requirement raises at once, with the next step."""
    if "strict" in options and torch.cuda.is_available():
        pytest.skip("a GPU is visible")
    with pytest.raises(BackendKwargsError) as e:
        make_backend("tmpl-inductor", options)
    assert str(e.value) == message


@pytest.mark.parametrize("value", ["packed, patches", ["packed", "patches", "packed"], ("packed", "patches")], ids=str)
def test_names_in_any_form(value):
    """Names may be a text, a list or a tuple; a repeated one counts once."""
    backend = make_backend("tmpl-inductor", rewrites=value)
    assert backend.options["rewrites"] == ("packed", "patches")
    assert backend == make_backend("tmpl-inductor", {"rewrites": ("packed", "patches")})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patterns": 3}, "Rewrite's 'patterns' must be a function or 'module:function', got 3 (int)."),
        ({"traced": "name"}, "Rewrite's 'traced' must be a function or 'module:function', got 'name' (str)."),
        (
            {"patterns": "a:b", "operators": ("relu",)},
            "Rewrite's 'operators' must be of the form 'namespace::name', got 'relu' (str).",
        ),
        (
            {"patterns": "a:b", "objective": "speed"},
            "Rewrite's 'objective' must be 'latency' or 'memory', got 'speed' (str).",
        ),
    ],
    ids=["patterns", "traced", "operators", "objective"],
)
def test_a_wrong_rewrite(options, message):
    """A wrong part of a rewrite raises where it is made."""
    with pytest.raises(BackendKwargsError) as e:
        Rewrite("wrong", **options)
    assert str(e.value) == message


def test_an_unknown_requirement():
    """A requirement that does not exist is named when the rewrite is."""
    register_rewrite("needy", Rewrite("needy", patterns="a:b", needs=("gpus",)))
    with pytest.raises(BackendKwargsError) as e:
        make_backend("tmpl-inductor", rewrites=("needy",))
    rewrites._registered.pop("needy")
    assert str(e.value) == "Unknown requirement 'gpus'. Did you mean 'gpu'?"


def test_a_result_that_is_no_change():
    """A rewrite of dynamo's graph that returns anything else than a Change or None is named."""
    register_rewrite("odd", Rewrite("odd", traced=lambda gm, inputs: gm))
    try:
        with pytest.raises(
            torch._dynamo.exc.BackendCompilerFailed, match="The result of rewrite 'odd' must be a Change"
        ):
            called(lambda x: x + 1, torch.ones(2), rewrites=("odd",))
    finally:
        rewrites._registered.pop("odd")


def scaling(factor):
    def patterns(passes):
        @register_graph_pattern(CallFunction(torch.ops.aten.relu.default, KeywordArg("x")), pass_dict=passes)
        def fuse(match, x):
            old = match.output_node()
            with old.graph.inserting_before(old):
                new = old.graph.call_function(torch.ops.aten.mul.Tensor, (x, factor))
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
            old.graph.erase_node(old)

    return patterns


def test_the_key_knows_what_a_function_holds():
    """Two functions of the same source whose closures or defaults differ have different keys."""
    made = [scaling(2.0), scaling(3.0), lambda passes, by=2: None, lambda passes, by=3: None]
    keys = {rewrites._source_hash(Rewrite("scaled", patterns=each)) for each in made}
    assert len(keys) == 4
    assert rewrites._source_hash(Rewrite("scaled", patterns=scaling(2.0))) in keys


SCRIPT = """
import sys
from backend_kwargs.rewrites import table as rewrites
def helper():
    return 2
def patterns(passes):
    helper()
print(rewrites._source_hash(rewrites.Rewrite("mine", patterns=patterns)))
"""


def test_the_key_knows_the_script(tmp_path):
    """A function of the running script has the whole script in its key, with the helpers that it calls."""
    said = []
    for text in (SCRIPT, SCRIPT, SCRIPT.replace("return 2", "return 3")):
        (tmp_path / "train.py").write_text(text)
        said.append(forks.run(tmp_path / "train.py").stdout)
    assert said[0]
    assert said[0] == said[1] != said[2]


def test_a_rewrite_has_one_function():
    """A rewrite with both functions, or none, raises."""
    for given in ({}, {"patterns": "a:b", "traced": "a:b"}):
        with pytest.raises(BackendKwargsError) as e:
            Rewrite("nothing", **given)
        assert str(e.value) == "A rewrite must have either `patterns` or `traced`; give exactly one."


def test_a_rewrite_takes_lists():
    """Lists of operators and requirements are kept as tuples, so that a rewrite can be a key; a string raises."""
    rewrite = Rewrite("nothing", patterns="a:b", operators=["c::d"], needs=["gpu"])
    assert (rewrite.operators, rewrite.needs) == (("c::d",), ("gpu",))
    assert len({rewrite}) == 1
    with pytest.raises(BackendKwargsError) as e:
        Rewrite("nothing", patterns="a:b", needs="gpu")
    assert str(e.value) == "Rewrite's 'needs' must be a tuple of str, got 'gpu' (str)."


def test_each_module_has_its_row():
    """The table has the row of each module of a rewrite, which it reads without importing the module."""
    names = {path.stem for path in Path(rewrites.__file__).parent.glob("*.py")}
    rows = {name: vars(import_module(f"backend_kwargs.rewrites.{name}")).get("REWRITE") for name in names}
    read = {name: dataclasses.replace(row, fitting=len) for name, row in rewrites.BUILT_IN.items()}
    assert read == {name: dataclasses.replace(row, fitting=len) for name, row in rows.items() if row}


def test_the_order_is_that_of_the_rows():
    """Each built-in rewrite has a place of its own, and they are listed and raced by it."""
    places = [row.order for row in rewrites.BUILT_IN.values()]
    assert places == sorted(set(places))
    assert rewrites.list_rewrites()[: len(places)] == [*rewrites.BUILT_IN]


def test_every_built_in_resolves():
    """Each built-in rewrite names an existing function and defined operators."""
    for rewrite in rewrites.BUILT_IN.values():
        assert callable(rewrites.resolved(rewrite.patterns or rewrite.traced))
        for name in rewrite.operators:
            space, _, operator = name.partition("::")
            assert hasattr(getattr(torch.ops, space), operator)


def test_an_inert_rewrite_warns_once():
    """On a CPU a rewrite that needs a GPU warns once, and the graph stays unchanged."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible")
    message = "Rewrite 'grouped_convolution' cannot act fully here: no CUDA GPU is visible; graphs stay as they are."
    with pytest.warns(backend_kwargs.BackendKwargsWarning) as caught:
        compiled = called(feed(), torch.randn(2, 8), rewrites=("grouped_convolution",))
    assert [str(each.message) for each in caught if each.category is backend_kwargs.BackendKwargsWarning] == [message]
    assert rewritten(compiled) == {}
    assert backend_kwargs.explain("tmpl-inductor", rewrites=("grouped_convolution",)).notes[-1] == message


def test_text_and_toml(tmp_path):
    """Rewrites can be named as a list in the environment's JSON and in TOML files, since names are data."""
    path = tmp_path / "templates.toml"
    path.write_text('[templates.fused]\noptions = {rewrites = ["convolution"]}\n')
    try:
        backend_kwargs.load_templates(path)
    except BackendKwargsError as error:  # the form of the file, if it is another
        pytest.fail(str(error))
    named = make_backend("tmpl-inductor", rewrites=["convolution"])
    assert named == make_backend("tmpl-inductor", rewrites=("convolution",))
    assert make_backend("tmpl-inductor:fused").options == named.options
    assert backend_kwargs.Backend.from_config(named.to_config()) == named


def test_of_no_use_in_a_plain_dict():
    """A plain dict of Inductor's options cannot contain rewrites, and the error says so."""
    with pytest.raises(BackendKwargsError) as e:
        make_backend("tmpl-inductor", rewrites=("convolution",)).inductor_config()
    assert str(e.value).startswith("Option 'rewrites' does not work in a plain dict: it is an option of backend_kwargs")


def doubled_to_sum(passes):
    """Replace x * 2 by x + x."""

    @register_graph_pattern(CallFunction(torch.ops.aten.mul.Tensor, KeywordArg("x"), 2), pass_dict=passes)
    def fuse(match, x):
        old = match.output_node()
        with old.graph.inserting_before(old):
            new = old.graph.call_function(torch.ops.aten.add.Tensor, (x, x))
            new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
        old.graph.erase_node(old)


def test_somebody_elses():
    """A registered rewrite works like a built-in one; the same one may be registered again, another one raises."""
    theirs = Rewrite("x * 2 as x + x", patterns=doubled_to_sum)
    register_rewrite("doubled", theirs)
    register_rewrite("doubled", theirs)
    for other in (dataclasses.replace(theirs, version=2), rewrites.BUILT_IN["packed"]):
        with pytest.raises(BackendKwargsError) as e:
            register_rewrite("doubled", other)
        assert str(e.value) == "Rewrite 'doubled' exists and is another; choose another name."
    with pytest.raises(BackendKwargsError, match="register_rewrite's second argument must be a Rewrite, got"):
        register_rewrite("other", doubled_to_sum)
    x = torch.randn(4)
    compiled = called(lambda x: x * 2, x, rewrites=("doubled",))
    torch.testing.assert_close(compiled(x), x * 2)
    assert rewrites.raced_rewrites(None)[-1] == "doubled"


def test_entry_point(install):
    """A rewrite of an installed package is found by name, and loaded and raced only if it is named."""
    source = "from backend_kwargs.rewrites import Rewrite\n"
    source += "mine = Rewrite('mine', patterns='somewhere:function')\nbroken = 1\n"
    install("their_rewrites", source, "backend_kwargs.rewrites", mine="mine", broken="broken")
    assert make_backend("tmpl-inductor", rewrites=("mine",)).options["rewrites"] == ("mine",)
    assert "mine" in rewrites.list_rewrites()
    assert "mine" not in rewrites.raced_rewrites(None)
    assert "mine" in rewrites.raced_rewrites(("mine",))
    with pytest.raises(BackendKwargsError) as e:
        make_backend("tmpl-inductor", rewrites=("broken",))
    assert str(e.value) == "Entry point 'their_rewrites:broken' must be a Rewrite, got 1 (int)."


THEIRS = """
import torch
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, register_graph_pattern
from backend_kwargs.rewrites import Rewrite

@torch.library.custom_op("their_rewrites::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x + x

@doubled.register_fake
def _(x):
    return torch.empty_like(x)

def add_patterns(passes):
    @register_graph_pattern(CallFunction(torch.ops.aten.mul.Tensor, KeywordArg("x"), 2), pass_dict=passes)
    def fuse(match, x):
        match.replace_by_example(lambda x: torch.ops.their_rewrites.doubled(x), [x])

mine = Rewrite("x * 2 as one call", patterns="their_rewrites:add_patterns", operators=("their_rewrites::doubled",))
"""


def test_the_pattern_of_an_entry_point(install):
    """A rewrite of an installed package replaces its pattern in the compiled graph, also beside a built-in one."""
    install("their_rewrites", THEIRS, "backend_kwargs.rewrites", mine="mine")
    model, x = feed(), torch.randn(2, 8)
    fn = lambda x: model(x) * 2  # noqa: E731
    compiled = called(fn, x, rewrites=("mine", "linear_activation"))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), fn(x))
    assert rewritten(compiled) == {"mine": 1, "linear_activation": 1}


class Counting(CustomGraphPass):
    """A user's pass that counts its calls, and keeps the operators that it found."""

    def __init__(self, identity):
        self.calls = 0
        self.identity = identity
        self.found = []

    def __call__(self, graph):
        self.calls += 1
        self.found = [str(node.target) for node in graph.nodes if node.op == "call_function"]

    def uuid(self):
        return self.identity


@pytest.mark.parametrize("place", PLACES)
def test_the_users_own_pass_still_runs(place):
    """The user's pass, from an option or from Inductor's configuration, runs as well as the rewrites."""
    own = Counting("mine")
    x = torch.randn(2, 8)
    with fresh_cache():
        compiled = called(feed(), x, **{"rewrites": ("linear_activation",), place: own})
        assert rewritten(compiled) == {"linear_activation": 1}
        assert own.calls == 1
    with fresh_cache(), config.patch({place: own}):
        assert rewritten(called(feed(), x, rewrites=("linear_activation",))) == {"linear_activation": 1}
        assert own.calls == 2
    assert ("backend_kwargs.linear_relu.default" in own.found) is place.endswith("post_pass")


@pytest.mark.skipif(not hasattr(custom_graph_pass, "get_custom_graph_passes"), reason="this torch takes one pass")
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("place", PLACES)
def test_several_passes_of_the_user_still_run(place, kind):
    """All passes of a list or tuple, from an option or from Inductor's configuration, run as well as the rewrites."""
    own = kind(Counting(name) for name in ("one", "two"))
    x = torch.randn(2, 8)
    with fresh_cache():
        compiled = called(feed(), x, **{"rewrites": ("linear_activation",), place: own})
        assert rewritten(compiled) == {"linear_activation": 1}
        assert [each.calls for each in own] == [1, 1]
    with fresh_cache(), config.patch({place: own}):
        assert rewritten(called(feed(), x, rewrites=("linear_activation",))) == {"linear_activation": 1}
        assert [each.calls for each in own] == [2, 2]


@pytest.mark.skipif(
    not hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"), reason="this torch has no such passes"
)
@pytest.mark.parametrize("place", PLACES)
def test_a_users_pass_that_knows_inference(place):
    """A user's pass that is told whether the graph is of inference is told the same beside rewrites."""

    class Knowing(custom_graph_pass.CustomInferenceAwareGraphPass):
        def __init__(self):
            self.told = []

        def __call__(self, graph, is_inference):
            self.told.append(is_inference)

        def uuid(self):
            return "knowing"

    own, model, x = Knowing(), feed(), torch.randn(2, 8)
    with fresh_cache(), config.patch({place: own}):
        called(model, x, rewrites=("linear_activation",))
        trained = torch.compile(model, backend=make_backend("tmpl-inductor", rewrites=("linear_activation",)))
        trained(x).sum().backward()
    assert own.told == [True, False, False]


def test_uuid():
    """The pass's uuid depends on names and the user's passes; without a user's uuid there is none, and no cache."""
    uuids = [
        RewritePass(names, users).uuid()
        for names in (["convolution"], ["linear_activation"], ["convolution", "linear_activation"])
        for users in ([], [Counting("one")], [Counting("two")])
    ]
    assert len(set(uuids)) == len(uuids)
    assert RewritePass(["convolution"], []).uuid() == uuids[0]
    assert RewritePass(["convolution"], [lambda graph: None]).uuid() is None


def test_the_key_knows_rewrites_of_dynamos_graph():
    """Their sources are part of the key, since they may decompose an operator in another way; nothing is lowered."""
    patched = with_rewrites({"max_autotune": True}, ("packed",))
    made = patched.pop("post_grad_custom_pre_pass")
    assert (patched, made.uuid()[:2]) == (
        {"max_autotune": True},
        ("backend_kwargs.rewrites", rewrites.fingerprint(["packed"])),
    )
    made(torch.fx.Graph())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_rewrites_that_work_nothing_is_patched():
    """Rewrites that need a GPU add no pass without one."""
    assert with_rewrites({"max_autotune": True}, ("grouped_convolution",)) == {"max_autotune": True}


@pytest.mark.parametrize("first", ["plain", "rewritten"])
def test_caches_tell_graphs_apart(first):
    """With warm caches each compile finds its own code."""
    x = torch.randn(2, 8)
    ways = {"plain": {}, "rewritten": {"rewrites": ("linear_activation",)}}
    order = [first, *(way for way in ways if way != first)]
    with fresh_cache():
        for _ in range(2):
            counters.clear()
            for way in order:
                compiled = called(feed(), x, **ways[way])
                assert rewritten(compiled) == ({"linear_activation": 1} if way == "rewritten" else {})
                assert calls_in(compiled, "linear_relu") is (way == "rewritten")
        hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
        assert hits >= len(order)


def by_choice(passes):
    """Replace the CPU's kernel of SDPA by `attention`'s operator, which computes on any device."""

    @register_graph_pattern(
        CallFunction(
            operator.getitem,
            CallFunction(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
                KeywordArg("q"),
                KeywordArg("k"),
                KeywordArg("v"),
                scale=KeywordArg("scale"),
            ),
            0,
        ),
        pass_dict=passes,
    )
    def fuse(match, q, k, v, scale):
        chosen = import_module("backend_kwargs.rewrites.attention").attention
        match.replace_by_example(lambda q, k, v: chosen(q, k, v, None, scale).transpose(1, 2), [q, k, v])


@pytest.mark.parametrize("first", ["plain", "rewritten"])
@pytest.mark.parametrize("before", [True, False], ids=["cuDNN allowed before", "cuDNN allowed after"])
def test_choices_of_attention_with_warm_caches(before, first):
    """With warm caches and another `enable_cudnn_sdp`, the option still has its kernel and the plain graph its own.

    This is shown on a CPU, with a rewrite of the CPU's kernel that inserts `attention`'s operator. AOTAutograd's
    key lacks the flag: plain code is found again under another one, rewritten code is not, since the rewrite has it.
    """
    register_rewrite(
        "chosen", Rewrite("a choice", patterns=by_choice, operators=rewrites.BUILT_IN["attention"].operators)
    )
    x = torch.randn(2, 4, 16, 16)
    ways = {"plain": {}, "rewritten": {"rewrites": ("chosen",)}}
    order = [first, *(way for way in ways if way != first)]
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    fn = lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1, scale=0.2)  # noqa: E731
    try:
        with fresh_cache():
            for flag in (before, not before):
                torch.backends.cuda.enable_cudnn_sdp(flag)
                counters.clear()
                for way in order:
                    compiled = called(fn, x, **ways[way])
                    assert rewritten(compiled) == ({"chosen": 1} if way == "rewritten" else {})
                    assert calls_in(compiled, "backend_kwargs.attention") is (way == "rewritten")
                    with torch.no_grad():
                        torch.testing.assert_close(compiled(x), fn(x))
            hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
            assert hits == 2  # AOTAutograd, and Inductor
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


IN_ANOTHER_PROCESS = """
import torch
import backend_kwargs
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.LayerNorm(8)), torch.randn(4, 8)
names = ("onednn", "layer_norm_backward")
compiled = torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor", rewrites=names))
with torch.no_grad():
    torch.testing.assert_close(compiled(x), model(x))
got, want = (torch.autograd.grad(fn(x).square().sum(), list(model.parameters())) for fn in (compiled, model))
torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
graphs = backend_kwargs.report(compiled).graphs
print(counters["aot_autograd"]["autograd_cache_hit"], *(dict(graph.rewritten) for graph in graphs))
"""


def test_caches_of_another_process(tmp_path):
    """Code that another process left in the caches finds its operators."""
    said = []
    for _ in range(2):
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        ran = forks.run("-c", IN_ANOTHER_PROCESS, env=env)
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stdout.strip())
    assert said == [f"{hits} {{'onednn': 1}} {{'layer_norm_backward': 1}}" for hits in (0, 2)]


@pytest.mark.parametrize("error", [RuntimeError("no engine"), Exception("no code")], ids=["library", "Triton"])
def test_an_operator_without_a_kernel(error):
    """If a library raises, the composite kernel runs, later without another attempt; wrong arguments still raise."""
    calls = []

    def kernel(x):
        calls.append("kernel")
        raise error

    def composite(x):
        calls.append("composite")
        return x.relu()

    safe = with_fallback(kernel, composite)
    x = torch.randn(3)
    assert torch.equal(safe(x), x.relu())
    assert torch.equal(safe(x), x.relu())
    assert calls == ["kernel", "composite", "composite"]
    with pytest.raises(AttributeError):
        safe(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_rewrite_for_a_gpu_leaves_other_graphs():
    """Without a GPU a rewrite that needs one changes nothing, as its warning says."""
    model = nn.Conv2d(8, 8, 3, groups=2).bfloat16().to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 8, 6, 6).bfloat16().contiguous(memory_format=torch.channels_last)
    with pytest.warns(backend_kwargs.BackendKwargsWarning, match="no CUDA GPU is visible; graphs stay as they are"):
        compiled = called(model, x, rewrites=("grouped_convolution",))
    assert rewritten(compiled) == {}


def test_a_rewrite_for_a_gpu_leaves_a_graph_on_a_cpu(monkeypatch):
    """On a machine with a GPU, too, a rewrite that needs one changes no graph that has nothing there."""
    monkeypatch.setattr(traced, "unmet", lambda needs, here: ())
    graphs = []

    def following(graph):
        graphs.append(graph.gm)
        return Compiled(graph.gm.forward)

    def backend(gm, inputs):
        return traced.compile_rewritten(CapturedGraph(gm, inputs), ("patches", "multihead_attention"), following).call

    x, w = torch.randn(2, 3, 8, 8).bfloat16(), torch.randn(4, 3, 4, 4).bfloat16()
    torch._dynamo.reset()
    torch.compile(lambda x, w: torch.conv2d(x, w, stride=4), backend=backend)(x, w)
    (gm,) = graphs
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [torch.conv2d]


def test_the_configuration_stays_as_it_was():
    """Compiling with rewrites does not change Inductor's options for others."""
    before = config.post_grad_custom_pre_pass
    called(feed(), torch.randn(2, 8), rewrites=("linear_activation", "convolution"))
    assert config.post_grad_custom_pre_pass is before


@pytest.mark.parametrize(
    ("options", "count"),
    [
        pytest.param({"cpp_wrapper": True}, {"linear_activation": 1}, id="a C++ wrapper"),
        pytest.param({"freezing": True}, {}, id="freezing, with which Inductor fuses a frozen layer itself"),
    ],
)
def test_beside_other_options(options, count):
    """Rewrites can be combined with a C++ wrapper and with freezing."""
    model, x = feed(), torch.randn(2, 8)
    compiled = called(model, x, rewrites=("linear_activation",), **options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert rewritten(compiled) == count


def test_graph_breaks():
    """Every graph of a function with a graph break is rewritten."""
    one, other = feed(), feed()

    def fn(x):
        x = one(x)
        torch._dynamo.graph_break()
        return other(x)

    compiled = called(fn, torch.randn(2, 8), rewrites=("linear_activation",))
    assert [dict(graph.rewritten) for graph in backend_kwargs.report(compiled).graphs] == [{"linear_activation": 1}] * 2


class Image(torch.Tensor):
    """A class of tensors without `__torch_dispatch__`."""


@pytest.mark.usefixtures("fresh_dynamo")
def test_tensors_of_a_users_class():
    """Graphs of such inputs stay as they are, since torch refuses them in operators that are not its own."""
    model, x = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), torch.randn(1, 3, 8, 8)
    compiled = torch.compile(model, backend=make_backend("tmpl-inductor", rewrites=("convolution",)))
    with torch.no_grad():
        got, want = compiled(x.as_subclass(Image)), model(x.as_subclass(Image))
    assert (type(got), type(want)) == (Image, Image)
    torch.testing.assert_close(got, want)
