"""Lowering of ATen to Relax: `graph` visits the nodes, whose `kernels` the converters in `table` make."""

from backend_kwargs.compilers.tvm.lowering.graph import Lowered, lower
from backend_kwargs.compilers.tvm.lowering.kernels import Kernels

__all__ = ["Kernels", "Lowered", "lower"]
