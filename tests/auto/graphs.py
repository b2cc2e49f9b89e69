"""What the tests of auto compile and read."""

import torch

import backend_kwargs
from backend_kwargs.compilers.auto.decisions import Store

TOLD = {"device": "cpu", "training": False, "writes": False, "dynamic": False, "bytes_read": 0.0}


def chain(x):
    return torch.relu(x * 2 + 1).sum(-1)


def backend_of(**options):
    return backend_kwargs.make_backend("tmpl-inductor:auto", candidates=[], **options)


def rows_of(store):
    (decision,) = Store(store).all()
    return {row["name"]: row for row in decision.rows}


def told(log):
    """Return the last line of the log that names a decision."""
    return [line for line in log.messages if line.startswith("auto: ")][-1].splitlines()[0]
