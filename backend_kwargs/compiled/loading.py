"""Loading saved weights and metadata: all of it, or an error and no change."""

from collections.abc import Mapping
from typing import Any

import torch

from backend_kwargs.compiled.building import device_of
from backend_kwargs.compiled.config import CompileConfig
from backend_kwargs.compiled.graphs import Folder
from backend_kwargs.compiled.running import Built
from backend_kwargs.errors import BackendKwargsError, shown

SHOWN = 3  # names in an error


def loaded_from(config: CompileConfig, module: torch.nn.Module, state: Mapping[str, Any]) -> Built:
    """Load the module state of a `to_dict()` and return the built module's data."""
    try:
        samples, weights = list(state["samples"]), state["module"]
        dtypes = dtypes_of(state["output_dtypes"])
        device = device_of(module, None)
    except (KeyError, TypeError, AttributeError) as error:
        raise BackendKwargsError(f"A state must be what to_dict() gave; it lacks {shown(error)}.") from None
    load_weights(module, weights)
    folder = Folder()
    return Built(config, module, device, samples, dtypes, folder.path, keep_alive=folder)


def dtypes_of(names: Any) -> tuple[torch.dtype | None, ...]:
    """Return dtypes by their names, None for None."""
    return tuple(None if name is None else getattr(torch, name.removeprefix("torch.")) for name in names)


def load_weights(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into the module; raise, with nothing copied, unless all names, shapes and dtypes match its own."""
    state = module.state_dict()
    for what, names in (("lack", state.keys() - weights.keys()), ("have unknown", weights.keys() - state.keys())):
        if names:
            some = ", ".join(map(repr, sorted(names)[:SHOWN]))
            raise BackendKwargsError(f"The saved weights {what} {some}: load them into a module of the same kind.")
    for name, own in state.items():
        saved = weights[name]
        if not isinstance(own, torch.Tensor):
            continue
        if (saved.shape, saved.dtype) != (own.shape, own.dtype):
            raise BackendKwargsError(
                f"Saved weight {name!r} is {saved.dtype} {list(saved.shape)}, the module's is {own.dtype} "
                f"{list(own.shape)}."
            )
    module.load_state_dict(dict(weights), strict=True)
