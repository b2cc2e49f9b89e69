"""What cells show beyond their noise: verdicts, tables of cases, summaries of peers."""

import dataclasses
import math

import pytest

from backend_kwargs import trial
from backend_kwargs.trial import Interval
from benchmarks.analysis import verdicts
from benchmarks.analysis.auto_choices import choices
from benchmarks.analysis.verdicts import UNKNOWN, entries, judge, summaries
from benchmarks.execution.ceilings import Ceilings
from benchmarks.execution.records import AGAIN, Compile
from tests.benchmarks.bench_cells import CEILINGS, cell, noisy

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
    assert judge(trial.ratio_interval(old, new), [TWO_PER_CENT, TWO_PER_CENT]) == verdict


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


def test_a_name_from_a_file_is_eagers():
    """Names of peers are compared by value: those read from records are other strings."""
    eager = cell("".join(["eag", "er"]))
    assert table([eager, cell("default", 0.5e-3)])["default"].speedups["eager"].median > 1


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


def exact(peer, device, wall=1.0, dropped=1.0, **kwargs):
    """Return a cell with five equal samples on each clock."""
    made = dataclasses.replace(cell(peer, **kwargs), device_s=[device] * 5, wall_s=[wall] * 5, dropped_s=[dropped] * 5)
    return dataclasses.replace(made, repeats={"events": 3, "wall": 5, "dropped": 7})


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        pytest.param(2.0, 3.0, "AMBIGUOUS", id="begins at the floor"),
        pytest.param(2.01, 3.0, "FAST", id="begins above"),
        pytest.param(0.3, 0.5, "AMBIGUOUS", id="ends at the floor"),
        pytest.param(0.3, 0.49, "SLOW", id="ends below"),
        pytest.param(0.5, 2.0, "SAME", id="fills the floor"),
        pytest.param(0.5, 2.01, "AMBIGUOUS", id="beyond the upper end"),
        pytest.param(0.49, 2.0, "AMBIGUOUS", id="beyond the lower end"),
    ],
)
def test_where_a_verdict_ends(low, high, verdict):
    """The floors of both files are multiplied; an interval within or at their ends is the same."""
    assert judge(Interval(1.0, low, high), [Interval(1.0, 0.8, 1.25), Interval(1.0, 0.625, 1.6)]) == verdict


@pytest.mark.parametrize(
    ("speedup", "wanted"),
    [
        pytest.param((1.5, 1.2, 1.8), "tie", id="from the floor on"),
        pytest.param((1.5, 1.21, 1.8), "win", id="above"),
        pytest.param((0.6, 0.5, 0.8), "tie", id="up to the floor"),
        pytest.param((0.6, 0.5, 0.79), "loss", id="below"),
    ],
)
def test_where_a_mark_ends(speedup, wanted):
    """What touches the noise floor is a tie."""
    assert verdicts.mark(Interval(*speedup), Interval(1.0, 0.8, 1.2)) == wanted


def test_a_mark_within_no_noise():
    """The median decides on which side an interval is that does not touch the floor."""
    none = Interval(1.0, 2.0, 0.5)  # a floor that nothing overlaps
    assert [verdicts.mark(Interval(median, 1.0, 1.0), none) for median in (0.99, 1.0, 1.01)] == ["loss", "loss", "win"]


def test_clocks_have_names():
    """A device time names the state of the L2; wall times say what becomes of results."""
    keys = [("gemm", "fwd", "bfloat16", "cold", "")]
    assert [verdicts.clock_name(clock, keys) for clock in verdicts.CLOCKS] == [
        "Device time, cold L2",
        "Wall time",
        "Wall time, results dropped at once",
    ]


@pytest.mark.parametrize(("clock", "second"), [("device", 2.0), ("wall", 3.0), ("dropped", 4.0)])
def test_each_clock_has_its_samples(clock, second):
    """Time, rounds, repeats, speedups and noise are those of one clock."""
    cells = [
        exact("eager", 2 * 2.0, 3 * 3.0, 4 * 4.0),
        exact(AGAIN, 2 * 2.0, 3 * 3.0, 4 * 4.0),
        exact("default", 8 * 2.0, 9 * 3.0, 10 * 4.0),
        exact("t", 2.0, 3.0, 4.0),
    ]
    found = table(cells, clock)["t"]
    assert (found.time, found.rounds, found.compiles) == (Interval(second, second, second), 5, 1)
    assert found.repeats == {"device": 3, "wall": 5, "dropped": 7}[clock]
    assert found.spread == (second, second)
    assert found.dropped == (Interval(4.0, 4.0, 4.0) if clock == "wall" else None)
    eager, default = {"device": (2.0, 8.0), "wall": (3.0, 9.0), "dropped": (4.0, 10.0)}[clock]
    assert {what: each.median for what, each in found.speedups.items()} == pytest.approx(
        {"eager": eager, "default": default, "strongest": eager}
    )
    assert found.marks == {"eager": "win", "default": "win", "strongest": "win"}
    assert found.noise == Interval(1.0, 1 / 1.01, 1.01)
    assert (found.share is None) is (clock != "device")
    assert not found.exposed


