"""Audits on a GPU: candidates with CUDA graphs and without are timed in turn, and a planted loser is found."""

from dataclasses import replace

import torch

import backend_kwargs as bk
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.facts.decision import EAGER
from backend_kwargs.fleet.audit import Auditor, Effort, Target, by_key, judged


def chain(x):
    for _ in range(30):
        x = torch.sin(x) + 0.1
    return x


def test_a_planted_loser_is_found(tmp_path, fresh_dynamo):
    """What a race chose is no loser; eager in its place is one, also beside a candidate with CUDA graphs."""
    store, options = str(tmp_path / "decisions"), {"budget_s": 120.0}
    x = torch.rand(256, 1024, device="cuda")
    with torch.no_grad():
        torch.compile(chain, backend=bk.make_backend("tmpl-inductor:auto", options, store=store))(x)
    decisions = by_key(Catalogue(store))
    backend = bk.make_backend("tmpl-inductor:auto", options)

    def audited(known):
        auditor = Auditor(known, Effort(flips=1, flip_s=30.0, rounds=96), lambda text: None)
        auditor.audit(Target("chain", lambda: (chain, x), backend))
        return judged(auditor.found)

    (finding,) = audited(decisions)
    assert finding.verdict in ("right", "within noise")
    planted = {key: [replace(each, winner=EAGER, options={}) for each in several] for key, several in decisions.items()}
    (finding,) = audited(planted)
    assert (finding.verdict, finding.winner) == ("lost", EAGER)
