"""Races in the background: candidates are loaded, checked and timed between calls, and the winner takes over there.

`serving` begins a race and serves the calls meanwhile; `course` are the race's steps, and `lowering` what workers do
for them; `inputs` lets a step run on the inputs of one call, `pacing` says when a step may run, and `versions` which
code does a backward pass.
"""
