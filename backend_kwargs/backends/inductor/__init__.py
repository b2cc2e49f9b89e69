"""Inductor under templates and options: what is passed to torch's compile_fx, and workarounds for it.

`compiler` reads options, compiles, and falls back where a graph does not compile with some of them. `lowered` keeps
lowered graphs, to compile them again. `cudagraph_outputs` copies results out of CUDA graphs' memory, `frozen_code`
frees the constants of frozen graphs, and `cutlass` lets Inductor find CUTLASS.
"""
