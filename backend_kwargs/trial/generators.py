"""The random generators that all threads share, torch's, Python's and NumPy's: seeded, and put back."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from backend_kwargs.torch_internals.replacing import undone

SEED = 0


def cuda_devices() -> range:
    """Return the CUDA devices, none before CUDA is initialized; counting them would initialize it."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]


def _generators() -> list[torch.Generator]:
    return [torch.default_generator, *(torch.cuda.default_generators[at] for at in cuda_devices())]


def seed(number: int = SEED) -> None:
    """Seed torch's generators."""
    # Not torch.manual_seed, which would replace a seed that the user has set for CUDA before it is initialized.
    for generator in _generators():
        generator.manual_seed(number)


def states() -> list[torch.Tensor]:
    """Return the states of torch's generators."""
    return [generator.get_state() for generator in _generators()]


def drawn() -> bool:
    """Return whether torch's generators have drawn since they were seeded with `SEED`, and seed them again."""
    now = states()
    seed()
    return not all(map(torch.equal, now, states()))


@contextmanager
def kept(device: torch.device | None = None) -> Iterator[None]:
    """Put the states of torch's generators back at the end: what other threads draw meanwhile, they draw again.

    CUDA is initialized first if `device` is of it.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
    with undone() as stack:
        for generator in _generators():
            stack.callback(generator.set_state, generator.get_state())
        yield


@contextmanager
def all_kept() -> Iterator[None]:
    """Put back the states of torch's, Python's and NumPy's generators."""
    with undone() as stack:
        stack.enter_context(kept())
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        yield
