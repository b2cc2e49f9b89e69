"""AOTAutograd: its options, how it is called, and how its inputs and outputs are described."""

from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, InputMutationAOTOutput, ParamAOTInput


def saves_strictly() -> bool:
    """Return whether AOTAutograd must be able to save its result, as under `aot_compile()`."""
    return config.strict_autograd_cache


def shared_in_cache(name: str) -> AbstractContextManager[None]:
    """Let AOTAutograd's cache find results whatever the value of its option `name`."""
    ignored = [*config._save_config_ignore, name, "_save_config_ignore"]
    return patched(_save_config_ignore=ignored)


def patched(**options: Any) -> AbstractContextManager[None]:
    """Set options of AOTAutograd in this thread, until the context is left."""
    return config.patch(options)  # type: ignore[no-any-return]
