"""The modes of one thread, entered in another."""

import threading
from contextlib import nullcontext

import pytest
import torch

from backend_kwargs.torch_internals.tensors import modes_of_thread


def seen():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(nullcontext, id="gradients"),
        pytest.param(torch.no_grad, id="no_grad"),
        pytest.param(torch.inference_mode, id="inference_mode"),
        pytest.param(lambda: torch.autocast("cpu", dtype=torch.float16), id="autocast"),
    ],
)
def test_another_thread_enters_them(mode):
    """A thread, which begins with torch's defaults, has them while they are entered, and its own afterwards."""
    with mode():
        wanted, entered = seen(), modes_of_thread()
    found = []

    def run():
        own = seen()
        with entered():
            found.append(seen() == wanted)
        found.append(seen() == own)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True, True]
