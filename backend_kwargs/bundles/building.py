"""Building: compile a copy of the module on its samples, and compare its results with higher precision's."""

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.types import Device

from backend_kwargs.bundles.config import CompileConfig
from backend_kwargs.bundles.running import (
    Built,
    Dtypes,
    Running,
    entry,
    first_output_dtypes,
    import_compiler,
    running,
    without_gradients,
)
from backend_kwargs.bundles.samples import Sample, described, samples_of
from backend_kwargs.errors import BackendKwargsError, error_text, warn_once, wrong_value
from backend_kwargs.facts import Call
from backend_kwargs.torch_internals.tensors import counted_writes
from backend_kwargs.trial import Expected, Results, copies, map_tensors, roundings, status_of, walk

PLAIN_COPIES = partial(copies, plain=True)  # a graph's key has which inputs require gradients


class FailedModuleError(BackendKwargsError, RuntimeError):
    """The module raised an error, in eager or compiled; that error is the cause."""


def build(config: CompileConfig, module: torch.nn.Module, data: object, device: Device) -> tuple[Built, Running]:
    """Compile `module` for the samples `data`, without changes to it, its inputs and the random roundings.

    A copy is run, once for each sample in order, since the module may keep state between calls. The copy shares the
    module's parameters, so that they are not in memory twice.
    """
    if not isinstance(module, torch.nn.Module):
        raise wrong_value("build's `module`", "a torch.nn.Module", module)
    samples = samples_of(data)
    metadata = [described(tuple(sample)) for sample in samples]
    where = device_of(module, device)
    import_compiler()
    with roundings.kept(where), torch.no_grad():
        wanted, dtypes, changed = _eager(config, module, samples, where)
        built = Built(config, module, where, metadata, dtypes)
        bound = _compiled(built, samples, wanted, parameters=changed)
    built.notes += [f"a graph's code is not in the bundle: {graph.why}" for graph in built.graphs.values() if graph.why]
    return built, bound


def _compiled(built: Built, samples: Sequence[Sample], wanted: Expected | None, *, parameters: bool) -> Running:
    """Compile a copy of the module, and call and compare it for each sample; `parameters` says whether they change."""
    module = built.module
    twin = _copied(module, with_parameters=parameters)
    given = [*map(PLAIN_COPIES, samples)]
    began = time.perf_counter()

    def called() -> None:
        if built.cold_s is None:
            built.cold_s = time.perf_counter() - began

    compiled = running(built, twin, keep=True)
    try:
        call = without_gradients(compiled.call)
        seen = _seen(call, twin, given, parameters=parameters, compiled=True, called=called)
        if wanted is not None:
            _judge(built.config, module, seen, wanted)
    except BaseException:
        compiled.free()
        raise
    if not compiled.backend.compiled:
        note = "no graph of the module was compiled, so it runs in eager"
        built.notes.append(note)
        warn_once(f"{note[0].upper()}{note[1:]}: TORCH_LOGS=graph_breaks shows why.")
    # dynamo guards on the properties of a module, so code compiled for a copy with the module's parameters serves the
    # module too, whose state no call of the copy has changed.
    ours: Any = compiled.call
    compiled.call = partial(ours.func, module)
    return compiled


