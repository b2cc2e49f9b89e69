"""Decisions loaded with cache artifacts are used like those of a store."""

import json
from io import BytesIO
from zipfile import ZipFile

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.auto import process_memory
from backend_kwargs.cache_artifacts import OF_TORCH, load_cache_artifacts, save_cache_artifacts
from tests.auto.graphs import backend_of, chain


@pytest.fixture
def elsewhere(races, monkeypatch, tmp_path):
    """Return the artifacts of a process that chose `fast_compile`; this process has no decision and no store."""
    races.winner, races.options = "fast_compile", dict(bk.get_template("fast_compile").options)
    winner_of_chain()
    data, _ = save_cache_artifacts()
    process_memory.forget_process()
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "another"))
    return data


def winner_of_chain(candidates=("fast_compile",), **options):
    torch._dynamo.reset()
    compiled = torch.compile(chain, backend=bk.make_backend(backend_of(**options), candidates=list(candidates)))
    compiled(torch.randn(8, 64))
    return bk.report(compiled).graphs[-1].race.winner


@pytest.mark.parametrize("race", ["missing", "never"])
def test_loaded_decision_is_followed(elsewhere, races, race):
    """A graph uses the loaded decision, without a race."""
    load_cache_artifacts(elsewhere)
    assert winner_of_chain(race=race) == "fast_compile"
    assert races.count == 1


def test_the_decisions_of_an_earlier_release_are_left_out(elsewhere, races):
    """Its keys are no graph's any more; torch's artifacts beside them are loaded."""
    buffer = BytesIO()
    with ZipFile(BytesIO(elsewhere)) as now, ZipFile(buffer, "w") as earlier:
        earlier.writestr(OF_TORCH, now.read(OF_TORCH))
        earlier.writestr("decisions.json", json.dumps([{"winner": "fast_compile", "options": "{}", "rows": "[]"}]))
    load_cache_artifacts(buffer.getvalue())
    assert winner_of_chain(race="never") == "default"


def test_loaded_decision_is_asked_for_by_the_request(elsewhere, races):
    """A loaded decision is not used if the request has other candidates."""
    load_cache_artifacts(elsewhere)
    assert winner_of_chain(candidates=["aten"], race="never") == "default"


def test_loaded_decision_is_not_known_to_a_comparison(elsewhere, races):
    """A comparison that starts without decisions ignores loaded ones, which are back afterwards."""
    load_cache_artifacts(elsewhere)
    with process_memory.nothing_decided():
        winner_of_chain()
        assert races.count == 2
    assert winner_of_chain() == "fast_compile"
    assert races.count == 2


def test_race_leaves_no_artifact_of_a_loser(auto, default_wins):
    """After a race, torch's artifacts contain only the winner's code, here of one graph."""
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache(), torch.no_grad():
        compiled = auto(lambda x: torch.softmax(x * 2, -1) + 1, ["fast_compile"])
        compiled(torch.randn(64, 64))
        _, info = torch.compiler.save_cache_artifacts()
    tried = {row.name for row in bk.report(compiled).graphs[0].race.rows if row.compile_s}
    assert {"default", "fast_compile"} <= tried
    assert len(info.inductor_artifacts) == 1
