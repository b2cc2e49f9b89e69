"""Which decisions, units and models an audit takes, and what it prints; without measuring anything."""

from dataclasses import replace

import pytest
import torch

from backend_kwargs.auto.machine import device_of, machine
from backend_kwargs.auto.store import name_of
from backend_kwargs.auto.verdicts import Verdict
from backend_kwargs.cli.measured import Chosen as Subject
from backend_kwargs.cli.measured import _nothing, notes_of, row_of
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts.decision import Decision, PlaceRow
from backend_kwargs.fleet.audit import (
    Against,
    Audited,
    Auditor,
    Finding,
    Target,
    consented,
    judged,
    said_of_places,
    units_of,
)
from backend_kwargs.fleet.board import Unit, UnitDocument
from backend_kwargs.fleet.board import name_of as unit_name
from backend_kwargs.interval import Interval
from backend_kwargs.registry import make_backend
from tests.fleet.stores import Documents, written

HERE = machine(("cpu",))
MADE = Decision("k" * 64, "g" * 16, "default", machine=HERE, made=1.0)
TARGET = Target("m", lambda: None, make_backend("tmpl-inductor:auto"), decisions=(name_of(MADE),))


def auditor(*decisions):
    by_key = {}
    for each in decisions:
        by_key.setdefault(each.key, []).append(each)
    return Auditor(by_key, None, print)


@pytest.mark.parametrize(
    ("others", "at"),
    [
        pytest.param([{"machine": {**HERE, "threads": 99}, "made": 9.0}], 0, id="of a machine like this one"),
        pytest.param([{"machine": {**HERE, "driver": "1"}, "made": 9.0}], 1, id="the latest"),
        pytest.param([{"made": 0.5}], 0, id="not an older one"),
        pytest.param([{"key": "l" * 64, "made": 9.0}], 0, id="of this key"),
    ],
)
def test_which_decision_of_several(others, at):
    """The nearest machine's, and of those the latest, is audited."""
    several = [MADE, *(replace(MADE, **each) for each in others)]
    assert auditor(*several)._decision(MADE.key, HERE) is several[at]
    assert auditor(*several)._decision("x", HERE) is None


def test_what_is_stored_of_a_decisions_places():
    """An audit says of each that is rewritten what it was alone, and whether a whole graph has confirmed it."""
    places = [PlaceRow(f"attention@1:{each}", "mul of float32 8") for each in ("ab", "cd", "ef")]
    decision = replace(MADE, options={"rewrites": ["attention@1:ab", "attention@1:cd"]}, places=tuple(places))
    verdict = Verdict(2.0, 1.0, Interval(2.0, 1.9, 2.1))
    start = f"verdicts/{device_of(HERE)}/ab"
    known = {
        f"{start}.1.json": verdict,
        f"{start}.2.json": replace(verdict, confirmed=True),
        "verdicts/x/cd.1.json": verdict,
    }
    name, ratio, whole = "attention 1x, mul of float32 8", "2.00x [1.90, 2.10] alone", "confirmed in a whole graph"
    said = [f"{name}: {ratio}, not {whole}; {ratio}, {whole}", f"{name}: no verdict is stored"]
    assert [*said_of_places(decision, known)] == said
    (finding,) = judged([Audited("m", decision, HERE, why="no graph", places=tuple(said))])
    assert [*notes_of([finding])][:2] == [f"default for : {each}" for each in said]


@pytest.mark.parametrize(
    ("stored", "target", "missing"),
    [
        pytest.param(MADE, TARGET, True, id="known to be its"),
        pytest.param(MADE, replace(TARGET, decisions=()), False, id="of another model"),
        pytest.param(replace(MADE, machine={"device": "NVIDIA H0"}), None, False, id="of another device"),
    ],
)
def test_decisions_that_no_graph_asked_for(stored, target, missing):
    """They are told as not audited if they are this model's and this device's."""
    found = auditor(stored)
    found._note_missing(target or replace(TARGET, decisions=(name_of(stored),)), "it has changed")
    assert [each.why for each in found.found] == ["it has changed"] * missing
    found._note_missing(target or TARGET, "it has changed")  # once
    assert len(found.found) == missing


@pytest.mark.parametrize(("count", "during"), [(1, 1), (None, None)])
def test_threads_are_as_before(count, during):
    """Also where the audit raises."""
    before = torch.get_num_threads()
    seen = []

    def make():
        seen.append(torch.get_num_threads())
        raise KeyError

    with pytest.raises(KeyError):
        auditor().audit(replace(TARGET, make=make, threads=count))
    assert seen == [during or before]
    assert torch.get_num_threads() == before


def document(model="m.py:build", **fields):
    return UnitDocument(unit=Unit(model, "cpu"), decisions=fields.pop("decisions", ("decisions/a.json",)), **fields)


def test_units_with_decisions_are_audited():
    """What failed, or decided nothing, is not."""
    store = Documents()
    for each in (document("a"), document("b", failed="no weights"), document("c", decisions=())):
        store.put(unit_name(each.unit), written(each))
    store.put("units/d.json", b"{}")
    assert [each.unit.model for each in units_of(store)] == ["a"]


