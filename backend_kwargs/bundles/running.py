"""Build a module: compile it on its samples, and check the results; and run it once it is built."""

import copy
import itertools
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.types import Device

from backend_kwargs.bundles.config import CompileConfig
from backend_kwargs.bundles.graphs import Graph, GraphBackend
from backend_kwargs.bundles.samples import InputCheck, Metadata, Sample, described, samples_of, sizes_differ
from backend_kwargs.errors import BackendKwargsError, error_text, warn_once, wrong_value
from backend_kwargs.facts import Call
from backend_kwargs.files import temporary
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.tensors import counted_writes, set_grad_enabled
from backend_kwargs.trial import Expected, Results, copies, generators, map_tensors, status_of, walk

Dtypes = Sequence[torch.dtype | None]
# Guards on global state, which dynamo checks at each call: gradient mode, autocast, threads, and the like.
GLOBAL_GUARDS = ("GLOBAL_STATE", "GRAD_MODE")
_numbers = itertools.count()


@dataclass
class Built:
    """The data of a module that was built or loaded: everything that `running` needs to run it."""

    config: CompileConfig
    module: torch.nn.Module
    device: torch.device
    samples: list[Metadata]
    output_dtypes: Dtypes
    graphs: dict[str, Graph] = field(default_factory=dict)
    cold_s: float | None = None
    notes: list[str] = field(default_factory=list)
    # The end of the name of the folder from which code is loaded: a module of code is known to torch by its path.
    unpacked: str = field(default_factory=partial(secrets.token_hex, 8))

    @property
    def dynamic(self) -> bool | None:
        """Return torch.compile's `dynamic`: the config's value, else True if the samples' sizes differ."""
        return self.config.dynamic if self.config.dynamic is not None else sizes_differ(self.samples) or None


@dataclass
class Running:
    """A callable, and what to free with it."""

    call: Call
    backend: GraphBackend
    check: InputCheck | None = None  # of each call, once it is deployed

    def free(self) -> None:
        """Free this compiled code, and no other; nothing calls it any more."""
        del self.call
        self.backend.forget()


def import_compiler() -> None:
    """Import torch's compilers, which takes seconds that are not part of a compile."""
    temporary()
    from backend_kwargs.torch_internals import compile_fx, dynamo  # noqa: F401 - for what they import


