"""What several commands take."""

from typing import Annotated

import typer

from backend_kwargs.errors import wrong_value

Device = Annotated[str | None, typer.Option(help="Where to run; a GPU where there is one.")]


def device_of(named: str | None) -> str:
    """Return the device that is named, else a GPU where there is one; raise where there is none such."""
    import torch

    there = torch.cuda.is_available()
    if named and named != "cpu" and not (named.split(":")[0] == "cuda" and there):
        raise wrong_value("--device", "'cpu'" + (" or 'cuda'" if there else "; no GPU is visible"), named)
    return named or ("cuda" if there else "cpu")
