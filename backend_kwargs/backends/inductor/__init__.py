"""Inductor under templates and options: what is passed to torch's compile_fx, and workarounds for it."""
