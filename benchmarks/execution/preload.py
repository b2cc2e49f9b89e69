"""Imports of the server that forks the suite's processes, so that none of them pays for these; no CUDA yet."""

import os

# Otherwise torch initializes CUDA in the server, and no fork of it could use the GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.cpu_vec_isa

import backend_kwargs.measure  # noqa: F401

# Otherwise each process compiles and loads a library for each set of vector instructions.
torch._inductor.cpu_vec_isa.pick_vec_isa()
