"""Arguments that several commands share."""

from typing import Annotated

import typer

from backend_kwargs.errors import wrong_value

Device = Annotated[str | None, typer.Option(help="Where to run; default: a GPU if there is one.")]


def device_of(named: str | None) -> str:
    """Return the named device, else a GPU if there is one; raise if the device does not exist."""
    import torch

    there = torch.cuda.is_available()
    if named and named != "cpu" and not (named.split(":")[0] == "cuda" and there):
        raise wrong_value("--device", "'cpu'" + (" or 'cuda'" if there else "; no GPU is visible"), named)
    return named or ("cuda" if there else "cpu")
