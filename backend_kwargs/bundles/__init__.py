"""Compiled modules: built and checked once, saved as a bundle, and served elsewhere without compiling.

`module` is what users see: `CompiledModule`, with its states and its `config`. `running` compiles a module, calls
it, and serves it; `samples` are the arguments it is compiled for, with which the arguments of a call are
compared. `graphs` keeps compiled graphs whose code cannot have changed elsewhere, and loads them; `libraries` loads
their C++ functions. `disk/` is the folder of a bundle: written whole, read with care.
"""