def test_a_peer_is_no_rival_of_itself():
    """Default is compared with eager alone, and with default not at all."""
    found = table([exact("eager", 4.0), exact(AGAIN, 4.0), exact("default", 2.0)])["default"]
    assert {what: each.median for what, each in found.speedups.items()} == {"eager": 2.0, "strongest": 2.0}


def test_several_compiles_are_one_figure():
    """The median of their medians, the widest interval, the widest noise, the fewest rounds and the most repeats."""
    cells = []
    for run, seconds in enumerate((1.0, 3.0, 4.0)):
        again = dataclasses.replace(exact(AGAIN, 8.0 * (1.0 + run), group=str(run), run=run))
        cells += [exact("eager", 8.0, group=str(run), run=run), again, exact("t", seconds, group=str(run), run=run)]
    cells[:3] = [dataclasses.replace(each, device_s=each.device_s[:4], repeats={"events": 9}) for each in cells[:3]]
    found = table(cells)["t"]
    assert (found.time, found.compiles, found.rounds, found.repeats) == (Interval(3.0, 1.0, 4.0), 3, 4, 9)
    assert found.speedups["eager"] == Interval(8 / 3, 2.0, 8.0)
    assert found.noise == Interval(1.0, pytest.approx(1 / 3), pytest.approx(3.0))
    assert found.spread == (1.0, 4.0)


def test_one_failure_of_several_compiles_is_the_peers():
    """The row has the status of the compile that failed, and no figures."""
    cells = [
        each
        for run in (0, 1)
        for each in (exact("eager", 8.0, group=str(run), run=run), exact(AGAIN, 8.0, group=str(run), run=run))
    ]
    cells += [exact("t", 1.0, group="0", run=0), cell("t", status="oom", group="1", run=1)]
    found = table(cells)["t"]
    assert (found.cell.status, found.compiles, found.time, found.rounds, found.repeats) == ("oom", 0, None, 0, 0)
    assert (found.speedups, found.spread, found.memory) == ({}, None, None)


@pytest.mark.parametrize(
    ("fresh", "wanted"),
    [
        pytest.param([True, False], [False, True], id="half is no majority"),
        pytest.param([True, True, False], [True, True], id="majority"),
        pytest.param([False], [False], id="none"),
    ],
)
def test_whose_compile_seconds_are_used(fresh, wanted):
    """Those of fresh processes where these are more than half."""
    cells = []
    for case, own in zip("abc", fresh, strict=False):
        compile_ = Compile(cold_s=3.0 if own else 1.0, warm_s=1.0, fresh=own)
        cells += [cell("eager", case=case), cell(AGAIN, case=case), cell("t", case=case, compile=compile_)]
    (summary,) = (each for each in summaries(entries(cells, "device"))["bf16"] if each.peer == "t")
    assert (summary.compiled, summary.fresh) == (len(wanted), all(wanted))
    assert summary.cold_s == sum(3.0 if own else 1.0 for own in wanted) / len(wanted)


@pytest.mark.parametrize(
    ("values", "median"), [([], None), ([None], None), ([1.0, None, 3.0], 2.0), ([0.0], 0.0)], ids=str
)
def test_the_middle_of_what_is_known(values, median):
    """Unknown values do not count; a zero does."""
    assert verdicts.middle(iter(values)) == median


def test_a_case_in_a_table_has_its_mode():
    """A plain forward has none."""
    assert [verdicts.name(cell("t", mode=mode)) for mode in ("fwd", "train")] == ["gemm", "gemm train"]


def test_the_rate_of_what_is_fast():
    """More than so many times as fast beyond the noise; at exactly that it is not."""
    cells = []
    for case, seconds in zip("abcd", (4.04, 2.0, 1.01, 8.0), strict=True):
        cells += [exact("eager", 8.08, case=case), exact(AGAIN, 8.08, case=case), exact("t", seconds, case=case)]
    (summary,) = (each for each in summaries(entries(cells, "device"))["bf16"] if each.peer == "t")
    assert summary.fast == {1.0: 0.75, 1.1: 0.75, 2.0: 0.5}
    assert (summary.peaks, summary.memory) == (0, None)
