"""OpenVINO: the dynamo backend that OpenVINO provides, with checked options and reported fallbacks.

That backend hands a graph that it cannot compile to Inductor, and runs a partition that fails in eager. It logs both
below its loggers' level. The next call overwrites the memory of its partitions' results, so they are copied here.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Annotated, Any, ClassVar

from backend_kwargs.backends.declared import DeclaredCompiler
from backend_kwargs.errors import warn_once
from backend_kwargs.options.option import Option, declared
from backend_kwargs.options.requirements import CannotWorkError, Limit, Rule
from backend_kwargs.options.trust import OPENVINO_DATA
from backend_kwargs.torch_internals.replacing import replaced

BACKEND = "openvino.frontend.pytorch.torchdynamo.backend"
PARTITION = "fused_"  # the prefix of the names of OpenVINO's partitions
LOG = f"logging.getLogger({BACKEND!r}).setLevel(logging.DEBUG) makes OpenVINO log why"


@dataclass(frozen=True, slots=True)
class Settings:
    """Every option that OpenVINO documents for torch.compile, with its default."""

    device: Annotated[str, "where to run: CPU, GPU, GPU.0, NPU; one of openvino.Core().available_devices"] = "CPU"
    aot_autograd: Annotated[bool, "capture with AOTAutograd, for dynamic shapes, training and mutated inputs"] = False
    model_caching: Annotated[bool, "save compiled models to files, for later processes"] = False
    cache_dir: Annotated[str, "folder of the files that model_caching saves"] = "./cache"
    decompositions: Annotated[list[Callable[..., Any]], "more operators to decompose"] = field(default_factory=list)
    disabled_ops: Annotated[
        list[str | Callable[..., Any]], "operators to run in eager, such as torch.ops.aten.add.Tensor"
    ] = field(default_factory=list)
    config: Annotated[dict[str, Any], "OpenVINO's own properties, such as {'PERFORMANCE_HINT': 'LATENCY'}"] = field(
        default_factory=dict
    )


OPTIONS = declared(Settings, OPENVINO_DATA)


def _without_files(value: Callable[[str], Any]) -> str:
    return "" if value("model_caching") else "it is read only under model_caching=True"


@dataclass(frozen=True)
class OpenVINOCompiler(DeclaredCompiler):
    """The dynamo backend of the installed OpenVINO."""

    library: ClassVar[str] = "OpenVINO"
    registered: ClassVar[str] = "tmpl-openvino"  # "openvino" is the name that OpenVINO registers itself
    line: ClassVar[str] = "OpenVINO under options; each fallback to Inductor or to eager is reported"
    declared: ClassVar[Mapping[str, Option]] = OPTIONS
    rules: ClassVar[tuple[Rule, ...]] = (Rule("cache_dir", unless=_without_files),)
    distributions: ClassVar[tuple[str, ...]] = ("openvino",)
    needs: ClassVar[tuple[str, ...]] = ("openvino",)
    trains: ClassVar[bool] = False

    def verify(self, templates: Sequence[str], options: Mapping[str, Any], tell: Callable[[Limit], None]) -> None:
        super().verify(templates, options, tell)
        device = options.get("device", "CPU")
        if device != "CPU" and device not in _devices():
            reason = f"OpenVINO finds no device {device!r}, only {', '.join(map(repr, _devices()))}"
            raise CannotWorkError(Limit(f"Backend {self.name!r}", reason, "name one of them as 'device'"))

    def compile(
        self, gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
    ) -> Callable[..., Any]:
        from backend_kwargs.torch_internals.dynamo import fake_tensor_unsupported, innermost_fn

        attempts: list[Attempt] = []
        steps = _aot if options.get("aot_autograd") else _attempt
        compiled: Any = fake_tensor_unsupported(partial(steps, attempts, options))(gm, list(example_inputs))
        compiled.openvino_attempts = innermost_fn(compiled).openvino_attempts = attempts  # type: ignore[attr-defined]
        return compiled  # type: ignore[no-any-return]


class Attempt:
    """How OpenVINO compiled one forward or backward graph; a partition may fail at any call."""

    def __init__(self, call: Callable[..., Any]) -> None:
        model = inspect.getclosurevars(call).nonlocals["compiled_model"] if call.__module__ == BACKEND else None
        self.by_inductor = model is None
        # The partitioned graph; there is none for a model read from a file, which OpenVINO runs as a whole.
        self._gm = model if hasattr(model, "named_children") else None

    @property
    def partitions(self) -> int:
        """The number of OpenVINO's partitions of the graph, with those that failed and now run in eager."""
        return int(not self.by_inductor) if self._gm is None else len(self._pieces())

    @property
    def failed(self) -> int:
        """The number of partitions that failed."""
        return sum(not hasattr(piece, "graph") and piece.perm_fallback for piece in self._pieces())

    @property
    def in_eager(self) -> tuple[str, ...]:
        """The operators that are in no partition."""
        from backend_kwargs.torch_internals.operators import schema_of

        nodes = self._gm.graph.nodes if self._gm is not None else ()
        return tuple(dict.fromkeys(str(node.target) for node in nodes if schema_of(node.target) is not None))

    def copy_results(self) -> None:
        """Copy what partitions return to eager operators and to the caller, since their next call overwrites it."""
        import torch

        if self._gm is None:
            return
        graph = self._gm.graph
        for call in filter(_is_partition, list(graph.nodes)):
            for value in [user for user in call.users if user.target is operator.getitem] or [call]:
                if not all(map(_is_partition, value.users)):
                    with graph.inserting_after(value):
                        copied = graph.call_function(torch.clone, (value,))
                    value.replace_all_uses_with(copied, delete_user_cb=lambda user, copied=copied: user is not copied)
        self._gm.recompile()

    def _pieces(self) -> list[Any]:
        # Read each time, since OpenVINO replaces them at the first call.
        children = self._gm.named_children() if self._gm is not None else ()
        return [child for name, child in children if name.startswith(PARTITION)]


