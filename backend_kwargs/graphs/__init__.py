"""Graphs: what they write, their parts, frozen parameters, and calls that can be repeated.

`writes` copies graphs, and finds what their calls may write and whether they can be repeated. `parts` cuts a graph into
parts of a compiler and the rest, with eager's strides. `freezing` makes parameters constants, and notices their
changes. `replay` repeats calls from the state that the user's call had. `ddp_buckets` finds the real inputs of the
graphs into which DDPOptimizer cuts one.
"""
