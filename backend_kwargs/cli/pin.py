"""`backend-kwargs pin`: write what timing chooses for a model into a file that can be committed."""

from pathlib import Path
from typing import Annotated

import typer

from backend_kwargs.cli.console import Assignments, Model, assigned, backend_from_text, say
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.harness.models import model_of, with_cause
from backend_kwargs.pinning import AUTO, pin


def show(
    model: Model,
    lock: Annotated[Path, typer.Option("--lock", metavar="FILE", help="The file to write.")],
    backend: Annotated[str, typer.Option("--backend", help="The backend to pin.")] = AUTO,
    option: Assignments = None,
    train: Annotated[bool, typer.Option("--train", help="Pin the backward pass too.")] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Pin code for sizes that vary.")] = False,
    add: Annotated[bool, typer.Option("--add", help="Keep what FILE has, and add what it lacks.")] = False,
) -> None:
    """Race a model, and write what timing chose into a lock, under which nothing is timed."""
    import torch

    module, inputs = model_of(model)
    if isinstance(module, torch.nn.Module):
        module.train(train)
    with torch.set_grad_enabled(train):
        chosen = backend_from_text(backend, assigned(option))
        try:
            served = pin(module, inputs, lock=lock, backend=chosen, dynamic=dynamic or None, add=add)
        except BackendKwargsError:
            raise
        except Exception as error:  # of the model
            raise BackendKwargsError(f"{model} cannot be pinned: {with_cause(error)}.") from error
    say(f"{lock} is written. Commit it, and serve with:", "")
    sizes = ", dynamic=True" if dynamic else ""
    say("import backend_kwargs as bk", f"torch.compile(model, backend=bk.{served!r}{sizes})")
