"""The model of a command: one of a library by name, or the result of the user's factory."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from backend_kwargs.errors import BackendKwargsError, wrong_value
from backend_kwargs.harness.modules import (
    check_defines,
    file_of,
    folder_of,
    importable,
    imported,
    no_function,
    with_cause,
)

LIBRARIES = ("transformers", "timm")


def model_of(spec: str, sizes: Mapping[str, int] | None = None) -> tuple[Any, Any]:
    """Return (model, example_inputs) of "timm:NAME", "transformers:CLASS?option=value" or a factory, in eval mode.

    `sizes` go to the model's name as its options, and to a factory as keyword arguments.
    """
    if spec.partition(":")[0] not in LIBRARIES:
        return built(spec, **(sizes or {}))
    from backend_kwargs.harness.named_models import Tensors, named_model

    model, inputs = named_model(spec, sizes)
    return (Tensors(model) if isinstance(inputs, Mapping) else model).eval(), inputs


def folder_of_model(spec: str) -> str:
    """Return the folder that comes first on the import path of a model's module."""
    return folder_of("" if spec.partition(":")[0] in LIBRARIES else split_factory(spec)[0])


def built(factory: str, **sizes: int) -> tuple[Any, Any]:
    """Return the factory's result: (model, example_inputs)."""
    where, name = check_factory(factory)
    with importable(folder_of(where)):
        module = imported(where)
        build: Any = getattr(module, name, None)
        if not callable(build):
            raise no_function(where, name, vars(module))
        _check_takes(factory, build, sizes)
        try:
            result = build(**sizes)
        except (Exception, SystemExit) as error:  # the user's own code
            raise BackendKwargsError(f"Factory {factory!r} failed: {with_cause(error)}.") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise wrong_value(f"The result of factory {factory!r}", "(model, example_inputs)", result)
    if not callable(result[0]):
        raise wrong_value(f"The model of factory {factory!r}", "a module or a function", result[0])
    return result


def split_factory(factory: str) -> tuple[str, str]:
    """Split "FILE_OR_MODULE:FACTORY" into its two parts; raise if it has another form."""
    where, colon, name = factory.rpartition(":")
    if not colon or not where or not name:
        raise BackendKwargsError(
            f"FACTORY must be 'package.module:function' or 'file.py:function', got {factory!r}: write a function that "
            "returns (model, example_inputs), such as build in my_model.py, and pass my_model.py:build."
        )
    return where, name


def check_factory(factory: str) -> tuple[str, str]:
    """Return the two parts; raise if there is surely no such file or function, before anything is imported."""
    where, name = split_factory(factory)
    if file := file_of(where):
        check_defines(file, name)
    return where, name


def _check_takes(factory: str, build: Callable[..., object], sizes: Mapping[str, int]) -> None:
    """Raise if the factory does not take these sizes."""
    try:
        inspect.signature(build).bind(**sizes)
    except TypeError:
        if sizes:
            wanted = ", ".join(sizes)
            raise BackendKwargsError(
                f"Factory {factory!r} must take {wanted} as keyword arguments for --shapes: def build({wanted}=1)."
            ) from None
    except ValueError:  # some callables written in C have no signature
        return
