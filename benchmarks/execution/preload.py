"""Imports of the server that forks the suite's processes, so that none of them pays for these; no CUDA yet."""

import os
from concurrent.futures import ThreadPoolExecutor

# Otherwise torch initializes CUDA in the server, and no fork of it could use the GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.cpu_vec_isa

import backend_kwargs.trial  # noqa: F401

# Otherwise each process compiles and loads libraries for each set of vector instructions. All at once: 32 s one by one.
_known = torch._inductor.cpu_vec_isa.x86_isa_checker()
_sets = [isa for isa in torch._inductor.cpu_vec_isa.supported_vec_isa_list if {*str(isa).split()}.issubset(_known)]
with ThreadPoolExecutor() as pool:
    list(pool.map(bool, _sets))
torch._inductor.cpu_vec_isa.pick_vec_isa()
