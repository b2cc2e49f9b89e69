"""Lowering of ATen to Relax: `graph` visits the nodes, of which `kernels` makes functions by the converters."""

from backend_kwargs.backends.tvm.lowering.graph import Lowered, lower
from backend_kwargs.backends.tvm.lowering.kernels import Kernels

__all__ = ["Kernels", "Lowered", "lower"]
