"""Write a lock: race a model, compile it with all timing noted, and see that the lock gives the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend_kwargs.backend import Backend
from backend_kwargs.errors import BackendKwargsError, wrong_value
from backend_kwargs.facts import PINNED
from backend_kwargs.files import check_writable
from backend_kwargs.progress import progress
from backend_kwargs.registry import make_backend

AUTO = "tmpl-inductor:auto"


def pin(
    model: Callable[..., Any],
    example_inputs: object,
    *,
    lock: str | Path,
    backend: str | Backend = AUTO,
    dynamic: bool | None = None,
    add: bool = False,
) -> Backend:
    """Write what timing chooses for `model` into the file `lock`; return the backend that serves by it.

    `example_inputs` are the arguments of a call: a tensor, a list or tuple of arguments, which may end with a dict of
    keywords, or such a dict. A copy is called as in a fresh process: forward and, where gradients are recorded,
    backward. Nothing of the caller's changes, what a function holds included. `auto` races its graphs first
    unless its store has decisions. `dynamic` is `torch.compile`'s. A file that is there is replaced, or with `add`
    keeps what it has and gets what it lacks; in either case once two compiles by the new one gave the same bits.
    """
    if not callable(model):
        raise wrong_value("model", "a module or a function", model)
    if not isinstance(lock, str | Path):
        raise wrong_value("lock", "a path", lock)
    served = make_backend(backend).bind("pin", {"reproducible": PINNED, "lock": str(lock)})
    check_writable(Path(lock))
    served.verify()
    from backend_kwargs.pinning.phases import write
    from backend_kwargs.trial.failures import chain_of

    try:
        with progress("pin", "starting") as tell:
            write(Path(lock), model, example_inputs, served, dynamic, tell, add=add)
    except Exception as error:
        # torch wraps what is raised while it compiles.
        ours = next((each for each in chain_of(error) if isinstance(each, BackendKwargsError)), None)
        if ours is None:
            raise
        raise type(ours)(str(ours)) from error
    return served
