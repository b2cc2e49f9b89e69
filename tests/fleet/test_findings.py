"""What is said of an audited decision, from the times that were measured."""

import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from backend_kwargs.cli.measured import page_of, row_of
from backend_kwargs.facts.decision import Decision, RaceRow
from backend_kwargs.fleet.audit import (
    AuditDocument,
    Audited,
    Contender,
    as_json,
    audit_document,
    judged,
    renewed,
)
from backend_kwargs.interval import Interval
from backend_kwargs.page import to_json

SCHEMA = Path(__file__).parents[2] / "docs" / "audit-schema.json"
HERE = {"device": "cpu AVX2", "threads": 2, "torch": "2.13.0"}
DECISION = Decision(
    "ab" * 32,
    "ab" * 8,
    "one_thread",
    {"cpp.threads": 1},
    (RaceRow("one_thread", seconds=1e-3, won=True),),
    HERE,
    "3 ops",
)


OF_DEFAULT = RaceRow("default", seconds=1.3e-3)


def times(seconds, seed=0):
    drawn = random.Random(seed)
    return [seconds * drawn.gauss(1, 0.005) for _ in range(96)]


def contender(name, code_of="", options=None, status="pass", reason="", label=""):
    return Contender(
        name, label or name, RaceRow(label or name, options or {}, status, reason), code_of or label or name
    )


def audited(
    *others,
    seconds=1e-3,
    decision=DECISION,
    fresh=(),
    own=None,
    here=HERE,
    judges=True,
    again=1.0,
    rounds=96,
    **samples,
):
    own = own or contender("one_thread", options={"cpp.threads": 1})
    known = {"one_thread": times(seconds)} if own.row.status == "pass" else {}
    known |= {name: times(each, at) for at, (name, each) in enumerate(samples.items(), 2)}
    known = {name: each[:rounds] for name, each in known.items()}
    timed = (replace(each, samples=known.get(each.code_of, ())) for each in (own, *others))
    return Audited(
        "my.py:build",
        decision,
        here,
        judges_time=judges,
        contenders=tuple(timed),
        again=times(seconds * again, 1)[:rounds],
        fresh=tuple(fresh),
    )


DEFAULT = contender("default")


def test_a_faster_decision_is_still_right():
    """It is surely faster than the others; there is no regret."""
    (finding,) = judged([audited(DEFAULT, default=1.2e-3)])
    assert (finding.verdict, finding.best, finding.regret.median, finding.record) == (
        "right", "one_thread", 0.0, "reproduced",
    )  # fmt: skip


def test_a_difference_within_the_margin_is_no_loss():
    """One per cent is what two runs of one callable differ by."""
    (finding,) = judged([audited(DEFAULT, default=0.99e-3)])
    assert finding.verdict == "within noise"
    assert finding.regret.low < 0.01 < finding.regret.high + 0.005


def test_a_loss_has_its_size():
    """What lost says to what, by how much, and how sure that is."""
    finding, other = judged([audited(DEFAULT, default=0.95e-3), audited(DEFAULT, default=1.2e-3)])
    assert (finding.verdict, finding.lost_to, other.verdict) == ("lost", "default", "right")
    assert finding.loss.low < 0.0526 < finding.loss.high
    assert finding.p <= 0.01
    assert finding.failed
    assert row_of(finding)[3].startswith("lost by 5.")


@pytest.mark.parametrize("again", [1.08, 1 / 1.08], ids=["slower than itself", "faster than itself"])
def test_what_the_decision_differs_from_itself_is_no_loss(again):
    """A candidate that is faster by less than the same call was is not surely faster."""
    (finding,) = judged([audited(DEFAULT, default=0.95e-3, again=again)])
    assert (finding.verdict, finding.failed) == ("within noise", False)


@pytest.mark.parametrize(
    ("others", "decisions", "factor"),
    [
        pytest.param(1, 1, 1, id="one comparison"),
        pytest.param(3, 1, 3, id="three candidates"),
        pytest.param(1, 3, 3, id="three decisions"),
        pytest.param(2, 2, 4, id="two candidates of two decisions"),
    ],
)
def test_each_comparison_costs_certainty(others, decisions, factor):
    """The p-value of a loss is multiplied by the number of candidates and of decisions that were compared."""
    several = [contender(f"x{at}") for at in range(others)]
    # The last ones' p-values are larger, so that Holm's method leaves the first one's product.
    found = judged(
        [audited(*several, **{each.name: (0.977 + 0.001 * of) * 1e-3 for each in several}) for of in range(decisions)]
    )
    least = min(each.p for each in found[0].against)
    assert found[0].p == pytest.approx(factor * least)
    assert 0 < found[0].p < 1


