"""Graphs that a bundle has kept, where their code does not load: nothing is raced while it serves."""

from dataclasses import replace

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.bundles.graphs import GraphBackend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
AUTO = "tmpl-inductor:auto"
DECISIONS = {
    "its decision": lambda kept: kept,
    "no decision": lambda kept: None,
    "a decision that fails": lambda kept: {**kept, "options": {"no_such_option": 1}},
}


def f(x):
    return (x.sin() * 2).softmax(-1)


@pytest.mark.parametrize("kind", DECISIONS)
@pytest.mark.filterwarnings("ignore:A saved:backend_kwargs.errors.BackendKwargsWarning")
@torch.no_grad()
def test_a_kept_graph_is_never_raced_again(kind, tmp_path):
    """Code that does not load is compiled by its decision, or by default, although the config would race."""
    x, graphs = torch.randn(64, 64), {}
    decided = bk.make_backend(AUTO, race="never", candidates=[], store=str(tmp_path / "before"))
    torch.compile(f, backend=GraphBackend(decided, graphs, keep=True, folder="a"))(x)
    ((key, graph),) = graphs.items()
    broken = replace(graph, code=b"of another release", decision=DECISIONS[kind](graph.decision))
    races = bk.make_backend(AUTO, race="always", candidates=["no_size_asserts"], store=str(tmp_path / "store"))
    backend = GraphBackend(races, {key: broken}, keep=False, folder="b")
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, backend=backend)(x), f(x))
    assert (backend.compiled, [*tmp_path.glob("store/**/*.json")]) == ([key], [])
