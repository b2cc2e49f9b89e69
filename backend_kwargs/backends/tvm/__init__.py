"""TVM: compiles ATen via Relax for its virtual machine. Only this package imports TVM, whose releases rename its API.

`compiler` and `settings` are the options and their checks, without TVM. `part_compiler` is TVM as a `PartCompiler`: it
says which operators it gets, and how a part is called: alignment, aliasing, threads, streams. `lowering/` converts ATen
to Relax. Dtype, rank and sizes of each node are compared with its fake tensor's; a node that differs runs in eager.
`opaque` hides arithmetic on data from TVM's passes. `build`, `target`, `cpu_schedule` and `tune` make code, with our
schedules or by search.
"""
