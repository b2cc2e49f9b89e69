"""What compiled code depends on besides its graph: releases, processor, GPU and driver."""

from collections.abc import Mapping

import torch

from backend_kwargs.options.machine import machine

# The names that `load` prints; code is compiled again if one of these differs.
WORDS = {
    "cpu": "instruction sets of the processor",
    "git": "torch's sources",
    "gpu": "GPU",
    "capability": "compute capability",
    "cuda": "CUDA",
}


def fingerprint(device: torch.device) -> dict[str, str]:
    """Return this machine and its releases, as far as code for `device` depends on them."""
    found = machine().on(device).stored("code for a GPU" if device.type == "cuda" else "code for a CPU")
    return {name: str(value) for name, value in found.items()}


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return the differences as text."""
    return [
        f"{WORDS.get(name, name)}: {there.get(name, 'none')} in the bundle, {here.get(name, 'none')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
