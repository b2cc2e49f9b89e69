"""A compiled module ready to be called: by torch.compile, with its own code object."""

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch

from backend_kwargs.bundles.config import CompileConfig
from backend_kwargs.bundles.graphs import Graph, GraphBackend
from backend_kwargs.bundles.samples import InputCheck, Metadata, sizes_differ
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts import Call
from backend_kwargs.files import temporary
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.modes import set_grad_enabled

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


def first_output_dtypes(config: CompileConfig, plain: object) -> Dtypes:
    """Return the dtype to which each output of the first sample is cast, None for no cast; () if there are no casts."""
    if config.output_dtype is None and not config.autocast_enabled:
        return ()
    leaves = pytree.tree_leaves(plain)
    floating = [leaf.dtype if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else None for leaf in leaves]
    return tuple(dtype and (config.output_dtype or dtype) for dtype in floating)


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
