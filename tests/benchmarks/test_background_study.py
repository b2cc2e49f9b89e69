"""The bars of loops whose race is in the background."""

from benchmarks.studies.background import bars, judge


def loops(calls, events, *, foreground=(0.25,) * 100, eager=(0.5,) * 100, first_s=20.0):
    starts = [float(at) for at in range(len(calls))]
    race = {"winner": "cudagraphs", "ended": True, "events": events}
    return {
        "eager": {"first_call_s": 0.1, "calls": eager, "starts": starts, "races": []},
        "foreground": {"first_call_s": first_s, "calls": foreground, "starts": starts, "races": [race]},
        "background": {"first_call_s": 3.0, "calls": calls, "starts": starts, "races": [race]},
    }


def event(at_s, what, pause_s=0.0):
    return {"at_s": at_s, "what": what, "pause_s": pause_s}


def test_a_loop_that_meets_all_bars():
    """The winner serves in time and is as fast as a foreground race's, and the one pause is told."""
    events = [event(31.9, "cudagraphs takes over"), event(31.9, "end of a slice", 0.9)]
    judged = judge(loops([0.5] * 31 + [0.9] + [0.25] * 168, events))
    assert set(bars(judged).values()) == {True}
    assert judged["served_s"] == 31.9
    assert judged["pauses"] == 1


def test_a_loop_without_a_race():
    """A graph that is refused, or whose race has not ended, meets no bar by being fast."""
    found = loops([0.25] * 200, [])
    assert [name for name, met in bars(judge(found)).items() if not met] == ["a race that ended"]
    found = loops([0.25] * 200, [event(31.9, "default takes over")])
    found["background"]["races"][0]["ended"] = False
    assert not bars(judge(found))["a race that ended"]


def test_a_pause_that_nothing_tells():
    """A longer call that is no event of the timeline is counted."""
    judged = judge(loops([0.5] * 30 + [0.9] + [0.25] * 169, [event(40.0, "cudagraphs takes over")]))
    assert judged["untold_pauses"] == [(30.0, 0.9)]
    assert [name for name, met in bars(judged).items() if not met] == ["told"]


def test_a_winner_that_comes_late():
    """The winner serves within 60 s, or twice the first call of a foreground race."""
    judged = judge(loops([0.5] * 100 + [0.25] * 100, [event(90.0, "cudagraphs takes over")]))
    assert judged["limit_s"] == 60.0
    assert not bars(judged)["winner in time"]
    assert judge(loops([0.5] * 100 + [0.25] * 100, [event(90.0, "x takes over")], first_s=50.0))["limit_s"] == 100.0
