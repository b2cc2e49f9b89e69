"""Arguments that several commands share."""

from typing import Annotated

import typer

from backend_kwargs.errors import wrong_value

Device = Annotated[str | None, typer.Option(help="Where to run; default: a GPU if there is one.")]
Shard = Annotated[str, typer.Option(metavar="I/N", help="Every N-th group, from the I-th.")]


def device_of(named: str | None) -> str:
    """Return the named device, else a GPU if there is one; raise if the device does not exist."""
    import torch

    there = torch.cuda.is_available()
    if named and named != "cpu" and not (named.split(":")[0] == "cuda" and there):
        raise wrong_value("--device", "'cpu'" + (" or 'cuda'" if there else "; no GPU is visible"), named)
    return named or ("cuda" if there else "cpu")


def shard_of(text: str) -> tuple[int, int]:
    """Return I and N of "I/N"."""
    at, _, of = text.partition("/")
    if not (at.isdecimal() and of.isdecimal() and 1 <= int(at) <= int(of)):
        raise wrong_value("--shard", "I/N, from 1/N to N/N", text)
    return int(at), int(of)
