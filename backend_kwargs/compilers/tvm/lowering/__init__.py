"""Lowering of ATen to Relax: `graph` visits the nodes, with the converters that `table` collects."""

from backend_kwargs.compilers.tvm.lowering.graph import Lowered, lower

__all__ = ["Lowered", "lower"]
