"""A file of tensors in the format of safetensors, whose own writer needs numpy; its reader does not."""

import json
import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from backend_kwargs.bundles.samples import memory_view

# What the format calls each dtype that it has.
DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.complex64: "C64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
        torch.float8_e8m0fnu: "F8_E8M0",
        torch.float4_e2m1fn_x2: "F4",
    }
)
ALIGNED = 8  # bytes: the header is filled with spaces up to a multiple


def as_safetensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the content of a file with `tensors`: contiguous, on the CPU, none sharing memory with another."""
    # The widest dtypes first, as safetensors writes them, so that each tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": _shape(tensor), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(ALIGNED * math.ceil(len(text) / ALIGNED))
    return b"".join((len(text).to_bytes(8, "little"), text, *(memory_view(tensor) for _, tensor in ordered)))


def _shape(tensor: torch.Tensor) -> list[int]:
    """Return the sizes as the format counts them: two numbers of float4 are one element for torch."""
    packed = tensor.dtype is torch.float4_e2m1fn_x2
    return [*tensor.shape[:-1], *(size * 2 if packed else size for size in tensor.shape[-1:])]
