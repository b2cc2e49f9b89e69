"""The table of converters by operator name."""

from torch import fx

from backend_kwargs.backends.part_compiler import Unsupported
from backend_kwargs.backends.tvm.lowering.indexing import INDEXING
from backend_kwargs.backends.tvm.lowering.linear import LINEAR
from backend_kwargs.backends.tvm.lowering.node import Converter
from backend_kwargs.backends.tvm.lowering.pointwise import POINTWISE
from backend_kwargs.backends.tvm.lowering.reductions import REDUCTIONS
from backend_kwargs.backends.tvm.lowering.views import RESHAPED, SAME, VIEWS
from backend_kwargs.backends.tvm.lowering.windows import WINDOWS
from backend_kwargs.graphs.parts import names_of

__all__ = ["CONVERTERS", "RESHAPED", "SAME", "converter"]

CONVERTERS: dict[str, Converter] = {**POINTWISE, **REDUCTIONS, **VIEWS, **INDEXING, **LINEAR, **WINDOWS}


def converter(node: fx.Node) -> Converter:
    """Return the converter of a node: its overload's entry, else the operator's. Raises Unsupported."""
    function = next((CONVERTERS[name] for name in names_of(node) if name in CONVERTERS), None)
    if function is None:
        raise Unsupported(node, "no converter")
    return function
