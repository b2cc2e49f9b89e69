"""What Inductor reads beside a lowered graph: options and settings of torch, which another process is given too."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from backend_kwargs.torch_internals import inductor_config
from backend_kwargs.torch_internals.lowered_graphs import UnportableError

CONFIGS = (
    inductor_config.INDUCTOR,
    "torch._inductor.config_comms",  # since torch 2.13
    "torch._functorch.config",
    "torch.fx.experimental._config",
)
# The process that lowers has its own. Of `trace`, `provenance_tracking_level` is a part of Inductor's key.
OWN = ("trace.", "compile_threads", "worker_start_method", "cudagraph_policy", "save_args", "pipeline_max_autotune")
KEPT = "trace.provenance_tracking_level"
OWN_VARIABLES = ("TORCH_WARM_POOL", "PYTHONPATH", "TORCH_LOGS", "TORCH_TRACE")
# Settings that are attributes below `torch`, in the order in which they are set.
SETTINGS = (
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.conv.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "utils.deterministic.fill_uninitialized_memory",
)
ATTENTION = ("flash", "mem_efficient", "math", "cudnn")  # kernels of scaled_dot_product_attention


def state(options: Mapping[str, object]) -> dict[str, Any]:
    """Return what Inductor reads in this thread under `options`, or raise UnportableError."""
    with inductor_config.patched(options):
        configs = {name: _values(name) for name in CONFIGS if find_spec(name)}
        if not inductor_config.value("fx_graph_cache") or inductor_config.value("force_disable_caches"):
            raise UnportableError("Inductor's cache of graphs is off")
    if configs["torch._functorch.config"].get("bundled_autograd_cache"):
        raise UnportableError("AOTAutograd's cache takes the place of Inductor's")
    folder = str(Path.cwd())
    return {
        "configs": configs,
        "environ": {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES},
        "path": [each or folder for each in sys.path],
        "folder": folder,
        "device": torch.cuda.current_device() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "attention": [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in ATTENTION],
        "attention_order": torch._C._get_sdp_priority_order(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), _warns_only()),
        "settings": {name: _read(name) for name in SETTINGS if _exists(name)},
    }


@contextmanager
def entered(sent: Mapping[str, Any]) -> Iterator[None]:
    """Set what `state` returned elsewhere, for the whole process; the configs until the context is left."""
    os.environ.update(sent["environ"])
    for name in os.environ.keys() - sent["environ"].keys() - set(OWN_VARIABLES):
        del os.environ[name]
    os.chdir(sent["folder"])
    sys.path[:] = sent["path"]
    if torch.get_num_threads() != sent["threads"]:
        torch.set_num_threads(sent["threads"])  # starts none before an operator uses them
    torch.set_default_dtype(sent["dtype"])
    torch.set_float32_matmul_precision(sent["precision"])
    enabled, warns_only = sent["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warns_only)
    for kind, allowed in zip(ATTENTION, sent["attention"], strict=True):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(allowed)
    torch._C._set_sdp_priority_order(sent["attention_order"])
    for name, value in sent["settings"].items():
        if _read(name) != value:
            owner, _, attribute = name.rpartition(".")
            setattr(_read(owner), attribute, value)
    with ExitStack() as stack:
        for name, values in sent["configs"].items():
            stack.enter_context(import_module(name).patch(values))
        yield


def _values(module: str) -> dict[str, Any]:
    """Return the options of a config module, without those that are the process's own."""
    found, values = import_module(module), {}
    for name, entry in inductor_config.entries(module).items():
        if entry.alias is None and (name == KEPT or not name.startswith(OWN)):
            value: object = found
            for part in name.split("."):
                value = getattr(value, part)
            values[name] = value
    return values


def _read(name: str) -> Any:
    value: object = torch
    for part in filter(None, name.split(".")):
        value = getattr(value, part)
    return value


def _exists(name: str) -> bool:
    try:
        _read(name)
    except (AttributeError, RuntimeError):  # torch raises the second where old and new settings of TF32 are mixed
        return False
    return True


def _warns_only() -> bool:
    return torch.is_deterministic_algorithms_warn_only_enabled()
