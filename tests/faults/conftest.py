"""Fixtures for attacks: stores to damage, and races that take no time."""

import contextlib
import warnings

import pytest
import torch

import backend_kwargs
from backend_kwargs import errors
from backend_kwargs.auto import process_memory, race


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    path = tmp_path / "decisions"
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(path))
    torch._dynamo.reset()
    process_memory.forget_process()
    yield path
    process_memory.forget_process()
    torch._dynamo.reset()


class Races:
    """Races that default wins at once; `count` of them."""

    count = 0

    def __call__(self, request, tick):
        self.count += 1
        rows = [race.RaceRow("eager", seconds=1.0), race.RaceRow("default", seconds=1e-4, won=True)]
        return race.RaceResult(rows[1], tuple(rows), "3 ops", 0.1, False)


@pytest.fixture
def races(monkeypatch):
    stand_in = Races()
    monkeypatch.setattr(race, "race", stand_in)
    return stand_in


@pytest.fixture
def begin_anew():
    """Return a function that resets this process's memory of decisions, as in a fresh process."""

    def begin_anew():
        torch._dynamo.reset()
        process_memory.forget_process()
        errors.warn_once.cache_clear()

    return begin_anew


@pytest.fixture
def auto():
    def compiled(model, candidates=(), options=None, **kwargs):
        backend = backend_kwargs.make_backend("tmpl-inductor:auto", options, candidates=list(candidates), **kwargs)
        return torch.compile(model, backend=backend)

    return compiled


@pytest.fixture
def warned():
    """Return a context manager that collects this package's warnings."""

    @contextlib.contextmanager
    def collecting():
        recorded = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield recorded
        recorded += [str(each.message) for each in caught if issubclass(each.category, errors.BackendKwargsWarning)]

    return collecting
