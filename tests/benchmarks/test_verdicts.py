"""What cells show beyond their noise: verdicts, tables of cases, summaries of peers."""

import dataclasses
import math

import pytest
from bench_cells import CEILINGS, cell, noisy

from backend_kwargs import measure
from backend_kwargs.measure import Interval
from benchmarks.analysis import verdicts
from benchmarks.analysis.auto_choices import choices
from benchmarks.analysis.verdicts import UNKNOWN, entries, judge, summaries
from benchmarks.execution.ceilings import Ceilings
from benchmarks.execution.records import AGAIN, Compile

H200 = Ceilings.from_json(CEILINGS)
TWO_PER_CENT = Interval(1.0, 1 / 1.02, 1.02)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        pytest.param(0.99, 1.01, "SAME", id="inside"),
        pytest.param(1.05, 1.10, "FAST", id="above"),
        pytest.param(0.90, 0.95, "SLOW", id="below"),
        pytest.param(1.03, 1.10, "AMBIGUOUS", id="out at the upper end"),
        pytest.param(0.90, 0.98, "AMBIGUOUS", id="out at the lower end"),
        pytest.param(0.50, 2.00, "AMBIGUOUS", id="too wide to say"),
    ],
)
def test_verdict(low, high, verdict):
    """Only an interval entirely outside the noise floors of both files is faster or slower."""
    assert judge(Interval((low + high) / 2, low, high), [TWO_PER_CENT, TWO_PER_CENT]) == verdict


def test_without_a_floor_nothing_is_certain():
    """Without an A/A row there is no verdict."""
    assert judge(Interval(3.0, 2.9, 3.1), [TWO_PER_CENT, UNKNOWN]) == "AMBIGUOUS"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "SAME"), (1.3, "SLOW"), (0.7, "FAST")])
def test_two_runs(seed, factor, verdict):
    """Two runs of equal work are the same with noise floors of 2 % each; a third more work is slower."""
    old, new = noisy(1.0, 2 * seed), noisy(factor, 2 * seed + 1)
    assert judge(measure.ratio_interval(old, new), [TWO_PER_CENT, TWO_PER_CENT]) == verdict


def group(**seconds):
    named = {name.replace("_", " "): value for name, value in seconds.items()}
    return [cell("eager"), cell(AGAIN), *(cell(name, value) for name, value in named.items())]


def table(cells, clock="device"):
    (found,) = entries(cells, clock, H200).values()
    return {entry.cell.peer: entry for entry in found}


def test_ratios_are_paired_and_marked():
    """Ratios to eager and to the strongest peer are wins or losses beyond the noise, and ties within it."""
    found = table(group(default=0.8e-3, fast=0.5e-3, slow=2e-3, like=0.8e-3))
    assert {name: found[name].marks["strongest"] for name in ("fast", "slow", "like")} == {
        "fast": "win",
        "slow": "loss",
        "like": "tie",
    }
    assert found["fast"].speedups["eager"].median == pytest.approx(2.0, rel=0.02)
    assert found["fast"].speedups["default"].median == pytest.approx(1.6, rel=0.02)


def test_templates_are_no_rivals():
    """The strongest peer is one that a user has without this package."""
    found = table(group(default=0.8e-3, fast=0.5e-3, faster=0.4e-3))
    assert found["fast"].speedups["strongest"] == found["fast"].speedups["default"]
    assert found["default"].speedups["strongest"] == found["default"].speedups["eager"]


def test_clocks_are_not_mixed():
    """A gain only in device time shows only in device time."""
    template = dataclasses.replace(cell("fast", 0.5e-3), wall_s=cell("eager", seed=7).wall_s)
    cells = [cell("eager"), cell(AGAIN), template]
    assert table(cells, "device")["fast"].marks["eager"] == "win"
    assert table(cells, "wall")["fast"].marks["eager"] == "tie"


def test_numerics_are_not_compared_across():
    """A peer of another numerics class has a time, but no ratio to peers of other classes."""
    found = table([*group(default=0.8e-3), cell("freezing", 0.1e-3, numerics="frozen")])
    assert found["freezing"].time
    assert not found["freezing"].speedups
    assert found["default"].speedups["strongest"] == found["default"].speedups["eager"]


def test_what_fails_has_no_figures():
    """A cell that did not pass has no time, ratio or per cent."""
    bad = table([*group(), cell("bad", status="fail_accuracy")])["bad"]
    assert (bad.time, bad.speedups, bad.share) == (None, {}, None)


