"""Models by name from transformers and timm, made from their configurations with random weights."""

import ast
import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl

import torch
from torch import Tensor, nn

from backend_kwargs.errors import BackendKwargsError, error_text, unknown
from backend_kwargs.torch_internals import pytree
from backend_kwargs.trial.generators import SEED

T = TypeVar("T")
Config: TypeAlias = Any  # of transformers: each class of models has its own
BATCH, TOKENS, SAMPLES, IMAGE = 8, 128, 16_000, 224
Inputs = tuple[Any, ...] | Mapping[str, Any]
_torchvision: list[torch.library.Library] = []  # its operators exist only as long as the library object


def named_model(spec: str, sizes: Mapping[str, int] | None = None) -> tuple[nn.Module, Inputs]:
    """Return the model that `spec` names and its inputs; `sizes`, such as batch and tokens, override those in `spec`.

    "transformers:CLASS?..." creates the class from its configuration with the given options; "timm:NAME?..." calls
    timm.create_model. Both have random weights, and nothing is downloaded.
    """
    library, _, rest = spec.partition(":")
    name, _, query = rest.partition("?")
    return LIBRARIES[library](name, {**options_of(query), **(sizes or {})})


class Tensors(nn.Module):
    """A transformers model called with keywords, which returns only the tensors of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: object) -> tuple[Tensor, ...]:
        """Call the model."""
        return tuple(leaf for leaf in pytree.tree_leaves(self.model(**inputs)) if isinstance(leaf, Tensor))


def imported(package: str) -> ModuleType:
    """Import an optional package; raise BackendKwargsError if that fails."""
    _declare_torchvision()
    try:
        return importlib.import_module(package)
    except Exception as error:  # another library may raise anything
        raise BackendKwargsError(
            f"Cannot import {package!r}: {error_text(error)}. Try: pip install {package}"
        ) from error


def _declare_torchvision() -> None:
    """Declare the operators that `import torchvision` needs, if its own were built for another torch.

    timm imports torchvision, and no classifier calls these operators.
    """
    spec = find_spec("torchvision")
    if _torchvision or spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(Path(spec.origin).parent / "_C.so")  # type: ignore[no-untyped-call]
    except OSError:
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _torchvision.append(library)


def options_of(query: str) -> dict[str, Any]:
    """Parse "name=value&name=value"."""
    return {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}


def _value(text: str) -> object:
    """Parse a value of Python or JSON; anything else is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "null": None}.get(text, text)


def _of_transformers(name: str, options: dict[str, Any]) -> tuple[nn.Module, Inputs]:
    """Return a model of transformers with random weights, and its inputs."""
    transformers = imported("transformers")
    kind: Any = getattr(transformers, name, None)
    config_class = getattr(kind, "config_class", None)
    if config_class is None:
        # By their names, since a look at each class would import them all.
        models = {each for each in dir(transformers) if "Model" in each or "For" in each}
        raise unknown("model of transformers", name, {each for each in models - {name} if not each.startswith("Auto")})
    batch, tokens = options.pop("batch", BATCH), options.pop("tokens", TOKENS)
    config = config_class()
    for option in options:
        if not hasattr(config, option):
            raise unknown(f"option of {config_class.__name__}", option, ["batch", "tokens", *config.to_dict()])
    # A cache of keys and values is not an output to compare.
    config = config_class(**{"use_cache": False, **options})
    model = _tried(f"The model {name}", lambda: kind(config))
    return model, _tried(f"Inputs for {name}", lambda: _inputs(kind.main_input_name, config, batch, tokens))


def _inputs(main: str, config: Config, batch: int, tokens: int) -> dict[str, Tensor]:
    """Return a model's inputs by name."""
    inputs = {main: INPUTS[main](config, batch, tokens)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _tokens(config, batch, tokens)
    return inputs


def _generator() -> torch.Generator:
    """Return a generator for inputs, which draws none of the caller's numbers."""
    return torch.Generator().manual_seed(SEED)


def _tokens(config: Config, batch: int, tokens: int) -> Tensor:
    return torch.randint(config.vocab_size, (batch, tokens), generator=_generator())


def _pixels(config: Config, batch: int, tokens: int) -> Tensor:
    size = getattr(config, "image_size", IMAGE)
    high, wide = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, config.num_channels, high, wide, generator=_generator())


INPUTS: Mapping[str, Callable[[Config, int, int], Tensor]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_values": lambda config, batch, tokens: torch.randn(batch, SAMPLES, generator=_generator()),
    "input_features": lambda config, batch, tokens: torch.randn(
        batch, config.num_mel_bins, 2 * config.max_source_positions, generator=_generator()
    ),
}


def _of_timm(name: str, options: dict[str, Any]) -> tuple[nn.Module, Inputs]:
    """Return a model of timm with random weights, and an image batch."""
    timm = imported("timm")
    if not timm.is_model(name):
        raise unknown("model of timm", name, timm.list_models())
    batch = options.pop("batch", BATCH)
    model = _tried(f"The model {name}", lambda: timm.create_model(name, pretrained=False, **options))
    channels, *size = model.pretrained_cfg["input_size"]
    size = [options.get("img_size", side) for side in size]
    return model, (torch.randn(batch, options.get("in_chans", channels), *size, generator=_generator()),)


def _tried(what: str, make: Callable[[], T]) -> T:
    """Return what `make` makes; raise its error as one line."""
    try:
        return make()
    except Exception as error:  # another library may raise anything
        raise BackendKwargsError(
            f"{what} cannot be created: {error_text(error)}. Write a factory and pass FILE:FACTORY."
        ) from error


LIBRARIES: Mapping[str, Callable[[str, dict[str, Any]], tuple[nn.Module, Inputs]]] = {
    "transformers": _of_transformers,
    "timm": _of_timm,
}
