"""Fixtures for every test: names that a test registers are removed after it."""

import gc
import os
import sys
from collections import Counter

import hypothesis
import pytest

from tests.slow import LIST, NIGHTLY, by_folder

# Threads that wait for work sleep, also in child processes: else they spin, and keep the cores from other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A slow machine is no failure.
hypothesis.settings.register_profile("without-deadline", deadline=None)
hypothesis.settings.load_profile("without-deadline")

VARIABLES = ("BACKEND_KWARGS_TEMPLATE", "BACKEND_KWARGS_OPTIONS")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    """Mark what tests/slow.txt lists as slow, and of that NIGHTLY."""
    listed = {*LIST.read_text().split()}
    for item in items:
        if item.nodeid.partition("[")[0] in listed:
            item.add_marker("slow")
            if item.nodeid.startswith(NIGHTLY):
                item.add_marker("nightly")


def pytest_terminal_summary(terminalreporter):
    """Print the seconds of each folder, if there are several."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    if "\n" in (text := by_folder(seconds)):
        terminalreporter.write_sep("=", "seconds by folder")
        terminalreporter.write_line(text)


@pytest.fixture(autouse=True, scope="session")
def _nothing_frozen_at_the_end():
    """What is frozen when the interpreter ends is not collected, and extension modules complain of leaks."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _modules_frozen():
    """Freeze what is alive before the tests of a file: else each `gc.collect()` visits a million objects of modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_names_left_behind(monkeypatch, tmp_path_factory):
    import torch._dynamo.backends.registry as dynamo

    from backend_kwargs import errors, registry
    from backend_kwargs.options import templates

    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path_factory.getbasetemp() / "decisions"))
    dynamo.list_backends()  # reads the entry points, so that no test is the first to
    tables = (templates._registered, registry._interned, dynamo._BACKENDS, dynamo._COMPILER_FNS)
    before = [dict(table) for table in tables]
    errors.warn_once.cache_clear()
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


@pytest.fixture(autouse=True)
def _stores_take_their_time(monkeypatch):
    """Wait for the answers of stores, unless a test gives limits of its own: a slow machine is no failure."""
    from backend_kwargs.stores import layered

    longest_s = layered.Reached.longest_s

    def patient(reached, limits):
        return 60.0 if (limits.connect_s, limits.lookup_s) == (2.0, 0.5) else longest_s(reached, limits)

    monkeypatch.setattr(layered.Reached, "longest_s", patient)


@pytest.fixture(autouse=True)
def _noise_is_no_doubt(request, monkeypatch):
    """Let decisions be settled however noisy a race was: a busy machine is no failure. `noise` marks tests of noise."""
    from backend_kwargs.facts import decision

    if not request.node.get_closest_marker("noise"):
        monkeypatch.setattr(decision, "is_unclear", lambda ratio: False)


@pytest.fixture(autouse=True)
def _float32_precision_as_before():
    """Restore float32's precision setting: "highest" differs from a fresh process's, and graphs are guarded on it."""
    import torch

    kinds = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul)
    before = [kind.fp32_precision for kind in kinds]
    yield
    for kind, precision in zip(kinds, before, strict=True):
        if kind.fp32_precision != precision:
            kind.fp32_precision = precision


@pytest.fixture
def fresh_dynamo():
    """Reset dynamo before and after."""
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a one-module distribution with entry points, laid out as pip does."""

    def lay_out(name: str, source: str, group: str, **entries: str) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[{group}]\n" + "".join(f"{key} = {name}:{value}\n" for key, value in entries.items())
        )

    return lay_out
