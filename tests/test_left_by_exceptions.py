"""What is changed for a while is put back when it is left by an exception, or by a Ctrl-C."""

import logging
import os
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from backend_kwargs.auto import decide, process_memory
from backend_kwargs.auto.graph_stats import observed_stats
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.backends.onnxruntime import session as onnx_session
from backend_kwargs.backends.tvm import settings
from backend_kwargs.bundles import libraries
from backend_kwargs.bundles.disk.place import private_folder
from backend_kwargs.bundles.running import without_gradients
from backend_kwargs.cli.console import quiet
from backend_kwargs.files import opened_folder
from backend_kwargs.harness.models import importable
from backend_kwargs.precision import quantised
from backend_kwargs.torch_internals import caches, inductor_config, relowering
from backend_kwargs.torch_internals.relowering import around_lowering
from backend_kwargs.torch_internals.replacing import replaced
from backend_kwargs.torch_internals.tensors import modes_restored
from backend_kwargs.trial import roundings


def filters():
    return [(name, [*logging.getLogger(name).filters]) for name in onnx_session.LINES]


def wrappers():
    return [getattr(torch._inductor.output_code, name) for name in relowering.WRAPPERS]


def default_of_fusion():
    return inductor_config.entries()["max_fusion_size"].default


def standard_error():
    return os.fstat(2).st_dev, os.fstat(2).st_ino, quiet.__wrapped__.__globals__["_ours"]


def descriptors():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - without a descriptor of an iterator


def private_folders():
    return sorted(Path(tempfile.gettempdir()).glob("planted-*"))


def nothing():
    """Change nothing more than the context itself does."""


