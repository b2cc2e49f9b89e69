"""The line to paste for a backend."""

from backend_kwargs.backend import Backend, find_in_dynamo
from backend_kwargs.errors import BackendKwargsError, BrokenPluginError
from backend_kwargs.registry import make_backend

IMPORT = "import backend_kwargs as bk"


def lines_to_paste(backend: Backend) -> list[str]:
    """Return the lines that compile `model` under `backend`; none where no text stands for it."""
    if name := _name_for_dynamo(backend):
        return [f'torch.compile(model, backend="{name}")']
    written = _written(backend)
    return [IMPORT, "", f"torch.compile(model, backend={written})"] if written else []


def _name_for_dynamo(backend: Backend) -> str:
    """Return what torch.compile takes as text, "" where it takes none or would find another backend by it."""
    name = backend.spec
    if repr(backend) != f"make_backend({name!r})":
        return ""
    if name == "inductor":  # the same, though dynamo's own object
        return name
    try:
        return name if find_in_dynamo(name) == backend else ""
    except BrokenPluginError:
        return ""


def _written(backend: Backend) -> str:
    """Return the expression of `bk` that makes `backend`, "" where a value's repr is no expression."""
    try:
        made = eval(repr(backend), {"make_backend": make_backend})  # noqa: S307 - of our own making
    except (BackendKwargsError, SyntaxError, NameError):
        return ""
    return f"bk.{backend!r}" if made == backend else ""
