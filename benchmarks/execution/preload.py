"""Imports of the server that forks the suite's processes, so that none of them pays for these; no CUDA yet."""

import os

# Otherwise torch initializes CUDA in the server, and no fork of it could use the GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401

import backend_kwargs.measure  # noqa: F401
