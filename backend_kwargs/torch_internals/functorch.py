"""AOTAutograd: its options, how it is called, and how its inputs and outputs are described."""

from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, InputMutationAOTOutput, ParamAOTInput


def patched(**options: Any) -> AbstractContextManager[None]:
    """Set options of AOTAutograd in this thread, until the context is left."""
    return config.patch(options)  # type: ignore[no-any-return]
