"""Lower precision by consent: graphs in one of the precisions of `options.precisions`, and the measured error.

`lowered` makes a graph in a precision: converted here or by its compiler, guarded, compiled. `casts` does this in the
graph for half precision; `quantised` gives linear layers to torchao, and `weights` are their converted parameters.
`serving` measures the compiled graph where it is compiled, and in each bucket of dynamic sizes: `error` is against
`reference`, the graph in float64. `bounds` says why a precision is not used.
"""
