"""What is changed for a while is put back when it is left by an exception, or by a Ctrl-C."""

import logging
import os
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from backend_kwargs.auto import decide, ranks
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.backends.inductor import cutlass
from backend_kwargs.backends.onnxruntime import session as onnx_session
from backend_kwargs.backends.tvm import no_fast_math, versions
from backend_kwargs.precision import quantised
from backend_kwargs.torch_internals.modes import modes_restored

STORE = torch.distributed.HashStore()


def filters():
    return [(name, [*logging.getLogger(name).filters]) for name in onnx_session.LINES]


def counting():
    return [thread.name for thread in threading.enumerate() if "count" in thread.name]


def nothing():
    """Change nothing more than the context itself does."""


# The context, what may be changed within it, and the state that is compared.
CONTEXTS = {
    "decisions": (decide.nothing_decided, nothing, decide.memory),
    "ranks that wait": (lambda: ranks._counting(STORE, "key"), nothing, counting),
    "lines of the exporter": (onnx_session._without_lines_of_the_exporter, nothing, filters),
    "grad mode": (modes_restored, lambda: torch._C._set_grad_enabled(False), torch.is_grad_enabled),
    "forward mode": (modes_restored, lambda: torch._C._set_fwd_grad_enabled(False), torch._C._is_fwd_grad_enabled),
    "hooks of saved tensors": (
        modes_restored,
        lambda: torch._C._autograd._saved_tensors_hooks_disable("planted"),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
    ),
    "variable of nvcc": (no_fast_math._nvcc_exact, nothing, lambda: os.environ.get(no_fast_math.NVCC_IS_EXACT)),
    "hook for exceptions": (
        versions._hooks_kept,
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
    with suppress(KeyboardInterrupt), decide.nothing_decided():
        folders.append(decide.memory().store.parent)
        assert folders[0].is_dir()
        raise KeyboardInterrupt
    assert not folders[0].exists()


def test_a_layout_of_cutlass_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    """A disk that is full while CUTLASS is laid out leaves nothing beside the layout."""

    def fails(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cutlass, "_link_or_copy", fails)
    with pytest.raises(OSError, match="No space left"):
        cutlass._lay_out(tmp_path / "cutlass" / "1-a", {"include": Path(tempfile.gettempdir())})
    assert [*(tmp_path / "cutlass").iterdir()] == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_seconds_of_a_race_that_fails_count(monkeypatch, error):
    """A race that fails or is interrupted has spent its share of the process's budget."""
    from backend_kwargs.auto import race
    from backend_kwargs.auto.request import Request, Tools
    from backend_kwargs.auto.settings import RaceSettings

    def fails(request, tell):
        raise error("planted")

    monkeypatch.setattr(race, "race", fails)
    tools = Tools(lambda name: {}, lambda options: {}, {})
    gm, x = torch.fx.symbolic_trace(torch.nn.ReLU()), torch.zeros(2)
    with decide.nothing_decided():
        asked = decide._Question(Request(CapturedGraph(gm, [x]), RaceSettings(), pytest.fail, tools))
        with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else pytest.warns(match="its race failed"):
            asked.raced()
        assert len(decide.memory().race_seconds) == 1
