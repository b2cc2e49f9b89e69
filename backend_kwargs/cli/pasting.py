"""The lines of code that compile with a backend, and that call the model as it was timed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import backend_kwargs
from backend_kwargs.backend import Backend, find_in_dynamo
from backend_kwargs.errors import BackendKwargsError, BrokenPluginError

IMPORT = "import backend_kwargs as bk"


@dataclass(frozen=True, slots=True)
class Timed:
    """How a model was called: `state` is what was done to it, `call` the expression that calls `compiled`.

    `grad` is whether gradients were recorded.
    """

    state: str
    call: str
    grad: bool

    @classmethod
    def of(cls, model: Any, example_inputs: object, *, training: bool, device: str | None) -> "Timed":
        """Return how `compare` calls a factory's model: in eval mode without gradients, or in training."""
        import torch

        stars = "**" if isinstance(example_inputs, Mapping) else "*"
        call = f"compiled({'' if isinstance(example_inputs, torch.Tensor) else stars}example_inputs)"
        if not isinstance(model, torch.nn.Module):
            return cls("", call, training)
        tensors = [*model.parameters(), *model.buffers()]
        place = {device} if device else {str(tensor.device) for tensor in tensors}
        dtypes = {str(tensor.dtype) for tensor in tensors if tensor.is_floating_point()}
        # Several devices or dtypes are the factory's own choice: to() would change them.
        moved = [*map(repr, place if len(place) == 1 else ()), *(dtypes if len(dtypes) == 1 else ())]
        to = f".to({', '.join(moved).replace(chr(39), chr(34))})" if moved else ""
        return cls(f"model.{'train' if training else 'eval'}(){to}", call, training)


def lines_to_paste(backend: Backend, timed: Timed | None = None) -> list[str]:
    """Return the lines that compile `model` with `backend`, and call it as it was timed.

    There are none if the backend cannot be written as text.
    """
    if not (compiles := _compiles(backend)):
        return []
    ours = [IMPORT, ""] if "bk." in compiles else []
    if timed is None:
        return [*ours, compiles]
    return [*ours, *_as_timed(timed, compiles)]


def _as_timed(timed: Timed, compiles: str) -> Iterator[str]:
    if timed.state:
        yield f"model = {timed.state}"
    yield f"compiled = {compiles}"
    if timed.grad:
        yield timed.call
    else:
        yield from ("with torch.no_grad():", f"    {timed.call}")


def _compiles(backend: Backend) -> str:
    """Return the expression that compiles `model` with `backend`, "" if it cannot be written."""
    if name := _name_for_dynamo(backend):
        return f'torch.compile(model, backend="{name}")'
    written = _written(backend)
    return f"torch.compile(model, backend={written})" if written else ""


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
    written = pasted(f"bk.{backend!r}")
    try:
        read_back = eval(written, {"bk": backend_kwargs})  # noqa: S307 - the repr is our own
    except (BackendKwargsError, SyntaxError, NameError):
        return ""
    return written if read_back == backend else ""


def pasted(expression: str) -> str:
    """Return an expression with `bk.` before each Store."""
    return re.sub(r"\bStore\(", "bk.Store(", expression)
