"""The lines of code that compile with a backend."""

from backend_kwargs.backend import Backend, find_in_dynamo
from backend_kwargs.errors import BackendKwargsError, BrokenPluginError
from backend_kwargs.registry import make_backend

IMPORT = "import backend_kwargs as bk"


def lines_to_paste(backend: Backend) -> list[str]:
    """Return the lines that compile `model` with `backend`; none if it cannot be written as text."""
    if name := _name_for_dynamo(backend):
        return [f'torch.compile(model, backend="{name}")']
    written = _written(backend)
    return [IMPORT, "", f"torch.compile(model, backend={written})"] if written else []


def _name_for_dynamo(backend: Backend) -> str:
    """Return the name by which torch.compile finds this backend, "" if there is none."""
    name = backend.spec
    if repr(backend) != f"make_backend({name!r})":
        return ""
    if name == "inductor":  # equal in effect, although dynamo's is another object
        return name
    try:
        return name if find_in_dynamo(name) == backend else ""
    except BrokenPluginError:
        return ""


def _written(backend: Backend) -> str:
    """Return the expression that makes `backend`, "" if the repr of one of its values is not an expression."""
    try:
        read_back = eval(repr(backend), {"make_backend": make_backend})  # noqa: S307 - the repr is our own
    except (BackendKwargsError, SyntaxError, NameError):
        return ""
    return f"bk.{backend!r}" if read_back == backend else ""
