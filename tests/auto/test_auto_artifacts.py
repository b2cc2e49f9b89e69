"""Decisions that came with cache artifacts stand for those of a store."""

import pytest
import torch
from graphs import backend_of, chain

import backend_kwargs as bk
from backend_kwargs.compilers.auto import decide


@pytest.fixture
def elsewhere(races, monkeypatch, tmp_path):
    """Return the artifacts of a process that decided on `fast_compile`; this one knows nothing, and has no store."""
    races.winner, races.options = "fast_compile", dict(bk.get_template("fast_compile").options)
    winner_of_chain()
    data, _ = bk.save_cache_artifacts()
    decide.forget_process()
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "another.sqlite"))
    return data


def winner_of_chain(candidates=("fast_compile",), **options):
    torch._dynamo.reset()
    compiled = torch.compile(chain, backend=bk.make_backend(backend_of(**options), candidates=list(candidates)))
    compiled(torch.randn(8, 64))
    return bk.report(compiled).graphs[-1].race.winner


@pytest.mark.parametrize("race", ["missing", "never"])
def test_loaded_decision_is_followed(elsewhere, races, race):
    """A graph takes the decision that was loaded, without a race."""
    bk.load_cache_artifacts(elsewhere)
    assert winner_of_chain(race=race) == "fast_compile"
    assert races.count == 1


def test_loaded_decision_is_asked_for_by_the_request(elsewhere, races):
    """A decision for other candidates answers another question."""
    bk.load_cache_artifacts(elsewhere)
    assert winner_of_chain(candidates=["aten"], race="never") == "default"


def test_loaded_decision_is_not_known_to_a_comparison(elsewhere, races):
    """Where races begin with nothing decided, what was loaded is set aside, and is there again afterwards."""
    bk.load_cache_artifacts(elsewhere)
    with decide.nothing_decided():
        winner_of_chain()
        assert races.count == 2
    assert winner_of_chain() == "fast_compile"
    assert races.count == 2


def test_race_leaves_no_artifact_of_a_loser(auto, default_wins):
    """What torch saves after a race is the winner's code alone, here one graph's."""
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache(), torch.no_grad():
        compiled = auto(lambda x: torch.softmax(x * 2, -1) + 1, ["fast_compile"])
        compiled(torch.randn(64, 64))
        _, info = torch.compiler.save_cache_artifacts()
    tried = {row.name for row in bk.report(compiled).graphs[0].race.rows if row.compile_s}
    assert {"default", "fast_compile"} <= tried
    assert len(info.inductor_artifacts) == 1
