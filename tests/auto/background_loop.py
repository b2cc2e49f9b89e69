"""Loops whose race goes on in the background, until it has ended."""

import time

import backend_kwargs
from backend_kwargs.compile_records import records

LIMIT_S = 900.0  # of a slow machine; nothing is judged by it
EVERY = {"race": "background", "background_share": 1.0}


def backend(*candidates, **options):
    """Return a backend that races these candidates in the background, with all of the process's time."""
    return backend_kwargs.make_backend("tmpl-inductor:auto", candidates=list(candidates), **EVERY, **options)


def record():
    """Return the record of the graph that was compiled last."""
    return records()[-1]


def timeline():
    """Return the timeline of the graph that was compiled last."""
    return record().facts.background


def words():
    """Return what has happened, in one text."""
    return "\n".join(each.what for each in timeline().events)


def until(happened, call):
    """Call until something has happened, and once more; return how often."""
    began, calls = time.monotonic(), 0
    while not happened():
        assert time.monotonic() < began + LIMIT_S, timeline().text
        call()
        calls += 1
        time.sleep(0.01)
    call()
    return calls + 1


def until_ended(call):
    """Call until the race has ended; return how often."""
    return until(lambda: timeline().ended, call)