def test_per_cent_of_the_limit():
    """400 GFLOP at 800 TFLOP/s take 0.5 ms, so a device time of 1 ms is 50 %."""
    cells = group()
    assert table(cells)["eager"].share.median == pytest.approx(50, rel=0.02)
    assert table(cells, "wall")["eager"].share is None


def test_over_the_limit_is_told():
    """A result faster than the device can be is flagged."""
    found = table(group(magic=0.4e-3))
    assert {name for name, entry in found.items() if entry.over} == {"magic"}


def test_the_compile_is_the_unit():
    """Of three compiles the median counts, and the interval covers all."""
    speeds = (1e-3, 2e-3, 3e-3)
    cells = [
        c
        for run, seconds in enumerate(speeds)
        for c in (
            cell("eager", 2e-3, group=str(run), run=run),
            cell("tuned", seconds, group=str(run), run=run, compile=Compile(cold_s=10.0 * (run + 1))),
        )
    ]
    found = table(cells)["tuned"]
    assert found.speedups["eager"].median == pytest.approx(1.0, rel=0.02)
    assert found.time.low < 1.02e-3
    assert found.time.high > 2.98e-3
    assert (found.compiles, found.cold_s) == (3, 20.0)


def test_fresh_compiles_count_alone():
    """Compile times from shared processes are used, and marked, only if no peer had its own process."""
    fresh, beside = Compile(cold_s=10.0, fresh=True), Compile(cold_s=1.0)
    cells = [cell("t", group=str(run), run=run, compile=c) for run, c in enumerate((fresh, beside))]
    assert (table(cells)["t"].cold_s, table(cells)["t"].fresh) == (10.0, True)
    assert (table(cells[1:])["t"].cold_s, table(cells[1:])["t"].fresh) == (1.0, False)
    more = [cell("t", case="b", compile=fresh), cell("t", case="c", compile=beside)]
    (summary,) = summaries(entries([*cells, *more], "device"))["bf16"]
    assert (summary.cold_s, summary.compiled, summary.fresh) == (10.0, 2, True)


def test_few_fresh_compiles_do_not_stand_for_many():
    """If half of the known compiles shared a process, the median is over all, and not called fresh."""
    made = [Compile(cold_s=2.0, fresh=True), Compile(cold_s=100.0), Compile()]
    cells = [cell("t", case=case, compile=each) for case, each in zip("abc", made, strict=True)]
    (summary,) = summaries(entries(cells, "device"))["bf16"]
    assert (summary.cold_s, summary.compiled, summary.fresh) == (51.0, 2, False)


def exposed(*peers, **seconds):
    """Return a group in which these peers are launch-bound."""
    return [dataclasses.replace(c, exposed=c.peer in peers) for c in group(**seconds)]


def test_a_device_time_that_holds_the_hosts_enters_no_ratio():
    """A device time with host gaps has no ratio and no share of the limit; the wall clock has both."""
    cells = [*exposed("default", default=0.2e-3, t=0.5e-3), cell("rival", 0.8e-3, kind="mode")]
    found = table(cells)
    assert (bool(found["default"].time), found["default"].speedups, found["default"].share) == (True, {}, None)
    assert set(found["t"].speedups) == {"eager", "strongest"}
    assert found["t"].speedups["strongest"].median == pytest.approx(1.6, rel=0.02)
    assert set(table(cells, "wall")["t"].speedups) == {"eager", "default", "strongest"}


def test_a_floor_that_holds_the_hosts_time_is_unknown():
    """An A/A with host gaps gives no noise floor in device time."""
    assert verdicts.noise(exposed(AGAIN), "device") == UNKNOWN
    assert verdicts.noise(exposed(AGAIN), "wall") != UNKNOWN


def test_what_has_no_ratio_is_not_slow():
    """A passing case without a speedup is in no rate; a failing one counts as slow."""
    cells = [cell(peer, case=case) for case in "abc" for peer in ("eager", AGAIN)]
    cells += [cell("t", 0.5e-3, case="a"), cell("t", 0.5e-3, case="b", exposed=True), cell("t", case="c", status="oom")]
    (summary,) = (s for s in summaries(entries(cells, "device"))["bf16"] if s.peer == "t")
    assert (summary.passed, summary.fast[1.0], summary.counts["eager"]) == (2, 0.5, 1)