# The context, what may be changed within it, and the state that is compared.
CONTEXTS = {
    "decisions": (process_memory.nothing_decided, nothing, process_memory.memory),
    "lines of the exporter": (onnx_session._without_lines_of_the_exporter, nothing, filters),
    "grad mode": (modes_restored, lambda: torch._C._set_grad_enabled(False), torch.is_grad_enabled),
    "forward mode": (modes_restored, lambda: torch._C._set_fwd_grad_enabled(False), torch._C._is_fwd_grad_enabled),
    "hooks of saved tensors": (
        modes_restored,
        lambda: torch._C._autograd._saved_tensors_hooks_disable("planted"),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
    ),
    "variable": (lambda: replaced(os.environ, "PLANTED", "1"), nothing, lambda: os.environ.get("PLANTED")),
    "libraries of a bundle": (
        lambda: libraries.provided({}, Path()),
        nothing,
        lambda: libraries._folder.get(None),
    ),
    "options of a lowering": (
        lambda: around_lowering([], {"max_fusion_size": 3}),
        nothing,
        lambda: inductor_config.value("max_fusion_size"),
    ),
    "context of a lowering": (lambda: around_lowering([], {}), nothing, torch._guards.TracingContext.try_get),
    "default of an option": (
        lambda: inductor_config.defaults_replaced({"max_fusion_size": 3}),
        nothing,
        default_of_fusion,
    ),
    "recording of CUDA graphs": (relowering.recording_nothing, nothing, wrappers),
    "notes of CUDA graphs": (relowering.noting_recordings, nothing, wrappers),
    "standard error": (quiet, nothing, standard_error),
    "warnings of torchao": (quantised.unhashed, nothing, lambda: [*warnings.filters]),
    "descriptor of a folder": (lambda: opened_folder("/"), nothing, descriptors),
    "private folder": (lambda: private_folder(Path(tempfile.gettempdir()), "planted-"), nothing, private_folders),
    "lock of a private folder": (lambda: private_folder(Path(tempfile.gettempdir()), "locked-"), nothing, descriptors),
    "hook for exceptions": (
        settings._hooks_kept,
        lambda: setattr(sys, "excepthook", print),
        lambda: sys.excepthook,
    ),
}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize(("context", "change", "state"), CONTEXTS.values(), ids=CONTEXTS)
def test_a_context_that_is_left_by_an_exception(context, change, state, error):
    """The state within differs, and afterwards it is that from before."""
    before = state()
    with suppress(error), context():
        change()
        assert state() != before
        raise error
    assert state() == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_gradients_are_on_again_after_a_call_that_fails(error):
    """A served call without gradients that raises leaves the caller's grad mode as it was."""

    def fails():
        assert not torch.is_grad_enabled()
        raise error("planted")

    with pytest.raises(error, match=r"^planted$"):
        without_gradients(fails)()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_operators_are_not_counted_after_a_run_that_fails(error):
    """Where the graph raises in eager, no dispatch mode stays: it would count each operator of the user's."""
    before = torch._C._len_torch_dispatch_stack()

    def fails():
        assert torch._C._len_torch_dispatch_stack() == before + 1
        raise error("planted")

    with pytest.raises(error, match=r"^planted$"):
        observed_stats(fails)
    assert torch._C._len_torch_dispatch_stack() == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_operators_round_as_before_after_a_run_that_fails(error):
    """Where eager fails under another rounding, no mode that rounds otherwise stays."""
    before, seen = torch._C._len_torch_dispatch_stack(), []

    def fails():
        seen.append(torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack())
        raise error("planted")

    with suppress(KeyboardInterrupt):
        assert [*roundings.Roundings(fails, {})] == []
    assert seen == [before + 1]
    assert torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_folder_of_a_users_file_is_searched_last_after_an_import_that_fails(tmp_path, error, monkeypatch):
    """A json.py beside a file that raises on import does not replace Python's afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = [*sys.path]
    with suppress(error), importable(str(tmp_path)):
        assert sys.path == [str(tmp_path), *before]
        raise error
    assert sys.path == [*before, str(tmp_path)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_artifacts_of_a_compile_that_fails_are_noted(error):
    """What a candidate has compiled before it fails is among the artifacts, and is none of the process's."""
    from torch.compiler._cache import CacheArtifactManager

    with suppress(error), caches.artifacts_noted() as noted:
        CacheArtifactManager.record_artifact("inductor", "planted", b"")
        raise error
    assert [each.key for each in noted] == ["planted"]
    assert "planted" not in [each.key for each in CacheArtifactManager._seen_artifacts]


def test_an_import_that_fails(monkeypatch):
    """Log lines are on again where torchao cannot be imported."""
    before = logging.root.manager.disable

    def fails(name):
        assert logging.root.manager.disable == logging.WARNING
        raise ImportError(name)

    monkeypatch.setattr(quantised, "import_module", fails)
    with pytest.raises(ImportError):
        quantised._torchao.__wrapped__()
    assert logging.root.manager.disable == before


def test_the_folder_of_races_is_removed():
    """`nothing_decided` leaves no folder behind when a race in it is interrupted."""
    folders = []
    with suppress(KeyboardInterrupt), process_memory.nothing_decided():
        folders.append(process_memory.memory().store)
        assert folders[0].is_dir()
        raise KeyboardInterrupt
    assert not folders[0].exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_seconds_of_a_race_that_fails_count(monkeypatch, error):
    """A race that fails or is interrupted has spent its share of the process's budget."""
    from backend_kwargs.auto import race
    from backend_kwargs.auto.question import Question, Request
    from backend_kwargs.auto.settings import RaceSettings

    def fails(request, tell):
        raise error("planted")

    monkeypatch.setattr(race, "race", fails)
    gm, x = torch.fx.symbolic_trace(torch.nn.ReLU()), torch.zeros(2)
    with process_memory.nothing_decided():
        given = CapturedGraph(gm, [x]), RaceSettings(), pytest.fail
        asked = Question(Request(*given, lambda name: {}, lambda options: {}, {}))
        with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else pytest.warns(match="its race failed"):
            decide.raced(asked)
        assert len(process_memory.memory().race_seconds) == 1
