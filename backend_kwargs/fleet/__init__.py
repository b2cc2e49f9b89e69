"""Models tuned on many devices and machines: a plan of units, who takes which, and what came of each.

`board` has the file of models, what is tuned at once, the document of it, and what the store knows of it.
`scheduling` says which unit runs next. `pools` run units, on this machine's devices or on a Ray cluster: each starts a
process for it, which is a `worker`; `racing` is what happens to a unit there, and to a model that is audited.
"""
