"""Workloads: cases, networks and kernels of the suite, and the peers that run them.

A `case` is a problem with its least work; `cases/` has all of them, in `nets/` of plain torch and Triton `kernels/`. A
user's own models are in `user_models` by name. `peers` is a table of the alternatives that a user has.
"""
