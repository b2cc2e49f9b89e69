"""What compiled code depends on besides its graph: releases, processor, GPU and driver."""

import platform
import sys
from collections.abc import Mapping
from functools import cache

import torch

from backend_kwargs.keys import digest
from backend_kwargs.options.requirements import machine
from backend_kwargs.trial.environment import processor

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
    here = {
        "torch": str(torch.__version__),
        "git": str(torch.version.git_version),
        "python": platform.python_version().rpartition(".")[0],
        "system": f"{sys.platform} {platform.machine()}",
        "cpu": f"{torch.backends.cpu.get_cpu_capability()} {_instruction_sets()}",
    }
    if device.type != "cuda":
        return here
    probed = machine()
    return here | {
        "gpu": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "cuda": str(probed.cuda),
        "driver": str(probed.driver),
        "triton": probed.triton_version or "none",
    }


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return the differences as text."""
    return [
        f"{WORDS.get(name, name)}: {there.get(name, 'none')} in the bundle, {here.get(name, 'none')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


@cache
def _instruction_sets() -> str:
    """Return a hash of the processor's features: Inductor compiles for the processor that it runs on."""
    if not (here := processor()):
        return platform.processor()
    flags = here.get("flags") or here.get("Features", "")
    return digest(" ".join(sorted(flags.split())).encode(), 12)
