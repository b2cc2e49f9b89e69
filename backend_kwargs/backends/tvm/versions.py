"""Which TVM releases work, and an import of TVM without side effects.

`make_backend` refuses other releases at once: nothing else would compile the graph.
"""

import ctypes
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, ModuleType

from backend_kwargs.errors import BackendKwargsError, pip_install
from backend_kwargs.options.machine import installed_version, places_of
from backend_kwargs.options.requirements import Requirement
from backend_kwargs.torch_internals.replacing import replaced, undone

# By distribution, the required prefix of the version. Each TVM renames its API; with a later FFI tuning crashes.
WORKING: Mapping[str, str] = MappingProxyType({"apache-tvm": "0.27.", "apache-tvm-ffi": "0.1.14.post"})
INSTALL = pip_install("tvm")
SIGACTION_BYTES = 1024  # more than the `struct sigaction` of any system


def has_cuda() -> bool:
    """Return whether the installed TVM has its CUDA library; importing TVM to find out would take seconds."""
    return any(library for place in places_of("tvm") for library in place.glob("lib/*tvm_runtime_cuda*"))


CUDA = Requirement(
    lambda _: has_cuda(), "the installed apache-tvm is not a GPU build (it has no CUDA runtime)", INSTALL
)


def unfit() -> str:
    """Return why the installed TVM cannot be used, "" if it can; imports nothing."""
    for name, working in WORKING.items():
        found = installed_version(name)
        if found is None:
            return f"{name} {_release(working)} is not installed"
        if not found.startswith(working):
            return f"{name} is {found} and {_release(working)} is wanted"
    return ""


def require_tvm() -> ModuleType:
    """Import tvm, after torch, and restore the process's hooks; raise if it cannot be used."""
    if reason := unfit():
        raise BackendKwargsError(f"TVM cannot work here: {reason}; {INSTALL}.")
    import torch  # noqa: F401 - first, since both load libraries of the same names

    with _hooks_kept():
        import tvm
    return tvm  # type: ignore[no-any-return]


@contextmanager
def _hooks_kept() -> Iterator[None]:
    """Restore what `import tvm` replaces: sys.excepthook, and the process's action on SIGSEGV."""
    libc = None if sys.platform == "win32" else ctypes.CDLL(None)
    action = ctypes.create_string_buffer(SIGACTION_BYTES)
    with replaced(sys, "excepthook", sys.excepthook), undone() as stack:
        if libc is not None and libc.sigaction(signal.SIGSEGV, None, action) == 0:
            stack.callback(libc.sigaction, signal.SIGSEGV, action, None)
        yield


def _release(working: str) -> str:
    """Return the prefix of a version as a release."""
    return working.removesuffix(".").removesuffix(".post")
