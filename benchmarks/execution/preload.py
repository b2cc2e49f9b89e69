"""What the server that forks the suite's processes has imported, so that none of them pays for it; no CUDA yet."""

import os

# Asked the other way, torch starts CUDA in the server, and no fork of it could use the GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401

import backend_kwargs.measure  # noqa: F401