def entry(config: CompileConfig, device: torch.device, output_dtypes: Dtypes, name: str) -> FunctionType:
    """Return the function `(module, *args, **kwargs)` to compile, with a code object that nothing else uses.

    dynamo stores compiled code on the code object: otherwise two modules of one class would share a cache and its limit
    of recompiles, and could only be freed together.
    """
    enabled, dtype, where = config.autocast_enabled, config.autocast_dtype, device.type

    def plain(module: torch.nn.Module, /, *args: object, **kwargs: object) -> object:
        return module(*args, **kwargs)

    # Traced with the module, so that autocast and casts cost nothing per call.
    def cast(module: torch.nn.Module, /, *args: object, **kwargs: object) -> object:
        with torch.autocast(where, dtype=dtype, enabled=enabled):
            result = module(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(result)
        pairs = itertools.zip_longest(leaves, output_dtypes[: len(leaves)])
        return pytree.tree_unflatten([leaf if to is None else leaf.to(to) for leaf, to in pairs], structure)

    call: Any = cast if enabled or any(output_dtypes) else plain
    # Its own name too, since dynamo remembers by file, line and name which sizes varied; decisions show the second.
    code = call.__code__.replace(co_name=f"compiled_{name}_{next(_numbers)}", co_qualname=name)
    return FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


def running(built: Built, module: torch.nn.Module, *, keep: bool, deployed: bool = False) -> Running:
    """Return `module` compiled, or its code from the bundle; it is compiled at its first call.

    A `deployed` one has no guards on global state.
    """
    config = built.config
    function = entry(config, built.device, built.output_dtypes, type(module).__name__)
    backend = GraphBackend(config.resolved, built.graphs, keep=keep, folder=built.unpacked)
    without_global = lambda entries: [each.guard_type not in GLOBAL_GUARDS for each in entries]  # noqa: E731
    compiled = torch.compile(
        function,
        backend=backend,
        fullgraph=config.fullgraph,
        dynamic=built.dynamic,
        options={"guard_filter_fn": without_global} if deployed else None,
    )
    return Running(partial(compiled, module), backend)


def without_gradients(call: Call) -> Call:
    """Return `call` under torch.no_grad(), at a tenth of that context manager's cost."""
    enabled, switch = torch.is_grad_enabled, set_grad_enabled

    def infer(*args: object, **kwargs: object) -> object:
        if not enabled():
            return call(*args, **kwargs)
        switch(False)
        try:
            return call(*args, **kwargs)
        finally:
            switch(True)

    return infer


def in_eager(built: Built) -> Call:
    """Return what runs the module in eager as its compiled code does, without gradients."""
    function = entry(built.config, built.device, built.output_dtypes, "eager")
    return without_gradients(partial(function, built.module))


# ---- deploying: the callable with the least overhead for serving, and facts about it

SHARED_POOL = (
    "CUDA graphs: modules on one device share torch's memory pool, which is freed when the last of them is deactivated"
)


def deployed(built: Built) -> tuple[Running, Call]:
    """Return what runs, and what to call: its inputs are checked against the samples; dynamo's guards compare the rest.

    No call records a gradient, whenever it compiles or runs in eager.
    """
    ready = running(built, built.module, keep=False, deployed=True)
    ready.check = check = InputCheck(built.samples, built.device, dynamic=bool(built.dynamic))
    call, otherwise = ready.call, in_eager(built) if built.config.unmatched == "eager" else None

    def serve(*args: object, **kwargs: object) -> object:
        try:
            check(args, kwargs)
        except BackendKwargsError:
            if otherwise is None:
                raise
            return otherwise(*args, **kwargs)
        return call(*args, **kwargs)

    return ready, without_gradients(serve)


def facts(built: Built, served: Running | None) -> list[str]:
    """Return facts about a built module's code, one per line."""
    lines = [f"samples: {len(built.samples)}{', dynamic sizes' if built.dynamic else ''}"]
    graphs = built.graphs.values()
    with_code = sum(bool(graph.code) for graph in graphs)
    decisions = [graph.decision for graph in graphs if graph.decision]
    decided = sum(bool(graph.decision and not graph.code) for graph in graphs)
    besides = f", and auto's decision alone for {decided}" if decided else ""
    lines.append(f"graphs held: {with_code} of {len(graphs)}{besides}")
    if served:
        loaded, compiled = len(served.backend.loaded), len(served.backend.compiled)
        lines.append(f"graphs loaded in this process: {loaded}, compiled: {compiled}")
    options = [built.config.resolved.options, *(decision["options"] for decision in decisions)]
    if served and built.device.type == "cuda" and any(each.get("triton.cudagraphs") for each in options):
        lines.append(SHARED_POOL)
    return lines + [f"note: {note}" for note in built.notes]


# ---- building: a copy is compiled on the samples, and its results are compared with higher precision's

PLAIN_COPIES = partial(copies, plain=True)  # a graph's key has which inputs require gradients


class FailedModuleError(BackendKwargsError, RuntimeError):
    """The module raised an error, in eager or compiled; that error is the cause."""


def build(config: CompileConfig, module: torch.nn.Module, data: object, device: Device) -> tuple[Built, Running]:
    """Compile `module` for the samples `data`, without changes to it, its inputs and the random generators.

    A copy is run, once for each sample in order, since the module may keep state between calls. The copy shares the
    module's parameters, so that they are not in memory twice.
    """
    if not isinstance(module, torch.nn.Module):
        raise wrong_value("build's `module`", "a torch.nn.Module", module)
    samples = samples_of(data)
    metadata = [described(tuple(sample)) for sample in samples]
    where = device_of(module, device)
    import_compiler()
    with generators.kept(where), torch.no_grad():
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
    compiled = running(built, twin, keep=True)
    infer = without_gradients(compiled.call)

    def timed(*args: object, **kwargs: object) -> object:
        result = infer(*args, **kwargs)
        built.cold_s = built.cold_s or time.perf_counter() - began
        return result

    try:
        seen = _seen(timed, twin, given, parameters=parameters, compiled=True)
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
    dtypes: Dtypes = ()
    if cast:  # the first sample's outputs; None where nothing is cast
        dtypes = tuple(
            (config.output_dtype or leaf.dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else None
            for leaf in pytree.tree_leaves(seen["output"][0])
        )
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
