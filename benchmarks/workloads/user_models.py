"""Cases of models that a user names: of transformers and timm by their configurations, or by a factory."""

import ast
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from backend_kwargs import BackendKwargsError
from backend_kwargs.cli.compare import built
from backend_kwargs.errors import error_text, unknown, wrong_value
from benchmarks.workloads.case import Case, Mode, Problem
from benchmarks.workloads.cases.models import ADAMW
from benchmarks.workloads.nets.libraries import Called, imported

FORMS = "'transformers:CLASS?option=value', 'timm:NAME?option=value' or 'FILE:FACTORY'"
BATCH, TOKENS, SAMPLES, IMAGE = 8, 128, 16_000, 224
Inputs = tuple[Any, ...] | Mapping[str, Any]


def model_case(spec: str, mode: Mode = "fwd") -> Case:
    """Return the case of the model that `spec` names; the same text gives the same model in each process.

    transformers:CLASS?... builds the class from its configuration with the given options, timm:NAME?... calls
    timm.create_model; both with random weights, without a download. `batch`, and for texts `tokens`, size the inputs.
    FILE:FACTORY or MODULE:FACTORY is as in `backend-kwargs compare`. Models run in eval mode in every mode, since
    dropout would differ between peers.
    """
    library, colon, rest = spec.partition(":")
    if not colon or not rest:
        raise wrong_value("A model", FORMS, spec)
    name, _, query = rest.partition("?")
    make = partial(LIBRARIES[library], name, _options(query)) if library in LIBRARIES else partial(built, spec)
    return Case(spec, "user", partial(_problem, make), modes=(mode,))


def _problem(make: Callable[[], tuple[Any, Any]], device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    with device:
        model, inputs = make()
    names = tuple(inputs) if isinstance(inputs, Mapping) else ()
    values = tuple(inputs.values()) if names else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    fn = Called(model, names).to(device, dtype).eval()
    return Problem(
        fn, pytree.tree_map_only(Tensor, partial(_moved, device=device, dtype=dtype), values), optimizer=ADAMW
    )


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def _options(query: str) -> dict[str, Any]:
    return {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "null": None}.get(text, text)


def _of_transformers(name: str, options: dict[str, Any]) -> tuple[nn.Module, Inputs]:
    transformers = imported("transformers")
    kind = getattr(transformers, name, None)
    config_class = getattr(kind, "config_class", None)
    if config_class is None:
        raise unknown("model of transformers", name, set(_classes(transformers)) - {name})
    batch, tokens = options.pop("batch", BATCH), options.pop("tokens", TOKENS)
    config = config_class()
    for option in options:
        if not hasattr(config, option):
            raise unknown(f"option of {config_class.__name__}", option, ["batch", "tokens", *config.to_dict()])
    # A cache of keys and values is not an output by which peers could be compared.
    config = config_class(**{"use_cache": False, **options})
    model = _tried(f"The model {name}", lambda: kind(config))
    return model, _tried(f"Inputs for {name}", lambda: _inputs(kind.main_input_name, config, batch, tokens))


def _classes(transformers: Any) -> list[str]:
    """Return the names of models; looking at each class would import them all."""
    return [name for name in dir(transformers) if ("Model" in name or "For" in name) and not name.startswith("Auto")]


def _inputs(main: str, config: Any, batch: int, tokens: int) -> dict[str, Tensor]:
    given = {main: INPUTS[main](config, batch, tokens)}
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = _tokens(config, batch, tokens)
    return given


def _tokens(config: Any, batch: int, tokens: int) -> Tensor:
    return torch.randint(config.vocab_size, (batch, tokens))


def _pixels(config: Any, batch: int, tokens: int) -> Tensor:
    size = getattr(config, "image_size", IMAGE)
    high, wide = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, config.num_channels, high, wide)


INPUTS: Mapping[str, Callable[[Any, int, int], Tensor]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_values": lambda config, batch, tokens: torch.randn(batch, SAMPLES),
    "input_features": lambda config, batch, tokens: torch.randn(
        batch, config.num_mel_bins, 2 * config.max_source_positions
    ),
}


def _of_timm(name: str, options: dict[str, Any]) -> tuple[nn.Module, Inputs]:
    timm = imported("timm")
    if not timm.is_model(name):
        raise unknown("model of timm", name, timm.list_models())
    batch = options.pop("batch", BATCH)
    model = _tried(f"The model {name}", lambda: timm.create_model(name, pretrained=False, **options))
    channels, *size = model.pretrained_cfg["input_size"]
    size = [options.get("img_size", side) for side in size]
    return model, (torch.randn(batch, options.get("in_chans", channels), *size),)


def _tried(what: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:  # another library's own
        raise BackendKwargsError(f"{what} cannot be made: {error_text(error)}. A FILE:FACTORY can.") from error


LIBRARIES: Mapping[str, Callable[[str, dict[str, Any]], tuple[nn.Module, Inputs]]] = {
    "transformers": _of_transformers,
    "timm": _of_timm,
}