DOCUMENTS = [document("a"), document("b"), document("a")]
NO_CONSENT = (
    "A store's document is data, and the model that it names is not imported without consent: name it, or pass --trust "
    "for all of them. It names 'a'"
)


@pytest.mark.parametrize(
    ("documents", "given", "wanted"),
    [
        pytest.param(DOCUMENTS, {"model": "a", "trust": False}, ["a", "a"], id="named"),
        pytest.param(DOCUMENTS, {"model": "a", "trust": True}, ["a", "a"], id="named and trusted"),
        pytest.param(DOCUMENTS, {"model": "A", "trust": False}, [], id="another case"),
        pytest.param(DOCUMENTS, {"model": None, "trust": True}, ["a", "b", "a"], id="trusted"),
        pytest.param(DOCUMENTS, {"model": None, "trust": False}, f"{NO_CONSENT}, and 1 more.", id="several"),
        pytest.param(DOCUMENTS[:1], {"model": None, "trust": False}, f"{NO_CONSENT}.", id="one"),
        pytest.param(
            [],
            {"model": None, "trust": True},
            "The documents of 's' do not name their model: pass MODEL, FILE_OR_MODULE:FACTORY, which makes it.",
            id="no documents, though trusted",
        ),
    ],
)
def test_consent(documents, given, wanted):
    """A model is imported if the user names it exactly, or trusts the store."""
    if isinstance(wanted, list):
        assert [each.unit.model for each in consented(documents, **given, label="s")] == wanted
        return
    with pytest.raises(BackendKwargsError) as raised:
        consented(documents, **given, label="s")
    assert str(raised.value) == wanted


@pytest.mark.parametrize(
    ("fixed", "hint"), [({}, ""), ({"freezing": True}, " Some were made with options: --option freezing=True, say.")]
)
def test_no_graph_has_a_decision(fixed, hint):
    """Options that decisions were made with are named."""
    error = _nothing(Subject("s", [TARGET, TARGET], {"a": [MADE], "b": [MADE, replace(MADE, fixed=fixed)]}))
    assert str(error) == (
        "No graph of m has the key of one of the 3 decisions in 's': they are of other models, devices, sizes "
        f"(--shapes, --dynamic) or options (--option).{hint}"
    )


# ---- what is printed

SECONDS = Interval(1.5e-3, 1.4e-3, 1.6e-3)
FINDING = Finding(
    verdict="right",
    model="m",
    key="k",
    graph="3 ops",
    winner="a",
    against=(Against(name="b", ratio=Interval(0.2, 0.1, 0.4)), Against(name="default", ratio=Interval(0.5, 0.4, 0.8))),
    best="a",
    regret=Interval(0.0, 0.0, 0.0),
    races=3,
    flips=1,
    noise=Interval(1.0, 0.99, 1.01),
    seconds=SECONDS,
    recorded_s=1e-3,
    record="changed",
)


LOUD = "a for 3 ops: a noisy audit: timed against itself it is at {}; on an idle machine smaller losses are found"


def changed(**fields):
    return Finding(**{name: getattr(FINDING, name) for name in FINDING.__struct_fields__} | fields)


def test_a_row_of_the_table():
    """The speedup is over default, and its interval's ends are the other way round than those of the times."""
    assert row_of(FINDING) == (
        "m", "3 ops", "a", "still right", "2.00x [1.25, 2.50]", "0 %", "1 of 3", "1 ms, changed",
    )  # fmt: skip
    assert row_of(changed(against=(), races=0, regret=None, recorded_s=None, record="not recorded"))[4:] == (
        "", "", "", "not recorded",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "notes"),
    [
        pytest.param({"record": "reproduced"}, [], id="nothing"),
        pytest.param({}, ["a for 3 ops: a call takes 1.50x of the 1 ms that were recorded"], id="changed"),
        pytest.param(
            {"record": "not comparable", "differs": "threads 1 (here 2)"},
            ["a for 3 ops: its recorded time is not comparable: threads 1 (here 2)"],
            id="not comparable",
        ),
        *(
            pytest.param(
                {"record": "", "noise": Interval(1.0, low, high)},
                [LOUD.format(f"{low:.3f}x to {high:.3f}x")],
                id=f"noisy {low} {high}",
            )
            for low, high in ((0.95, 1.01), (0.99, 1.05))
        ),
        pytest.param(
            {"record": "", "noise": None},
            ["a for 3 ops: too few rounds to prove a loss; leave --quick out"],
            id="too few rounds",
        ),
        pytest.param({"record": "", "noise": None, "seconds": None}, [], id="not timed"),
    ],
)
def test_notes(fields, notes):
    """Times of another machine, noise and too few rounds are told; the last line counts."""
    assert [*notes_of([changed(**fields)])] == [*notes, "1 decision: 1 still right."]


def test_the_count():
    """Each verdict is counted in its own words."""
    quiet = {"record": "", "races": 0}
    several = [changed(verdict=each, **quiet) for each in ("right", "lost", "fails", "lost", "within noise")]
    assert [*notes_of(several)][-1] == "5 decisions: 1 still right, 1 within noise, 2 lost, 1 failed."