def _seen(
    call: Call,
    module: torch.nn.Module,
    samples: Iterable[Sample],
    *,
    parameters: bool,
    compiled: bool = False,
    called: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Call `call`, which runs `module`, with each sample; return the results, and the tensors that calls may change."""
    outputs: list[object] = []
    inputs: list[list[torch.Tensor]] = []
    for sample in samples:
        args, kwargs = sample
        try:
            # The next call may overwrite these results: a buffer, or the memory of a CUDA graph.
            outputs.append(map_tensors(torch.Tensor.clone, call(*args, **kwargs)))
        except BackendKwargsError:
            raise
        except (Exception, SystemExit) as error:  # the module's own, or its compiler's
            at = f"sample {len(outputs)}"
            what = f"cannot be compiled for {at}" if compiled else f"fails on {at} in eager"
            why = status_of(error)[1] if compiled else error_text(error)
            raise FailedModuleError(f"The module {what}: {why.removesuffix('.')}.") from error
        called()
        inputs.append([leaf for _, leaf in walk("", (args, kwargs)) if isinstance(leaf, torch.Tensor)])
    state = dict(module.named_buffers()) | (dict(module.named_parameters()) if parameters else {})
    return {"output": outputs, "input": inputs, "state": state}


def device_of(module: torch.nn.Module, device: Device) -> torch.device:
    """Return the device to run on: the module's, with which `device` must agree if it is given."""
    tensors = [*module.parameters(), *module.buffers()]
    here = {tensor.device for tensor in tensors}
    try:
        wanted = next(iter(here), torch.device("cpu")) if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise wrong_value("`device`", "a device such as 'cpu' or 'cuda:0'", device) from None
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", torch.cuda.current_device())
    if here - {wanted}:
        (other, *_) = here - {wanted}
        raise BackendKwargsError(
            f"The module must be on {wanted}, got one on {other}: call module.to('{wanted}') first."
        )
    return wanted


def _copied(module: torch.nn.Module, *, with_parameters: bool) -> torch.nn.Module:
    """Return a deep copy of the module, which shares its parameters unless they may change."""
    shared = {} if with_parameters else {id(parameter): parameter for parameter in module.parameters()}
    try:
        return copy.deepcopy(module, dict(shared))
    except Exception as error:
        raise BackendKwargsError(
            f"The module must be one that copy.deepcopy() can copy, got {error_text(error)}."
        ) from error


def _eager(
    config: CompileConfig, module: torch.nn.Module, samples: Sequence[Sample], device: torch.device
) -> tuple[Expected | None, Dtypes, bool]:
    """Return what eager gives and changes, the outputs' dtypes, and whether parameters change.

    Each run has its own copy of the module, since each must be a first call.
    """
    cast = config.autocast_enabled or config.output_dtype is not None
    if config.check_numbers == "off" and not cast:
        return None, (), False
    twin = _copied(module, with_parameters=True)
    versions = _versions(twin.named_parameters())
    seen = _seen(twin, twin, map(PLAIN_COPIES, samples), parameters=False)
    if changed := versions != _versions(twin.named_parameters()):
        seen["state"] |= dict(twin.named_parameters())
    dtypes = first_output_dtypes(config, seen["output"][0])
    if config.check_numbers == "off":
        return None, dtypes, changed

    def again() -> dict[str, Any]:
        twin = _copied(module, with_parameters=True)
        function = partial(entry(config, device, dtypes, "eager"), twin) if cast else twin
        return _seen(function, twin, map(PLAIN_COPIES, samples), parameters=changed)

    del twin
    if cast:
        seen = again()
    run = lambda wide, inputs: _seen(wide, wide, inputs, parameters=changed)  # noqa: E731
    return Expected.of(seen, again, module, list(map(tuple, samples)), run), dtypes, changed


def _versions(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, int, int]]:
    """Return what changes if one of the tensors is replaced or written to."""
    return [(name, id(tensor), counted_writes(tensor)) for name, tensor in tensors]


def _judge(config: CompileConfig, module: torch.nn.Module, seen: Results, wanted: Expected) -> None:
    """Raise or warn if compiled results are not right."""
    permitted = config.resolved.options
    max_error = permitted.get("max_error") if permitted.get("precision") else None
    if (verdict := wanted.check(seen, max_error, tol=config.tolerance)).passed:
        return
    hint = " It is in training mode: call module.eval()." if module.training else ""
    message = f"The compiled module gives other results: {verdict.reason}.{hint}"
    if config.check_numbers == "raise":
        raise BackendKwargsError(f"{message} To build it anyway, set check_numbers='warn'.")
    warn_once(message)