def test_too_few_rounds_have_no_bounds():
    """Where a ratio has no upper bound it is left out, since JSON has no infinity, and nothing is lost."""
    (finding,) = judged([audited(DEFAULT, default=0.5e-3, rounds=8)])
    assert (finding.verdict, finding.lost_to, finding.loss, finding.noise, finding.regret) == (
        "within noise", "default", None, None, None,
    )  # fmt: skip
    assert finding.against[0].ratio is None


def test_a_candidate_whose_code_failed_while_it_was_timed():
    """It has no ratio, and is not said to have the decision's code."""
    others = [
        contender("default", status="oom", reason="out of memory"),
        contender("wrapped", "default", status="same code", reason="as default"),
    ]
    (finding,) = judged([audited(*others)])
    assert [(each.ratio, each.reason) for each in finding.against] == [
        (None, "oom: out of memory"),
        (None, "same code: as default"),
    ]
    assert (finding.verdict, finding.lost_to, finding.best) == ("right", "", "one_thread")


def test_a_decision_with_defaults_code():
    """In a random graph default is compiled first, and a decision with its code has its samples."""
    own = contender("one_thread", "default", status="same code", reason="as default")
    (finding,) = judged([audited(DEFAULT, own=own, default=1e-3)])
    assert (finding.verdict, finding.record) == ("right", "reproduced")


def test_a_decision_for_memory_loses_no_race():
    """Where memory was the objective, times are told and not judged."""
    (finding,) = judged([audited(DEFAULT, default=0.5e-3, judges=False)])
    assert finding.verdict == "within noise"


def test_equal_code_cannot_be_faster():
    """A decision that generates default's code is still right, and default's row says why it was not timed."""
    (finding,) = judged([audited(contender("default", "one_thread", status="same code", reason="as one_thread"))])
    assert (finding.verdict, finding.against[0].reason) == ("right", "it has the decision's code")


def test_a_decision_that_fails():
    """It makes the audit fail; what is stored in its place is the fastest that runs."""
    own = contender("one_thread", options={"cpp.threads": 1}, status="fail_accuracy", reason="wrong")
    failing = audited(DEFAULT, own=own, default=1e-3)
    (finding,) = judged([failing])
    assert (finding.verdict, finding.reason, finding.failed) == ("fails", "fail_accuracy: wrong", True)
    new = renewed(failing, finding)
    assert (new.winner, new.options, [row.name for row in new.rows if row.won]) == ("default", {}, ["default"])


def test_flips_are_those_that_differ_beyond_noise():
    """Of four fresh races three chose another one, two of them one of another speed."""
    others = [DEFAULT, contender("cpp_wrapper")]
    fresh = ["default", "default", "cpp_wrapper", "one_thread"]
    for seconds in (1.2e-3, 0.8e-3):
        (finding,) = judged([audited(*others, fresh=fresh, default=seconds, cpp_wrapper=1e-3)])
        assert (finding.races, finding.others, finding.flips) == (4, 3, 2)


@pytest.mark.parametrize(
    ("changes", "record"),
    [
        pytest.param({}, "reproduced", id="the same"),
        pytest.param({"seconds": 1.3e-3}, "changed", id="slower"),
        pytest.param({"seconds": 0.7e-3}, "changed", id="faster"),
        pytest.param(
            {"seconds": 1.3e-3, "decision": replace(DECISION, rows=(OF_DEFAULT, *DECISION.rows))},
            "changed",
            id="the winner's",
        ),
        pytest.param({"here": HERE | {"torch": "2.14.0"}}, "not comparable", id="another release"),
        pytest.param({"decision": Decision("k", "g", "one_thread", machine=HERE)}, "not recorded", id="no time"),
    ],
)
def test_the_recorded_time(changes, record):
    """It is compared with today's only on the same machine and releases."""
    (finding,) = judged([audited(DEFAULT, default=2e-3, **changes)])
    assert finding.record == record
    assert finding.differs == ("torch '2.13.0' (here '2.14.0')" if record == "not comparable" else "")


