"""Cases of models that a user names: from transformers and timm by their configurations, or from a factory."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backend_kwargs.errors import wrong_value
from backend_kwargs.harness.models import built
from backend_kwargs.harness.named_models import LIBRARIES, named_model
from backend_kwargs.trial.trees import moved
from benchmarks.workloads.case import Case, Mode, Problem
from benchmarks.workloads.cases.models import ADAMW
from benchmarks.workloads.nets.libraries import Called

FORMS = "'transformers:CLASS?option=value', 'timm:NAME?option=value' or 'FILE:FACTORY'"


def model_case(spec: str, mode: Mode = "fwd") -> Case:
    """Return the case of the model that `spec` names; the same text gives the same model in each process.

    transformers:CLASS?... builds the class from its configuration with the given options, timm:NAME?... calls
    timm.create_model; both with random weights, without a download. `batch`, and for texts `tokens`, size the inputs.
    FILE:FACTORY or MODULE:FACTORY is as in `backend-kwargs compare`. Models run in eval mode in every mode, since
    dropout would differ between peers.
    """
    _, colon, rest = spec.partition(":")
    if not colon or not rest:
        raise wrong_value("A model", FORMS, spec)
    make = partial(named_model, spec) if spec.partition(":")[0] in LIBRARIES else partial(built, spec)
    return Case(spec, "user", partial(_problem, make), modes=(mode,))


def _problem(make: Callable[[], tuple[Any, Any]], device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    with device:
        model, inputs = make()
    names = tuple(inputs) if isinstance(inputs, Mapping) else ()
    values = tuple(inputs.values()) if names else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    fn = Called(model, names).to(device, dtype).eval()
    return Problem(fn, moved(values, device, dtype), optimizer=ADAMW)