@pytest.mark.parametrize(
    ("held", "own", "fresh", "memory"),
    [
        pytest.param(2**21, 2**20, False, 0.5, id="large"),
        pytest.param(2**20, 4096, False, None, id="its own is small"),
        pytest.param(4096, 2**20, False, None, id="the baseline's is small"),
        pytest.param(2**21, 2**20, True, None, id="its own in another process"),
    ],
)
def test_memory_is_a_ratio_of_like(held, own, fresh, memory):
    """Memory ratios need peaks of at least 1 MiB, measured in the same kind of process."""
    made = {"eager": Compile(peak_bytes=held), "t": Compile(peak_bytes=own, fresh=fresh)}
    cells = [cell(peer, compile=each) for peer, each in made.items()]
    found = table(cells, "wall")
    assert found["t"].memory == memory


def test_of_a_run_twice_told_the_last_stands():
    """A shard that was run again replaces its cells, and is not a second compile."""
    again = [cell("eager", 5e-3, group="later")]
    found = table([cell("eager", 1e-3, group="earlier"), *again])["eager"]
    assert found.time.median == pytest.approx(5e-3, rel=0.02)
    assert found.compiles == 1


@pytest.fixture
def two_groups():
    """A whole group, then one of a few peers in which everything takes twice as long, and eager twice the memory."""

    def of(group, slower, **seconds):
        held = Compile(peak_bytes=int(slower * 2**20))
        peers = {"eager": 1e-3, AGAIN: 1e-3, "default": 1e-3, **seconds}
        return [cell(peer, slower * each, group=group, compile=held) for peer, each in peers.items()]

    return [*of("whole", 1, hand=0.5e-3, t=0.8e-3, auto=1e-3), *of("part", 2, auto=0.25e-3)]


def test_a_part_that_was_run_again_replaces_its_peers_alone(two_groups):
    """Each peer has the figures and ratios of the latest group that timed it."""
    found = table(two_groups)
    assert {peer: found[peer].cell.group_id for peer in found} == {
        **dict.fromkeys(("eager", AGAIN, "default", "auto"), "part gemm"),
        **dict.fromkeys(("hand", "t"), "whole gemm"),
    }
    assert found["t"].speedups["eager"].median == pytest.approx(1.25, rel=0.02)
    assert found["auto"].speedups["eager"].median == pytest.approx(4.0, rel=0.02)
    assert (found["t"].memory, found["auto"].memory) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("later", "stand"),
    [
        pytest.param({"eager": "pass", "default": "pass"}, "earlier", id="a part"),
        pytest.param({"eager": "pass", "default": "pass", "mode": "unavailable"}, "earlier", id="one not to be had"),
        pytest.param({"eager": "pass", "default": "pass", "mode": "oom"}, "later", id="all, of which one fails"),
        pytest.param({"eager": "pass", "default": "pass", "another": "pass"}, "later", id="as many"),
    ],
)
def test_eager_and_modes_are_of_the_group_that_has_most_modes(later, stand):
    """Modes and controls are from the latest group with most modes; a template is from its latest group."""
    whole = [cell(peer, group="earlier") for peer in ("eager", AGAIN, "default", "t")]
    whole.append(cell("mode", kind="mode", group="earlier"))
    part = [cell(peer, status=status, group="later") for peer, status in later.items()]
    part = [dataclasses.replace(c, kind="mode") if c.peer in ("mode", "another") else c for c in part]
    found = table([*whole, *part, cell(AGAIN, group="later"), cell("t", group="later")])
    assert {found[peer].cell.group_id for peer in ("eager", AGAIN, "default")} == {f"{stand} gemm"}
    assert found["t"].cell.group_id == "later gemm"


@pytest.mark.parametrize(("status", "stands"), [("unavailable", "earlier"), ("fail_to_run", "later"), ("oom", "later")])
def test_a_peer_that_could_not_be_had_replaces_nothing(status, stands):
    """A later group in which a peer was unavailable keeps the earlier figure; one in which it failed does not."""
    found = table([cell("t", group="earlier"), cell("t", status=status, group="later")])
    assert found["t"].cell.group_id == f"{stands} gemm"


def test_a_peers_noise_is_of_its_own_group():
    """The noise of one group does not turn another group's result into a tie."""
    again = [cell("eager", group="later"), cell(AGAIN, 1.1e-3, group="later"), cell("default", group="later")]
    found = table([*group(t=0.95e-3), *again])
    assert (found["t"].marks["eager"], found["t"].noise.high < 1.02) == ("win", True)
    assert found["default"].noise.high > 1.05


