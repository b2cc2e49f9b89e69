"""AOTInductor packages compiled from a plain dict of options."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import nn


class Calls(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.fn(*inputs)


def rounding(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16 at each of several steps, as eager does and a fused kernel does not.

    IEEE says how each step is rounded, so the bits are the same on every processor.
    """
    return ((x * w + x) * w - x) * x / (w * w + 3)


def result_of(module: nn.Module, inputs: tuple[torch.Tensor, ...], config: dict[str, Any], folder: Path) -> Any:
    """Return the result of a package that AOTInductor compiled with `config`."""
    package = _packaged(module, inputs, config, folder)
    with torch.no_grad():
        return torch._inductor.aoti_load_package(package)(*inputs)


def code_of(module: nn.Module, inputs: tuple[torch.Tensor, ...], config: dict[str, Any], folder: Path) -> str:
    """Return the C++ that AOTInductor generates with `config`, without comments; nothing is compiled."""
    package = _packaged(module, inputs, {**config, "aot_inductor.package_cpp_only": True}, folder)
    with ZipFile(package) as file:
        code = "\n".join(file.read(name).decode() for name in sorted(file.namelist()) if name.endswith(".cpp"))
    return "\n".join(line for line in code.splitlines() if line and not line.startswith("//"))


def _packaged(module: nn.Module, inputs: tuple[torch.Tensor, ...], config: dict[str, Any], folder: Path) -> str:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own warning about its export
        exported = torch.export.export(module, inputs)
        path = str(folder / "model.pt2")
        return torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=config)
