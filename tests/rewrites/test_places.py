"""Places: what stands for one, and that a rewrite is applied in those that were chosen, whatever caches have."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._inductor.utils import fresh_cache

import backend_kwargs as bk
from backend_kwargs.auto.candidates import rewriting, trusted
from backend_kwargs.backends.generated_code import comparable
from backend_kwargs.rewrites import table
from backend_kwargs.rewrites.table import Rewrite, chosen_places
from backend_kwargs.rewrites.traced import Change, change_by, places_in, places_in_traced, replacing, rewrite_graph
from tests.rewrites.lowering import Rewriting

NAME = "linear_activation"


class Layers(nn.Module):
    """Linear layers with ReLU, of these widths one after the other."""

    def __init__(self, *widths):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def lowered(model, *inputs, grad=False):
    """Return the graphs of a model that Inductor would lower."""
    run = Rewriting(model)
    with torch.set_grad_enabled(grad):
        run(*inputs)
    return run.graphs


def dynamos(fn, *inputs):
    """Return dynamo's graph of a function, with its inputs."""
    found = []

    def keep(gm, example_inputs):
        found.append((gm, example_inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep)(*inputs)
    return found[-1]


def found(model, *inputs, name=NAME):
    return places_in(lowered(model, *inputs), name)


def test_a_place_says_what_decides_its_time():
    """Operators with their attributes, and dtypes, sizes, strides and devices of what they read and return."""
    (place,) = found(Layers(16, 32), torch.randn(4, 16))
    assert (place.rewrite, place.version, place.training, place.count) == (NAME, 1, False, 1)
    assert [line.split(" ", 3)[3].partition("(")[0] for line in place.operators] == [
        "aten.permute.default",
        "aten.addmm.default",
        "aten.relu.default",
    ]
    assert sorted(text.partition(": ")[2] for text in place.inputs) == [
        "torch.float32 cpu (32, 16) (16, 1)",
        "torch.float32 cpu (32,) (1,)",
        "torch.float32 cpu (4, 16) (16, 1)",
    ]
    assert [text.partition(": ")[2] for text in place.results] == ["torch.float32 cpu (4, 32) (32, 1)"]
    assert str(place) == f"{NAME}@1:{place.signature}"


@pytest.mark.parametrize(
    ("model", "x", "same"),
    [
        pytest.param(Layers(16, 32), torch.zeros(4, 16), True, id="other values"),
        pytest.param(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Softplus()), torch.randn(4, 16), True, id="model"),
        pytest.param(Layers(16, 32), torch.randn(8, 16), False, id="rows"),
        pytest.param(Layers(16, 8), torch.randn(4, 16), False, id="columns"),
        pytest.param(Layers(16, 32), torch.randn(16, 4).t(), False, id="strides"),
        pytest.param(Layers(16, 32).bfloat16(), torch.randn(4, 16).bfloat16(), False, id="dtype"),
        pytest.param(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(approximate="tanh")), torch.randn(4, 16), False, id="operators"
        ),
    ],
)
def test_what_is_the_same_place(model, x, same):
    """A place of another model is the same one if nothing that decides its time differs."""
    (one,), (other,) = found(Layers(16, 32), torch.randn(4, 16)), found(model, x)
    assert (one.signature == other.signature) is same


def test_equal_places_are_one():
    """Layers of one size are one place that is there twice, in the order of the graph or not."""
    places = found(Layers(16, 16, 16, 8), torch.randn(4, 16))
    assert sorted(place.count for place in places) == [1, 2]


def test_another_version_has_other_places(monkeypatch):
    """What was learnt of a rewrite's earlier version says nothing of this one's places."""
    (before,) = found(Layers(16, 32), torch.randn(4, 16))
    newer = Rewrite("", patterns=table.BUILT_IN[NAME].patterns, version=2, order=1)
    monkeypatch.setattr("backend_kwargs.rewrites.traced.find_rewrite", lambda name: newer)
    (after,) = found(Layers(16, 32), torch.randn(4, 16))
    assert (before.operators, before.inputs) == (after.operators, after.inputs)
    assert before.signature != after.signature


def test_sizes_that_vary_are_in_it():
    """A size that varies is a symbol, which is named the same in any process."""
    x = torch.randn(4, 16)
    torch._dynamo.mark_dynamic(x, 0)
    (place,) = found(Layers(16, 32), x)
    assert [text.partition(": ")[2] for text in place.results] == ["torch.float32 cpu (n0, 32) (32, 1)"]


