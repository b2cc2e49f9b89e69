"""Functions and helpers for the tests of auto."""

import hashlib
import json
from pathlib import Path

import torch

import backend_kwargs
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.facts.decision import Decision, RaceRow

ROW = RaceRow("cudagraphs", seconds=1e-4, won=True)
KEY = "ab" * 32
MADE = Decision(
    KEY, "graph", "cudagraphs", {"triton.cudagraphs": True}, (ROW,), {"gpu": "H200"}, "3 ops", 2.5, made=1e9
)
TOLD = {"device": "cpu", "training": False, "writes": False, "dynamic": False, "bytes_read": 0.0}


def chain(x):
    return torch.relu(x * 2 + 1).sum(-1)


def backend_of(**options):
    return backend_kwargs.make_backend("tmpl-inductor:auto", candidates=[], **{"budget_s": 300.0} | options)


def rows_of(store):
    (decision,) = Catalogue(store).all()
    return {row.name: row for row in decision.rows}


def logged(log):
    """Return the last log line with a decision."""
    return [line for line in log.messages if line.startswith("auto: ")][-1].splitlines()[0]


class Raw(bytes):
    """JSON as it is to be written."""


def change(store, named="", **body):
    """Give these values to the decision in each document of a folder, sealed as if they were its own."""
    for file in Path(store).rglob(f"{named}*.json"):
        inner = json.loads(file.read_bytes())["document"]
        raw = {f"<{name}>": value for name, value in body.items() if isinstance(value, Raw)}
        inner["body"].update({name: f"<{name}>" if isinstance(value, Raw) else value for name, value in body.items()})
        text = json.dumps(inner).encode()
        for place, value in raw.items():
            text = text.replace(json.dumps(place).encode(), value)
        seal(file, text)


def seal(file, inner):
    """Write a document with this inner object and its SHA-256."""
    file.write_bytes(b'{"sha256": "%s", "document": %s}' % (hashlib.sha256(inner).hexdigest().encode(), inner))


def spoil(store, key):
    """Make the decision that is stored under `key` invalid."""
    change(store, key, seconds="3")
