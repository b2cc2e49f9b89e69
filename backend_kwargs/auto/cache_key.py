"""What of a graph, of its inputs and of torch's state is in keys."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from backend_kwargs.graphs.spelling import layout_of, numbered_symbols
from backend_kwargs.torch_internals.tensors import allowed_attention, has_static_address


def signature(gm: GraphModule, example_inputs: Sequence[object]) -> list[str]:
    """Return a description of each input, with its shape (symbols for sizes that vary) and strides."""
    texts = []
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        fake = node.meta.get("example_value")  # which has symbols
        known = fake if isinstance(fake, torch.Tensor) else value
        texts.append(f"{_kind(value)} {layout_of(known) if isinstance(known, torch.Tensor) else ''}")
    return numbered_symbols(texts)


def _kind(value: object) -> str:
    """Return the properties of an input besides its sizes: rank, dtype, device, requires_grad, and a static address.

    An input with a static address is not copied by CUDA graphs.
    """
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    stays = " static" if has_static_address(value) else ""
    return f"{value.dim()} {value.dtype} {value.device.type} {value.requires_grad}{stays}"


def kinds(example_inputs: Sequence[object]) -> list[str]:
    """Return a description of each input whatever its sizes."""
    return [*map(_kind, example_inputs)]


def described(example_inputs: Sequence[object]) -> tuple[str, ...]:
    """Return the dtypes and sizes of the inputs that are not parameters, for people to read."""
    given = [each for each in example_inputs if not isinstance(each, torch.nn.Parameter)]
    words = [
        f"{str(each.dtype).removeprefix('torch.')} {'x'.join(map(str, each.shape)) or 'scalar'}"
        if isinstance(each, torch.Tensor)
        else type(each).__name__
        for each in given
    ]
    return tuple(words[:MOST_INPUTS])


def devices_of(example_inputs: Sequence[object]) -> list[str]:
    """Return the kinds of devices that the inputs are on."""
    return sorted({value.device.type for value in example_inputs if isinstance(value, torch.Tensor)})


def card_of(example_inputs: Sequence[object]) -> int | None:
    """Return the index of the first GPU that an input is on, None if none is: it need not be the current one."""
    return next((each.device.index for each in example_inputs if isinstance(each, torch.Tensor) and each.is_cuda), None)


MOST_INPUTS = 32  # that are described
AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "maia")


def ambient() -> dict[str, object]:
    """Return the parts of torch's state that affect how the graph computes."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    # Not torch.get_float32_matmul_precision(), which raises if these differ.
    backends: Any = torch.backends
    float32 = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul)
    return {
        "defaults": f"{torch.get_default_dtype()} {torch.get_default_device().type}",
        "grad": "inference" if torch.is_inference_mode_enabled() else "grad" if torch.is_grad_enabled() else "no_grad",
        "autocast": {kind: str(torch.get_autocast_dtype(kind)) for kind in kinds},
        # A graph may contain torch.autocast() itself, which reads these.
        "autocast defaults": [str(torch.get_autocast_dtype(kind)) for kind in AUTOCAST],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "fast paths": [backends.mha.get_fastpath_enabled(), backends.opt_einsum.enabled, backends.opt_einsum.strategy],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "libraries": [library.enabled for library in (backends.cudnn, backends.mkldnn)],
        "float32": [backend.fp32_precision for backend in float32],
        "attention": allowed_attention(),
    }
