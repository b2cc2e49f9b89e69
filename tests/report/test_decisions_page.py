"""Decisions as parts of a page: who led a race when, how its comparisons chain, and what a page of them says."""

from dataclasses import replace

import pytest

from backend_kwargs.facts.decision import Decision, PlaceRow, RaceRow
from backend_kwargs.interval import Interval
from backend_kwargs.page import parse, to_json
from backend_kwargs.page.document import Span
from backend_kwargs.page.sentence import sentence
from backend_kwargs.report.decisions import (
    best_mode,
    document_of,
    race_of,
    speedups_of,
    verdict_of,
    warnings_of,
)

TWICE = Interval(2.0, 1.0, 4.0)
ROWS = (
    RaceRow("eager", seconds=8.0),
    RaceRow("default", seconds=4.0, speedup=TWICE, against="eager", compile_s=3.0, began_s=1.0, timed_s=1.0),
    RaceRow("crash", status="fail_to_run", reason="planted", compile_s=2.0, began_s=5.0),
    RaceRow(
        "cudagraphs", seconds=2.0, speedup=TWICE, against="default", compile_s=1.0, began_s=7.0, timed_s=2.0, won=True
    ),
    RaceRow("slow", seconds=4.0, speedup=Interval(0.5, 0.4, 0.6), against="cudagraphs", compile_s=1.0, began_s=10.0),
    RaceRow("later", status="skipped", reason="it could save 1 % at most"),
)
DECISION = Decision("ab" * 32, "graph", "cudagraphs", {"triton.cudagraphs": True}, ROWS, {"gpu": "H200"}, "3 ops", 12.0)


def test_lanes_have_compiling_and_timing_apart():
    """A lane begins when its compile did; what was skipped has no bar, and its reason."""
    race = race_of(DECISION, "3 ops")
    spans = {lane.name: lane.spans for lane in race.lanes}
    assert spans["default"] == (Span(kind="compile", start=1.0, end=4.0), Span(kind="time", start=4.0, end=5.0))
    assert spans["crash"] == (Span(kind="compile", start=5.0, end=7.0),)
    assert (spans["eager"], spans["later"], race.lanes[-1].reason) == ((), (), "it could save 1 % at most")


def test_a_page_lists_the_places_that_were_raced_by_themselves():
    """Over default, with how far they are from the device's limit; those that the winner has rewritten have won."""
    places = (
        PlaceRow("convolution@1:ab", "convolution of float32 8", 2, 1.0, 0.5, TWICE, 0.25, confirmed=True),
        PlaceRow("patches@1:cd", "unfold of float32 8", 1, 0.5, 1.0, Interval(0.5, 0.4, 0.6)),
        PlaceRow("patches@1:ef", "mul of float32 8", why="it draws random numbers"),
    )
    page = document_of([replace(DECISION, options={"rewrites": ["convolution@1:ab"]}, places=places)])
    assert page.tradeoffs is not None
    shown = page.speedups[1]
    assert (shown.title, shown.over) == ("3 ops: places, each by itself", "default")
    assert [(row.name, row.won, row.note or row.reason, row.speedup) for row in shown.rows] == [
        ("convolution 2x, convolution of float32 8, 4.0x its limit", True, "confirmed in a whole graph", TWICE),
        ("patches 1x, unfold of float32 8", False, "", places[1].speedup),
        ("patches 1x, mul of float32 8", False, "it draws random numbers", None),
    ]
    assert parse(to_json(page)) == page


@pytest.mark.parametrize("rewrites", [5, "patches", [["patches"]], {"patches": 1}, None], ids=str)
def test_a_file_may_name_rewrites_in_any_form(rewrites):
    """What is no list of names uses no place, and is no error."""
    place = PlaceRow("patches@1:ef", "mul of float32 8", 1, 1.0, 0.5, TWICE)
    page = document_of([replace(DECISION, options={"rewrites": rewrites}, places=(place,))])
    assert not page.speedups[1].rows[0].won


def test_a_race_that_was_cut_counts_what_it_did_not_try():
    """Of those that time kept from being raced; the page's verdict says it too."""
    left = RaceRow("max_autotune", status="skipped", untried=True, predicted_s=60.0)
    cut = replace(DECISION, cut_s=12.0, rows=(*ROWS, left))
    (warned,) = warnings_of(cut, "3 ops")
    open_ = "1 of 5 not tried; budget_s=90 would try all"
    assert (warned.kind, warned.text) == ("cut", f"The decision is provisional: {open_}.")
    assert [*sentence(verdict_of(cut))][-1].text == f"; provisional: {open_}."
    assert [*warnings_of(DECISION, "3 ops")] == []


def test_a_page_says_to_call_the_model_itself():
    """Where eager won, and where the guards take more than the winner gains; then there is nothing to paste."""
    eager = (replace(ROWS[0], won=True), replace(ROWS[1], speedup=Interval(0.5, 0.4, 0.6), seconds=16.0))
    verdict = verdict_of(replace(DECISION, winner="eager", rows=eager), "code")
    said = "".join(piece.text for piece in sentence(verdict))
    assert (said, verdict.paste) == ("Call the model itself: 2.00\u00d7 as fast as default.", "")
    default = (ROWS[0], replace(ROWS[1], speedup=Interval(1.1, 1.08, 1.12), seconds=8 / 1.1, won=True))
    verdict = verdict_of(replace(DECISION, winner="default", rows=default, guards_s=1.6))
    said = "".join(piece.text for piece in sentence(verdict))
    assert said == "Call the model itself: default is 0.88\u00d7 as fast (0.86 to 0.90)."


