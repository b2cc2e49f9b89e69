"""What `torch.nn.Module` keeps of itself: the tables that registering fills, and what is called instead; graphs too."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.fx import _lazy_graph_module
from torch.nn.modules.dropout import _DropoutNd as Dropout

# The functions of C behind torch.nn.functional's, which dynamo puts into graphs.
cross_entropy_loss, linear = torch._C._nn.cross_entropy_loss, torch._C._nn.linear

# The same, and `torch.func`'s transforms: functions that write only into what their names, signatures and schemas say.
WRITES_AS_DECLARED = frozenset({"torch._functorch.predispatch", "torch._functorch.eager_transforms"}) | {
    f"torch._C._{name}" for name in ("nn", "autograd", "fft", "functorch", "linalg", "special")
}


def replace_tensors(module: torch.nn.Module, made_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer: `Module.to` would make complex ones real."""
    module._apply(made_of)  # type: ignore[no-untyped-call]


def dynamos_graph_class() -> AbstractContextManager[None]:
    """Make graphs of the class that dynamo makes, whose code is generated when they are called."""
    return _lazy_graph_module._use_lazy_graph_module(True)
