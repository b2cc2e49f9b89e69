"""The benchmark suite: kernels and models under every template and peer, next to the device's physical limit.

It times with `backend_kwargs.trial`, and compiles and checks with `backend_kwargs.harness`, as `compare` does.
`workloads/` is what is measured, `execution/` how, `analysis/` what follows from the records; `studies/` are
measurements with pages of their own, and `results/` those pages.
"""