def test_rows_say_when_they_took_the_lead():
    """Eager leads first; whoever a row was timed against at the end, it says itself when it took the lead."""
    rows = (replace(ROWS[1], led_s=5.5), replace(ROWS[3], led_s=9.5, against="eager"))
    leads = race_of(Decision("k", "g", "cudagraphs", {}, (ROWS[0], *rows)), "").leads
    assert [(lead.name, lead.since) for lead in leads] == [("eager", 0.0), ("default", 5.5), ("cudagraphs", 9.5)]


def test_rows_that_say_no_times_have_no_timeline():
    """As those of an audit, which has raced nothing: each has its outcome."""
    rows = (RaceRow("eager"), RaceRow("a", compile_s=2.0, seconds=1.0))
    race = race_of(Decision("k", "g", "a", {}, rows), "")
    assert (race.leads, [(lane.spans, lane.seconds) for lane in race.lanes]) == ((), [((), None), ((), 1.0)])


@pytest.mark.parametrize(
    ("row", "other", "expected"),
    [
        pytest.param(1, 0, (2.0, 1.0, 4.0), id="timed together"),
        pytest.param(3, 0, (4.0, 1.5009, 10.66), id="two comparisons"),
        pytest.param(0, 1, (0.5, 0.25, 1.0), id="the other way round"),
        pytest.param(4, 3, (0.5, 0.4, 0.6), id="slower"),
        pytest.param(0, 0, (1.0, 1.0, 1.0), id="itself"),
    ],
)
def test_speedups_are_products_of_the_comparisons_between(row, other, expected):
    """Intervals combine as those of independent measurements: the one over eager is wider than each of its own."""
    ratio = DECISION.ratio_over(ROWS[row], ROWS[other].name)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx(expected, rel=1e-3)


def test_comparisons_in_a_circle_end():
    """Rows of a foreign store that were each timed against the other give a ratio."""
    rows = (
        RaceRow("a", seconds=1.0, speedup=TWICE, against="b"),
        RaceRow("b", seconds=2.0, speedup=TWICE, against="a"),
    )
    assert replace(DECISION, rows=rows).ratio_over(rows[0], "b").median == 2.0


def test_what_was_not_timed_has_no_speedup():
    assert DECISION.ratio_over(ROWS[5], "eager") is None


def test_the_verdict_has_the_best_mode_first():
    """Speedups are over the fastest other mode of torch, then over eager; the compile is paid back over eager."""
    verdict = verdict_of(DECISION, "paste")
    assert best_mode(DECISION).name == "default"
    assert [(each.over, each.ratio.median) for each in verdict.speedups] == [("default", 2.0), ("eager", 4.0)]
    assert (verdict.winner, verdict.clear, verdict.paste) == ("cudagraphs", False, "paste")
    assert (verdict.pays_back_calls, verdict.pays_back_over) == (1, "eager")


def test_a_decision_without_its_race_says_so():
    """An imported decision has no rows: the page has its winner and options, and no race."""
    document = document_of([Decision("k", "g", "default", {}, (), {}, "3 ops")])
    assert document.verdict.text == "default was chosen for 3 ops; its race is not known."
    assert (document.races, document.speedups) == ((), ())


def test_a_page_of_several_counts_the_winners():
    """Graphs with one description are told apart by their keys; what differs between machines is left out."""
    other = Decision("cd" * 32, "graph", "default", {}, ROWS[:2], {"gpu": "H100"}, "3 ops", cut_s=5.0)
    document = document_of([DECISION, other])
    assert document.verdict.text == "2 graphs decided: cudagraphs for 1, default for 1."
    assert [group.title for group in document.speedups] == ["3 ops (abababababab)", "3 ops (cdcdcdcdcdcd)"]
    assert document.environment == {"gpu": "H200, H100"}
    assert [(warned.kind, warned.where) for warned in document.warnings] == [("cut", "3 ops (cdcdcdcdcdcd)")]


def test_figures_of_a_foreign_store_that_are_none_are_left_out():
    """Infinite, negative and absurd numbers make no page impossible."""
    rows = (
        RaceRow("eager", seconds=1.0),
        RaceRow("a", seconds=float("inf"), speedup=Interval(1.0, -1.0, 2.0), compile_s=-3.0, peak_bytes=10**30),
        RaceRow("b", seconds=float("nan"), error=float("nan"), predicted_s=float("-inf"), began_s=float("nan")),
    )
    document = document_of([Decision("k", "g", "x" * 10**4, {"a" * 10**4: "b" * 10**5}, rows, {}, "\x1b[31m")])
    read = parse(to_json(document))
    assert [(row.name, row.speedup is None) for row in read.speedups[0].rows] == [
        ("eager", False),
        ("a", True),
        ("b", True),
    ]


def test_speedups_are_over_default_where_eager_was_not_timed():
    """The baseline's own row is at 1, without an interval."""
    group = speedups_of(Decision("k", "g", "default", {}, ROWS[1:]), "")
    baseline = group.rows[0]
    assert (group.over, baseline.note, baseline.speedup) == ("default", "baseline", Interval(1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    "wide",
    [
        pytest.param(Interval(1.0, 1e-300, 1e300), id="wide"),
        pytest.param(Interval(1e-300, 1e300, 1.0), id="without order"),
    ],
)
def test_rows_of_a_file_have_no_ratio_beyond_numbers(wide):
    """Comparisons whose intervals combine to more than a number can hold give none, and no error."""
    rows = (
        RaceRow("eager", seconds=1.0),
        RaceRow("a", seconds=1.0, speedup=wide, against="eager"),
        RaceRow("b", seconds=1.0, speedup=wide, against="a"),
    )
    assert replace(DECISION, rows=rows).ratio_over(rows[2], "eager") is None