def _is_partition(node: Any) -> bool:
    return node.op == "call_module" and str(node.target).startswith(PARTITION)


def _attempt(
    attempts: list[Attempt], options: Mapping[str, Any], gm: Any, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    from backend_kwargs.torch_internals.fx import is_boxed, mark_boxed

    theirs = _backend()
    with _no_options_of_others(theirs):
        # OpenVINO documents operators as values of `disabled_ops` and compares them as text. It also writes into
        # `config`.
        disabled = [op if isinstance(op, str) else f"torch.ops.{op}" for op in options.get("disabled_ops", ())]
        given = {**options, "disabled_ops": disabled, "config": dict(options.get("config", {}))}
        with _own_sizes(gm, options):
            call = theirs.fx_openvino(gm, list(example_inputs), given)
    attempts.append(attempt := Attempt(call))
    attempt.copy_results()
    if attempt.by_inductor:
        warn_once(f"OpenVINO failed to compile a graph, which Inductor compiled instead; {LOG}.")
        return call  # type: ignore[no-any-return]

    # A partition fails only when it is called.
    def run(*args: Any) -> Any:
        result = call(*args)
        if attempt.failed:
            warn_once(f"OpenVINO failed to run a partition of a graph, which runs in eager from now on; {LOG}.")
        return result

    if is_boxed(call):
        mark_boxed(run)
    return run


def _own_sizes(gm: Any, options: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Let OpenVINO trace a graph of fixed sizes with sizes of its own.

    It traces with symbols that it makes in dynamo's shape environment. Where a convolution compares them, dynamo finds
    guards on symbols without a source, and fails: "sources must not be empty for symbol s24" (torch 2.13). Without
    dynamo's context the sizes are numbers. AOTAutograd's graphs are not traced again.
    """
    from backend_kwargs.torch_internals.guards import tracing

    if options.get("aot_autograd") or any(map(_is_symbolic, gm.graph.find_nodes(op="placeholder"))):
        return nullcontext()
    return tracing(None)


def _is_symbolic(placeholder: Any) -> bool:
    value = placeholder.meta.get("example_value")
    return any(not isinstance(size, int) for size in getattr(value, "shape", (value,) if value is not None else ()))


def _aot(
    attempts: list[Attempt], options: Mapping[str, Any], gm: Any, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """Do what OpenVINO does under aot_autograd, except that it keeps `options` for all later graphs of the process."""
    from backend_kwargs.torch_internals.decompositions import get_decompositions
    from backend_kwargs.torch_internals.functorch import aot_autograd

    theirs, step = _backend(), partial(_attempt, attempts, options)
    ops = [*options.get("decompositions", ()), *theirs.get_inf_decomposition_list()]
    table = get_decompositions([*ops, *theirs.get_aot_decomposition_list()])
    return aot_autograd(fw_compiler=step, bw_compiler=step, decompositions=table)(gm, example_inputs)


@contextmanager
def _no_options_of_others(theirs: Any) -> Iterator[None]:
    """Hide the options that an earlier graph of OpenVINO's own backend left behind: they would override ours."""
    with replaced(theirs, "openvino_options", {}):
        yield


@cache
def _backend() -> Any:
    """Import OpenVINO's backend, and restore the option of dynamo that the import changes."""
    from backend_kwargs.torch_internals.dynamo import inlining_kept

    with inlining_kept():
        return import_module(BACKEND)


@cache
def _devices() -> tuple[str, ...]:
    return tuple(import_module("openvino").Core().available_devices)
