"""Lower precision by consent: graphs in one of the precisions of `options.precisions`, and the measured error.

`lowered` makes a graph in a precision: converted here or by its compiler, guarded, compiled. `casts` does this in the
graph for half precision; `quantised` gives linear layers to torchao, with converted parameters. The compiled graph is
measured where it is compiled, and in each bucket of dynamic sizes, against the graph in float64.
"""
