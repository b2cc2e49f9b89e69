"""ATen to Relax: `graph` goes node by node, with the converters that `table` collects from the other modules."""

from backend_kwargs.compilers.tvm.lowering.graph import Lowered, lower
from backend_kwargs.compilers.tvm.lowering.node import Unsupported

__all__ = ["Lowered", "Unsupported", "lower"]
