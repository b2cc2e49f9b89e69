"""Inductor under templates and options: what is passed to torch's compile_fx, and workarounds for it.

`compiler` reads options and compiles. `fallbacks` are options with which some graphs do not compile.
`cudagraph_outputs` copies results out of CUDA graphs' memory, `frozen_code` frees the constants of frozen graphs, and
`cutlass` lets Inductor find CUTLASS. `allowed_attention` is a part of keys.
"""