# ---- in lowered graphs


@pytest.mark.parametrize("wanted", [(), (0,), (1,), (0, 1)], ids=["none", "first", "second", "both"])
def test_only_chosen_places_are_rewritten(wanted):
    """Other matches of the same rewrite stay as they are, and the results stay right."""
    model, x = Layers(16, 32, 8), torch.randn(4, 16)
    (gm,) = lowered(model, x)
    places = places_in([gm], NAME)
    assert len(places) == 2
    chosen = {places[at].signature for at in wanted}
    before = str(gm.graph)
    spare = copy.deepcopy(gm)
    assert rewrite_graph(spare.graph, NAME, chosen) == len(wanted)
    left = places_in([spare], NAME)
    assert {each.signature for each in left} == {each.signature for each in places} - chosen
    assert str(gm.graph) == before


def test_places_of_forward_and_backward_graphs():
    """What is found in the graphs of a training step is rewritten in them."""
    run = Rewriting(nn.Sequential(nn.Linear(16, 32), nn.Softmax(-1), nn.Linear(32, 8), nn.ReLU()))
    run(torch.randn(4, 16)).sum().backward()
    places = places_in(run.graphs, "onednn") + places_in(run.graphs, NAME)
    chosen = {each.signature for each in places}
    counts = [rewrite_graph(gm.graph, name, chosen) for gm in run.graphs for name in ("onednn", NAME)]
    assert sum(counts) == sum(place.count for place in places)


def backend(*entries):
    return bk.make_backend("tmpl-inductor", rewrites=entries)


def test_other_places_are_other_code():
    """One graph, two sets of places and warm caches: each has its own code, and finds it again."""
    model, x = Layers(16, 32, 8).eval(), torch.randn(4, 16)
    first, second = map(str, found(model, x))
    codes = {}
    with fresh_cache():
        for entries in ((first,), (second,), (first, second), (NAME,), (), (first,), (second,)):
            graph = compiled(model, x, *entries)
            assert graph.rewritten.get(NAME, 0) == (2 if entries == (NAME,) else len(entries))
            assert (graph.cache == "hit") is (entries in codes)
            code = comparable(graph.codes[0].source)
            assert codes.setdefault(entries, code) == code
    assert codes[first, second] == codes[(NAME,)]
    assert len({*codes.values()}) == 4


def compiled(model, x, *entries):
    """Return the report's graph of a model under these rewrites, after looking at its results."""
    torch._dynamo.reset()
    fn = torch.compile(model, backend=backend(*entries))
    with torch.no_grad():
        torch.testing.assert_close(fn(x), model(x))
    (graph,) = bk.report(fn).graphs
    return graph


# ---- in dynamo's graphs


def doubled(gm, x):
    """A rewrite of a user's own, which takes no `wanted`: sigmoids by tanh."""
    changed, count = copy.deepcopy(gm), 0
    for node in changed.graph.find_nodes(op="call_function", target=torch.sigmoid):
        with changed.graph.inserting_before(node):
            half = changed.graph.call_function(torch.mul, (node.args[0], 0.5))
            node.replace_all_uses_with(changed.graph.call_function(lambda t: torch.tanh(t) * 0.5 + 0.5, (half,)))
        count += 1
    changed.recompile()
    return Change(changed, x, count) if count else None


def by_neg(node, args):
    return node.graph.call_function(torch.sub, (0, args["input"]))


OWN = {"whole": doubled, "each": replacing((torch.neg,), by_neg)}


@pytest.fixture
def own(monkeypatch):
    """Register two rewrites of a user's own."""
    for name, function in OWN.items():
        monkeypatch.setitem(table._registered, name, Rewrite("", traced=function))


def negated(x, y):
    return torch.sigmoid(torch.neg(x)) + torch.neg(y.sum(0)) + torch.neg(x)


def test_each_replacement_of_dynamos_graph_is_a_place(own):
    """Calls of one function on tensors of different sizes are places of their own; others stay."""
    gm, inputs = dynamos(negated, torch.randn(4, 4), torch.randn(3, 4))
    places = places_in_traced(gm, inputs, "each")
    assert sorted(place.count for place in places) == [1, 2]
    for place in places:
        change = change_by("each", gm, inputs, lambda each, place=place: each == place)
        assert change.count == place.count
        torch.testing.assert_close(change.gm(*inputs), gm(*inputs))
        assert not [node for node in change.gm.graph.find_nodes(op="call_function", target=torch.sub) if not node.users]
    assert change_by("each", gm, inputs, lambda each: False) is None


