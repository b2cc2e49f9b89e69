"""Inductor's compilers, and torch.compile's own wrappers around them."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner, get_cpp_wrapper_config


def lost_cpp_wrapper_options() -> Mapping[str, object]:
    """Return the options that a C++ wrapper needs, which torch forgets for the backward graph; {} since 2.13."""
    kept = "log_cudagraph_skip" in signature(get_cpp_wrapper_config).parameters
    return {} if kept else get_cpp_wrapper_config()


def inductor_wrapper(*, ahead: bool = False) -> Any:
    """Return the class of the backend that torch.compile makes for "inductor", `ahead` of time or not.

    It is called with mode, options and dynamic, and has `config` and `reset`.
    """
    return torch._TorchCompileAOTInductorWrapper if ahead else torch._TorchCompileInductorWrapper


def region_name(name: str | None) -> dict[str, str | None]:
    """Return the argument of `compile_fx` that names the region, none for torch 2.11, which has no such argument."""
    return {"compile_region_name": name} if "compile_region_name" in signature(compile_fx).parameters else {}
