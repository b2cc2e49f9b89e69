"""Triton kernels of the suite, used as peers; nothing here imports Triton before a kernel is called."""

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from backend_kwargs.harness.trial import UnavailableError


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kernel(name: str, device: torch.device) -> Callable[..., Any]:
    """Return the kernel "module.function", which is imported at its first call.

    The call raises ImportError without Triton, and UnavailableError without a GPU or the interpreter
    (TRITON_INTERPRET=1).
    """

    @cache
    def load() -> Callable[..., Any]:
        if device.type != "cuda" and not interpreted():
            raise UnavailableError("Triton's kernels need a GPU; TRITON_INTERPRET=1 runs them on a CPU, slowly.")
        module, function = name.split(".")
        return getattr(import_module(f"{__name__}.{module}"), function)

    def call(*args: Any) -> Any:
        return load()(*args)

    return call
