"""Triton kernels of our own, where libraries have no kernel or a slow one; `launch` is what they share."""
