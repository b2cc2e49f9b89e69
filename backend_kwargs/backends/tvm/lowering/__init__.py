"""Lowering of ATen to Relax: `graph` visits the nodes, whose `kernels` the converters in `table` make."""

from backend_kwargs.backends.tvm.lowering.graph import Lowered, lower
from backend_kwargs.backends.tvm.lowering.kernels import Kernels

__all__ = ["Kernels", "Lowered", "lower"]
