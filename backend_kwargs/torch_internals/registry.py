"""dynamo's registry of backends."""

from typing import TYPE_CHECKING

import torch._dynamo
from torch._dynamo.backends import registry

if TYPE_CHECKING:
    from torch._dynamo.backends.registry import CompilerFn

lookup_backend = registry.lookup_backend  # raises InvalidBackend


def list_backends() -> list[str]:
    """Return the names in dynamo's registry, with entry points of installed packages and debug backends."""
    return torch._dynamo.list_backends(None)


def register_backend(name: str, backend: "CompilerFn") -> None:
    """Register a backend, for good; raise AssertionError if the name is taken.

    Up to torch 2.14 it sets the attribute `_tags` of the object.
    """
    torch._dynamo.register_backend(backend, name=name)


class _NamedAsRegistered:
    """An entry in dynamo's registry that is equal to every backend whose `compiler_name` is registered.

    After a compile dynamo drops its references to the caller's tensors, which would otherwise break
    `torch.utils.swap_tensors`, but only for compilers in its registry: up to torch 2.14 those with a registered
    `compiler_name`, since then those that equal a value of the registry. Its key cannot be looked up as a backend.
    """

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return getattr(other, "compiler_name", None) in registry._BACKENDS


_BY_NAME = _NamedAsRegistered()


def count_as_registered() -> None:
    """Make dynamo treat this package's backends like the registered ones that their `compiler_name` names."""
    registry._COMPILER_FNS.setdefault("backend_kwargs, by compiler_name", _BY_NAME)  # type: ignore[arg-type]


def is_torchs(compiler_fn: object) -> bool:
    """Return whether a backend is one of dynamo's own."""
    return str(getattr(compiler_fn, "__module__", "")).startswith("torch._dynamo")