def test_a_function_that_takes_no_places_has_one(own):
    """To a rewrite that changes a graph as a whole, the graph is its place."""
    gm, inputs = dynamos(negated, torch.randn(4, 4), torch.randn(3, 4))
    (place,) = places_in_traced(gm, inputs, "whole")
    assert change_by("whole", gm, inputs, lambda each: each == place).count == 1
    assert change_by("whole", gm, inputs, lambda each: False) is None


class Shared(nn.Module):
    """Two groups of linear layers that share an input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x):
        one, other, third, fourth = self.layers
        y = one(x) + other(x)
        return third(y) - fourth(y)


def test_groups_of_packed_layers_are_places():
    """Each group of layers is packed or not."""
    model = Shared()
    with torch.no_grad():
        gm, inputs = dynamos(model, torch.randn(4, 16))
        first, second = places_in_traced(gm, inputs, "packed")
        assert len({first.signature, second.signature}) == 2
        change = change_by("packed", gm, inputs, lambda each: each == second)
        assert (change.count, len(change.gm.graph.find_nodes(op="call_function", target=F.linear))) == (1, 3)


def test_gradients_are_part_of_a_place():
    """In training a replacement takes another time than in inference: its place is another."""

    def loss(x, y):
        return F.cross_entropy(x, y)

    y = torch.randint(8, (4,))
    given = [torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)]
    (plain,), (trained,) = (places_in_traced(*dynamos(loss, x, y), "cross_entropy") for x in given)
    with torch.no_grad():
        (without,) = places_in_traced(*dynamos(loss, given[1], y), "cross_entropy")
    assert [each.training for each in (plain, trained, without)] == [False, True, False]
    assert plain.signature == without.signature != trained.signature


# ---- the option


def test_places_of_one_rewrite_join():
    """A rewrite that is named alone is applied in all of its places, whatever else is named."""
    one, other = f"a@1:{'0' * 16}", f"a@1:{'1' * 16}"
    assert chosen_places([one, "b", other]) == {"a": {"0" * 16, "1" * 16}, "b": None}
    assert chosen_places([one, "a"]) == chosen_places(["a", one]) == {"a": None}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        pytest.param(
            f"{NAME}@2:{'0' * 16}",
            f"Rewrite '{NAME}' has version 1 here, and '{NAME}@2:{'0' * 16}' is a place of version 2: "
            f"name '{NAME}' for all of its places, or race again.",
            id="version",
        ),
        pytest.param(
            f"linear_activaton@1:{'0' * 16}", f"Unknown rewrite 'linear_activaton'. Did you mean '{NAME}'?", id="name"
        ),
        pytest.param(f"{NAME}@1:0", f"Unknown rewrite '{NAME}@1:0'. Did you mean '{NAME}'?", id="digits"),
    ],
)
def test_an_entry_that_names_no_place(entry, message):
    """It is an error at once, with what it may be."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        backend(entry)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("entries", "is_trusted"),
    [
        pytest.param([f"{NAME}@1:{'0' * 16}"], True, id="a place"),
        pytest.param([f"{NAME}@1:{'0' * 16}", NAME], True, id="all of them too"),
        pytest.param([f"{NAME}@2:{'0' * 16}"], False, id="of another version"),
        pytest.param([f"packed@1:{'0' * 16}"], False, id="of a rewrite that is not permitted"),
        pytest.param([f"{NAME}@1:{'0' * 17}"], False, id="too many digits"),
        pytest.param([f"{NAME}@1:{'g' * 16}"], False, id="no digits"),
        pytest.param([f"@1:{'0' * 16}"], False, id="no name"),
        pytest.param([[f"{NAME}@1:{'0' * 16}"]], False, id="no text"),
    ],
)
def test_what_a_decision_from_elsewhere_may_choose(entries, is_trusted):
    """Places of a rewrite that the request permits, of the version that is here."""
    assert trusted(NAME, {"rewrites": entries}, "", [rewriting(NAME)]) is is_trusted