def test_what_is_stored_anew():
    """A decision that is right keeps its winner and gets today's times; one that lost gets the fastest."""
    right, lost = audited(DEFAULT, default=2e-3, seconds=1.5e-3), audited(DEFAULT, default=0.5e-3)
    kept, changed = map(renewed, [right, lost], judged([right, lost]))
    assert (kept.winner, kept.options) == ("one_thread", {"cpp.threads": 1})
    assert next(row.seconds for row in kept.rows if row.won) == pytest.approx(1.5e-3, rel=0.02)
    assert (changed.winner, changed.options, changed.key) == ("default", {}, DECISION.key)
    assert renewed(Audited("m", DECISION, HERE, why="no graph"), judged([right])[0]) is None


def test_what_is_stored_anew_is_of_today():
    """It has this machine, the candidate's own name and compiler, and nothing that earlier races or labels said."""
    now = HERE | {"torch": "2.14.0"}
    other = Contender(
        "tvm",
        "tvm (2)",
        RaceRow("tvm (2)", compiler="tvm", speedup=Interval(1, 1, 1), against="x", began_s=1.0),
        "tvm (2)",
    )
    decision = replace(DECISION, differs="torch '2.12' (here '2.13')", made=1.0)
    lost = audited(other, decision=decision, here=now, **{"tvm (2)": 0.5e-3})
    new = renewed(lost, *judged([lost]))
    assert (new.winner, new.compiler, new.machine, new.differs) == ("tvm", "tvm", now, "")
    assert new.made > 1
    (row,) = [row for row in new.rows if row.won]
    assert (row.name, row.speedup, row.against, row.began_s) == ("tvm", None, "", None)


def test_nothing_is_stored_anew_where_nothing_runs():
    """A decision that fails beside others that fail stays as it is."""
    own = contender("one_thread", status="oom", reason="out of memory")
    failing = audited(contender("default", status="oom"), own=own)
    assert renewed(failing, *judged([failing])) is None


def test_published_schema():
    """docs/audit-schema.json is the schema of today's code; ACCEPT=1 rewrites it."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "backend-kwargs audit"}
    text = json.dumps(head | msgspec.json.schema(AuditDocument), indent=1, sort_keys=True) + "\n"
    if os.environ.get("ACCEPT"):
        SCHEMA.write_text(text, encoding="utf-8")
    assert SCHEMA.read_text(encoding="utf-8") == text


def test_an_audit_is_data_and_a_page():
    """What --json writes is read back equal, and the page of it keeps to the page's schema."""
    failed = contender("default2", status="fail_to_run", reason="Down: hunter2")
    several = [
        audited(DEFAULT, failed, default=0.9e-3, fresh=["default"]),
        Audited("m", DECISION, HERE, why="no graph"),
    ]
    document = audit_document("decisions/", HERE, judged(several))
    assert msgspec.json.decode(as_json(document), type=AuditDocument) == document
    assert json.loads(as_json(document))["findings"][1]["verdict"] == "not audited"
    page = page_of(document)
    assert b"hunter2" not in to_json(page)
    assert re.fullmatch("2 decisions: 1 lost, 1 not audited; one_thread lost by 11.* to default.", page.verdict.text)
    assert page.subtitle == "2 decisions on cpu AVX2, torch 2.13.0"
    assert [row.status for row in page.speedups[0].rows] == ["lost", "pass", "fail_to_run"]
    assert [(each.kind, each.where.partition(":")[0]) for each in page.warnings] == [
        ("advice", "my.py"),
        ("other", "m"),
    ]


def test_what_a_documents_maker_wrote_fits_the_schema():
    """Texts of a store may be a megabyte long; what --json writes is read back, and so is the page."""
    long = "x" * 100_000
    decision = replace(DECISION, key=long, winner=long, options={long: 1}, facts=long, machine={"device": long})
    failed = contender("one_thread", status="fail_to_compile", reason=long)
    several = [
        audited(DEFAULT, default=1e-3, decision=decision),
        audited(own=failed, decision=decision),
        Audited(long, decision, HERE, why=long),
    ]
    document = audit_document(long, HERE, judged(several))
    read = msgspec.json.decode(as_json(document), type=AuditDocument)
    assert [each.verdict for each in read.findings] == ["within noise", "fails", "not audited"]
    assert to_json(page_of(document))
