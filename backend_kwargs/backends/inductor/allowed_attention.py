"""The kernels that scaled_dot_product_attention may choose: a part of keys, since torch's own caches ignore it."""

from typing import Any

import torch

from backend_kwargs.torch_internals.tensors import attention_order


def allowed_attention() -> str:
    """Return the kernels that scaled_dot_product_attention may choose, which AOTAutograd's cache key does not have."""
    backends: Any = torch.backends.cuda
    kinds = (backends.flash_sdp_enabled, backends.mem_efficient_sdp_enabled, backends.math_sdp_enabled)
    return f"{[allowed() for allowed in (*kinds, backends.cudnn_sdp_enabled)]} {attention_order()}"