def test_the_strongest_is_told_where_all_rivals_were_timed(two_groups):
    """A group without all rivals has no ratio to the strongest; a rival that fails there counts as missing."""
    hand = [dataclasses.replace(c, kind="hand") if c.peer == "hand" else c for c in two_groups]
    found = {peer for peer, entry in table(hand).items() if "strongest" in entry.speedups}
    assert found == {"hand", "t"}
    without = [c for c in two_groups if c.peer != "hand"]
    assert table(without)["auto"].speedups["strongest"].median == pytest.approx(4.0, rel=0.02)
    failed = cell("rival", status="oom", kind="mode", group="part")
    assert "strongest" not in table([*without, cell("rival", kind="mode", group="whole")])["auto"].speedups
    assert "strongest" in table([*without, cell("rival", kind="mode", group="whole"), failed])["auto"].speedups


def decided(winner, *rows):
    return {"winner": winner, "options": {}, "seconds": 1.0, "rows": list(rows)}


def test_what_auto_chose_is_of_the_group_of_its_row(two_groups):
    """Tables and choices show the same figure for auto: that of the latest group with it."""
    (choice,) = choices(two_groups)["auto"]
    assert choice.over["default"] == table(two_groups, "wall")["auto"].speedups["default"]
    assert choice.noise == table(two_groups, "wall")["auto"].noise


@pytest.mark.parametrize(
    ("decision", "winner"),
    [
        pytest.param(decided("tuned", ["tuned", "pass", 1.0, 1.0, ""]), "tuned", id="raced"),
        pytest.param(decided("default"), "default, not raced", id="not raced"),
        pytest.param(None, "", id="not told"),
    ],
)
def test_a_winner_without_a_race_says_so(decision, winner):
    """If the race failed or the graph was too small, auto's choice is not based on a measurement."""
    (choice,) = choices([cell("default"), cell("auto", decided=decision)])["auto"]
    assert choice.winner == winner


def test_spread_is_of_the_samples():
    """The spread is the 20th and 80th percentile of the samples of all compiles."""
    cells = [cell("t", group=str(run), run=run) for run in (0, 1)]
    cells = [dataclasses.replace(c, device_s=[1.0 + c.run] * 5) for c in cells]
    assert table(cells)["t"].spread == (1.0, 2.0)


def test_summary():
    """Means are unclipped and over passing cases, failures count in the rates, and unavailable peers are separate."""
    cells = [
        *(c for case in "abcd" for c in (cell("eager", case=case), cell(AGAIN, case=case))),
        cell("t", 0.25e-3, case="a"),
        cell("t", 1.6e-3, case="b"),
        cell("t", case="c", status="fail_accuracy"),
        cell("t", case="d", status="unavailable"),
    ]
    (summary,) = (s for s in summaries(entries(cells, "device"))["bf16"] if s.peer == "t")
    assert (summary.cases, summary.passed, summary.unavailable) == (3, 2, 1)
    assert summary.geomeans["eager"] == pytest.approx(math.sqrt(4 / 1.6), rel=0.02)
    assert summary.fast == pytest.approx({1.0: 1 / 3, 1.1: 1 / 3, 2.0: 1 / 3})
    assert summary.marks == {"win": 1, "tie": 0, "loss": 1}
    assert (summary.worst[0], summary.worst[1]) == (pytest.approx(1 / 1.6, rel=0.02), "b")
    assert (summary.cold_s, summary.warm_s) == (5.0, 1.0)
    assert summary.counts == {"eager": 2, "default": 0, "strongest": 2}


def test_faster_within_noise_is_not_faster():
    """A gain of 0.5 % does not count for fast_1.0, nor does 2 % with a noise floor of 3 %."""
    slight = [cell("eager"), cell(AGAIN), cell("t", 0.995e-3), cell("more", 0.98e-3)]
    noisy_floor = [cell("eager"), cell(AGAIN, 1.03e-3), cell("more", 0.98e-3)]
    for cells, wanted in ((slight, {"t": 0.0, "more": 1.0}), (noisy_floor, {"more": 0.0})):
        found = {summary.peer: summary.fast for summary in summaries(entries(cells, "device"))["bf16"]}
        assert {peer: found[peer][1.0] for peer in wanted} == wanted


def test_controls_are_no_peers():
    """A/A has a row, but is not in the summary."""
    found = entries(group(), "device")
    assert [summary.peer for summary in summaries(found)["bf16"]] == ["eager"]


def test_noise_is_the_groups_own():
    """The A/A row of a group sets its noise floor; without it there is none."""
    cells = group()
    assert 1.0 < verdicts.noise(cells, "device").high < 1.02
    quiet = [cell("eager", seed=1), cell(AGAIN, seed=1)]
    assert verdicts.noise(quiet, "device") == Interval(1.0, 1 / 1.01, 1.01)
    assert verdicts.noise(cells[:1], "device") == UNKNOWN
