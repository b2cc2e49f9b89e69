"""Graphs: what they write, their parts, frozen parameters, and calls that can be repeated.

`writes` copies graphs and finds what their calls may write. `parts` cuts a graph into parts of a compiler and the rest,
with eager's strides (`layouts`). `freezing` makes parameters constants; `parameter_guards` notice their changes, and
`fused_steps` the steps of fused optimizers, which change no version. `eligibility` says whether a graph's calls can be
repeated, and `replay` repeats them from the state that the user's call had.
"""
