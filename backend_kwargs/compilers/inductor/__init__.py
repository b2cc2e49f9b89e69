"""Inductor under templates and options: what is handed to torch's compile_fx, and what is mended around it."""
