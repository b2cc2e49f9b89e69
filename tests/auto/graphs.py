"""Functions and helpers for the tests of auto."""

import sqlite3

import torch

import backend_kwargs
from backend_kwargs.auto.store import Store
from backend_kwargs.facts.decision import Decision, RaceRow

ROW = RaceRow("cudagraphs", seconds=1e-4, won=True)
KEY = "ab" * 32
MADE = Decision(KEY, "graph", "cudagraphs", {"triton.cudagraphs": True}, (ROW,), {"gpu": "H200"}, "3 ops", 2.5, 1e9)
TOLD = {"device": "cpu", "training": False, "writes": False, "dynamic": False, "bytes_read": 0.0}


def chain(x):
    return torch.relu(x * 2 + 1).sum(-1)


def backend_of(**options):
    return backend_kwargs.make_backend("tmpl-inductor:auto", candidates=[], **{"budget_s": 300.0} | options)


def rows_of(store):
    (decision,) = Store(store).all()
    return {row.name: row for row in decision.rows}


def logged(log):
    """Return the last log line with a decision."""
    return [line for line in log.messages if line.startswith("auto: ")][-1].splitlines()[0]


def spoil(store, key):
    """Make the row stored under `key` invalid."""
    with sqlite3.connect(store) as connection:
        connection.execute("UPDATE decisions SET seconds = '3' WHERE key = ?", (key,))
    connection.close()
