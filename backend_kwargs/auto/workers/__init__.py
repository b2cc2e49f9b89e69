"""Processes that lower the graphs of a race in advance, so that its own lowering finds the code in Inductor's cache.

`graphs` makes bytes of a lowered graph; `pool` gives them to processes, each of which `process` starts and ends;
`child` is what such a process runs; `messages` is what goes through its pipes; `cores` says how many there may be.
Nothing here raises where a graph or a machine does not fit: the ticket says why.
"""
