"""The compiled graphs of one module: kept when they are made, and looked up by what they compute.

A graph is kept as AOTAutograd's result, which torch's precompilation pickles too. The C++ libraries of its generated
code are kept with it, and the code refers to them by hash: loading needs neither a cache folder nor a compiler.

torch's cache artifacts lack these libraries, whose keys depend on the compiler's output and on folders. dynamo traces
again in each process, so the guards are those of the process that serves.
"""

import ast
import linecache
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule

from backend_kwargs.auto.candidates import allowed_candidates, trusted
from backend_kwargs.backend import Backend, find_backend
from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.backends.generated_code import compiled_graphs
from backend_kwargs.bundles.disk.place import private_folder
from backend_kwargs.bundles.libraries import library, provided
from backend_kwargs.bundles.samples import content_hash
from backend_kwargs.errors import BackendKwargsError, error_text, warn_once
from backend_kwargs.facts import EAGER, Call
from backend_kwargs.graphs.memory import SharedMemory, unless_shared
from backend_kwargs.graphs.spelling import ambient, signature, structure
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.keys import digest, key
from backend_kwargs.options import Options, check, standing, untrusted
from backend_kwargs.registry import PLAIN
from backend_kwargs.rewrites.table import raced_rewrites
from backend_kwargs.torch_internals import functorch, inductor_config
from backend_kwargs.torch_internals.dynamo import (
    GRAPH,
    RESTARTS,
    cache_entries,
    invalidate,
    traced_frame,
    without_disabling,
)
from backend_kwargs.torch_internals.tensors import (
    AUTOCAST_FUNCTIONS,
    OpOverload,
    OpOverloadPacket,
    has_dispatch_rules,
    has_kernel,
    is_custom,
    is_lowered_by_inductor,
    overloads_of,
)

CompileFx: TypeAlias = Callable[..., Call]
DecisionData: TypeAlias = Mapping[str, Any]  # what a bundle keeps of a decision of auto
BUNDLED = {"bundled_autograd_cache": True, "enable_autograd_cache": True}
# AOTAutograd caches no graph with a private function unless it is known to depend on its arguments only; these do.
OWN_WEIGHTS = (
    "it has tensors of its own, such as weights that are frozen, packed or quantised; it is compiled again where the "
    "bundle is loaded"
)
CACHEABLE = {"unsafe_marked_cacheable_functions": dict.fromkeys(AUTOCAST_FUNCTIONS, "1")}


class CannotKeepError(Exception):
    """A compiled graph cannot be saved for another process."""


@dataclass(frozen=True, slots=True)
class Graph:
    """One compiled graph: `code` is a pickle, "" if it could not be kept; `why` is then the reason.

    `libraries` are its shared libraries by SHA-256; `decision` is auto's, None if auto was not used.
    """

    code: bytes = b""
    libraries: Mapping[str, bytes] = field(default_factory=dict)
    decision: DecisionData | None = None
    why: str = ""


class GraphBackend:
    """The backend of one CompiledModule: it keeps each graph that it compiles, and returns graphs that it has kept.

    Compared by identity, so that dynamo never uses one module's code for another.
    """

    def __init__(self, backend: Backend, graphs: dict[str, Graph], *, keep: bool, folder: str) -> None:
        self.backend, self.graphs, self.keep, self.folder = backend, graphs, keep, folder
        self.compiler_name = self.__name__ = backend.compiler_name
        # Code objects with this module's code in dynamo's cache, and the globals through which its bytecode calls
        # graphs.
        self.frames: list[tuple[CodeType, dict[str, Any]]] = []
        self.made: list[Call] = []
        self.loaded: list[str] = []  # keys of graphs that were loaded
        self.compiled: list[str] = []  # keys of graphs that were compiled

    def __call__(self, gm: GraphModule, example_inputs: Inputs, *, name: str | None = None, **kwargs: Any) -> Call:
        """Compile the graph `gm` for dynamo, or load it."""
        frame = traced_frame()
        if frame is not None and not any(frame.f_code is code for code, _ in self.frames):
            self.frames.append((frame.f_code, frame.f_globals))
        backend = self.backend.called_with(**kwargs)
        shares = SharedMemory(gm, example_inputs)
        eager = copy_of_graph(gm) if shares.can_occur else gm
        if shares(example_inputs):  # code for them would be wrong for others of these sizes
            self.made.append(eager.forward)
        else:
            graph = CapturedGraph(gm, example_inputs, name)
            made = self._loaded_or_compiled(key_of(gm, example_inputs), backend, graph)
            self.made.append(unless_shared(shares, eager, made))
        return self.made[-1]

    def reset(self) -> None:
        """Free what compiling keeps in this process; torch._dynamo.reset() calls it."""
        self.backend.reset()

    def get_compiler_config(self) -> dict[str, Any]:
        """Return the compiler's whole configuration."""
        return self.backend.get_compiler_config()

    def forget(self) -> None:
        """Free this module's code in dynamo's caches, and no other code."""
        for code, scope in self.frames:
            for entry in cache_entries(code):
                # torch.compile wraps the backend that it is given.
                own = getattr(entry.backend, "compiler_fn", entry.backend) is self
                if own and hasattr(entry.guard_manager, "extra_state"):  # else it is invalid already
                    invalidate(entry, entry.guard_manager, "the CompiledModule was deactivated")
            # If another frame's cache still has the bytecode, that must not keep the graph alive.
            for name, value in [*scope.items()]:
                if name.startswith(GRAPH) and any(without_disabling(value) is each for each in self.made):
                    scope[name] = None
        self.frames.clear()
        self.made.clear()

    def _loaded_or_compiled(self, key: str, backend: Backend, graph: CapturedGraph) -> Call:
        kept = self.graphs.get(key)
        if kept is None:
            return self._compile(key, backend, graph)
        if kept.decision and kept.decision["winner"] == EAGER:
            self.loaded.append(key)
            return graph.gm.forward
        if kept.code:
            with suppress(CannotLoadError):
                return self._load(key, kept, backend, graph)
        if kept.decision:
            # With auto's decision; if that fails, as the config says, without a race.
            spare = copy_of_graph(graph.gm)
            try:
                compiled = under_decision(backend, kept.decision).compile(graph)
            except RESTARTS:
                raise
            except Exception as error:  # noqa: BLE001 - it may be of another release, or of anybody's making
                warn_once(f"A saved decision of auto fails, and its graph is compiled again: {error_text(error)}.")
                return self._compile(key, _without_race(backend), replace(graph, gm=spare))
            self.compiled.append(key)
            return compiled.call
        return self._compile(key, _without_race(backend), graph)

    def _compile(self, key: str, backend: Backend, graph: CapturedGraph) -> Call:
        calls: list[Call] = []
        used: dict[str, Any] = {}

        def compile_one(compile_fx: CompileFx, gm: GraphModule, *args: object, **kwargs: Any) -> Call:
            used.update(weights=[*gm.parameters(), *gm.buffers()])
            kwargs["config_patches"] = {**kwargs["config_patches"], **CACHEABLE}
            with functorch.patched(**BUNDLED):
                calls.append(compile_fx(gm, *args, **kwargs))
            return calls[-1]

        self.compiled.append(key)
        if not self.keep:
            return backend.compile(graph).call
        compiled = backend.compile(replace(graph, compile_fx=compile_one))
        made, precision = compiled.facts.decision, compiled.facts.precision
        decision: DecisionData | None = {"winner": made.winner, "options": dict(made.options)} if made else None
        if made and made.winner == EAGER:
            kept = Graph(decision=decision)  # what was compiled last is a loser
        elif made and made.compiler:
            kept = Graph(why=f"auto chose {made.compiler} for it, whose code is not kept")
        else:
            # In a race, the winner is compiled last.
            why = OWN_WEIGHTS if used.get("weights") else ""  # AOTAutograd's saved code would miss them as arguments
            if called := inlined(graph.gm):
                why = f"its code may contain that of {called}, which may change; it is compiled again elsewhere"
            if precision and precision.reason and precision.products:
                why = "its error exceeds max_error here; it is measured again where the bundle is loaded"
            kept = _kept(calls[-1] if calls else None, decision, why)
        if made and made.provisional and not kept.code:
            kept = Graph(why=f"{kept.why or 'auto chose eager for it'}, and the decision is provisional")
        self.graphs[key] = kept
        return compiled.call

    def _load(self, key: str, kept: Graph, backend: Backend, graph: CapturedGraph) -> Call:
        try:
            backend = under_decision(backend, kept.decision) if kept.decision else _without_race(backend)
        except BackendKwargsError as error:
            raise CannotLoadError from error  # compiling with it says why
        loads: list[str] = []

        def load_one(compile_fx: CompileFx, *args: object, **kwargs: Any) -> Call:
            if loads:  # its error exceeds the bound here
                loads.clear()
                self.compiled.append(key)
                return compile_fx(*args, **kwargs)
            try:
                loaded = load_graph(kept, graph.example_inputs, self.folder, kwargs["config_patches"])
            except CannotLoadError:
                raise
            except Exception as error:
                warn_once(f"A saved graph does not load and is compiled again: {error_text(error)}.")
                raise CannotLoadError from error
            loads.append(key)
            return loaded

        try:
            return backend.compile(replace(graph, compile_fx=load_one)).call
        finally:
            self.loaded += loads


class CannotLoadError(Exception):
    """A kept graph does not work for these inputs."""


def key_of(gm: GraphModule, example_inputs: Inputs) -> str:
    """Return 64 hexadecimal digits for a graph's computation and its inputs, the same in each process."""
    # The values of tensors that the graph and its subgraphs contain become part of its code.
    graphs = [(path, each) for path, each in gm.named_modules() if isinstance(each, GraphModule)]
    reads = [(path, each, node.target) for path, each in graphs for node in each.graph.find_nodes(op="get_attr")]
    values = [(f"{path}.{name}", attrgetter(name)(each)) for path, each, name in reads]
    tensors = [(name, content_hash(value)) for name, value in values if isinstance(value, torch.Tensor)]
    inputs, modes = signature(gm, example_inputs), dict(sorted(ambient().items()))
    return key("kept", structure=structure(gm), signature=inputs, ambient=modes, tensors=tensors)


def permits_decision(backend: Backend, winner: str, options: Options) -> bool:
    """Return whether `backend` could have chosen this winner with these options, as for a decision in a store."""
    from backend_kwargs.auto.settings import RaceSettings

    own = backend.options
    rewrites = raced_rewrites(own.get("rewrites"))
    if not own.get("auto"):
        return False
    templates = lambda name: find_backend(f"{PLAIN}:{name}").options  # noqa: E731
    return trusted(winner, options, "", allowed_candidates(RaceSettings.of(own), templates, rewrites))


def under_decision(backend: Backend, decision: DecisionData) -> Backend:
    """Return the backend that compiles with auto's decision, without a race."""
    from backend_kwargs.auto.settings import OPTIONS

    # Under auto `rewrites` and `precision` name candidates: those that won are in the decision.
    besides = {*OPTIONS, "rewrites"}
    fixed = {name: value for name, value in backend.options.items() if name not in besides}
    clones = True if fixed.get("clone_outputs") is None else fixed["clone_outputs"]
    # A decision from a file only chooses among options that are data.
    options = {**decision["options"], "auto": False}
    if "rewrites" in backend.options:
        options.setdefault("rewrites", ())
    if "precision" in backend.options and "precision" not in options:
        options.update(precision=(), max_error=None)
    chosen = backend.bind("auto's decision", options, untrusted(check))
    return chosen.bind("fixed", {**standing(fixed, options), "clone_outputs": clones, "auto": False})


def _without_race(backend: Backend) -> Backend:
    """Return the backend with default in place of auto, for a graph whose caller waits: it was built before."""
    return under_decision(backend, {"options": {}}) if backend.options.get("auto") else backend


# ---- keeping


def _kept(compiled: Call | None, decision: DecisionData | None, why: str) -> Graph:
    if compiled is None:
        return Graph(decision=decision, why="its backend is not Inductor, or ran it in eager")
    if why:
        return Graph(decision=decision, why=why)
    try:
        return _graph(compiled, decision)
    except Exception as error:  # noqa: BLE001 - a graph that cannot be kept is compiled again elsewhere
        return Graph(decision=decision, why=error_text(error) if not isinstance(error, CannotKeepError) else str(error))


def _graph(compiled: Call, decision: DecisionData | None) -> Graph:
    from backend_kwargs.torch_internals.inductor_code import generated_modules

    serialize = getattr(compiled, "serialize", None)
    if serialize is None:
        raise CannotKeepError("torch cannot serialize it; it is compiled again where the bundle is loaded")
    with functorch.patched(**BUNDLED):
        result = pickle.loads(pickle.dumps(serialize()))  # noqa: S301 - pickled in this line
    if result.compiled_bw is not None:
        raise CannotKeepError("it has a backward graph")
    inductor = result.compiled_fw.result
    (compiled_graph,) = [graph for graph in compiled_graphs(compiled) if graph.cache_key == inductor.cache_key]
    modules = {Path(str(module.__file__)).stem: module for module in generated_modules()}  # the latest of a name
    if compiled_graph.cache_key not in modules:
        raise CannotKeepError("its generated code was dropped")
    source, libraries = _with_named_libraries(inductor.source_code, modules[compiled_graph.cache_key])
    if libraries and "cuda" in inductor.device_types:
        raise CannotKeepError("its C++ wrapper names files of this machine")
    inductor.source_code = source
    inductor.cache_key = "c" + digest(source.encode(), 50)
    return Graph(code=pickle.dumps(result), libraries=libraries, decision=decision)


def _with_named_libraries(source: str, module: ModuleType) -> tuple[str, dict[str, bytes]]:
    """Return generated code that loads its C++ functions by their library's hash, and these libraries."""
    from backend_kwargs.torch_internals.inductor_code import cache_dir

    lines = source.splitlines(keepends=True)
    libraries: dict[str, bytes] = {}
    for node in reversed(ast.parse(source).body):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call()):
                function: Any = vars(module).get(name)
            case _:
                continue
        file = getattr(getattr(function, "__self__", None), "__file__", None)
        if file is None or not Path(file).is_relative_to(cache_dir()):
            continue
        content = Path(file).read_bytes()
        hashed = digest(content)
        libraries[hashed] = content
        call = f"library({hashed!r}, {function.__self__.__name__.rpartition('.')[2]!r}, {function.__name__!r})"
        lines[node.lineno - 1 : node.end_lineno] = [f"{name} = {call}\n"]
    imports = f"from {library.__module__} import {library.__name__}\n" if libraries else ""
    return imports + "".join(lines), libraries


# ---- loading


def load_graph(kept: Graph, example_inputs: Inputs, folder: str, options: Options) -> Call:
    """Return the compiled code of `kept`; raise CannotLoadError if it does not work for these inputs.

    It is loaded from files in a private folder, whose name ends with `folder`, and which is removed at once.
    """
    result = pickle.loads(kept.code)  # noqa: S301 - trusted, or this process made it
    if not functorch.fits(result, example_inputs):
        raise CannotLoadError  # compiled with guards that exclude these sizes
    inductor = result.compiled_fw.result
    # One thread: nothing is compiled, and Inductor would start its compile workers.
    with (
        inductor_config.patched({**options, "compile_threads": 1}),
        private_folder(name=folder) as private,
        provided(kept.libraries, private),
    ):
        path = private / f"{inductor.cache_key}.py"
        path.write_text(inductor.source_code, encoding="utf-8")
        # Tracebacks show its lines after it is removed.
        lines = inductor.source_code.splitlines(keepends=True)
        linecache.cache[str(path)] = len(inductor.source_code), None, lines, str(path)
        # Not in Inductor's cache folder, which may be read-only.
        inductor.write_to_disk = partial(str, path)
        cudagraphs = bool(inductor_config.value("triton.cudagraphs"))
        compiled = functorch.callable_of(result, example_inputs, cudagraphs=cudagraphs)

    def forward(*inputs: object) -> object:
        return compiled(list(inputs))

    return forward


# ---- which operators may be inlined below dynamo, so that compiled code contains their body

# The releases of torch and Python are compared when a bundle is loaded.
LIBRARIES = frozenset(
    {"torch", "numpy", "builtins", "math", "cmath", "operator", "functools", "itertools", "collections", "typing"}
    | {"_operator", "_functools", "_collections", "_collections_abc", "abc", "enum", "types", "typing_extensions"}
    | {"dataclasses", "numbers", "fractions", "contextlib", "warnings", "_warnings", "logging", "string", "re"}
    | {"bisect", "_bisect", "heapq", "_heapq", "copy", "reprlib"}
)
# Operators of other namespaces may have changed when the code is loaded.
TORCH_NAMESPACES = frozenset(
    {"aten", "prim", "prims", "profiler", "inductor", "quantized", "quantized_decomposed", "mkldnn", "mkl", "onednn"}
    | {"_c10d_functional", "c10d_functional", "_quantized", "rngprims", "debugprims", "symm_mem", "c10d"}
)
# Kernels with these keys run while a graph is traced, and what they call becomes part of it.
TRACED_KEYS = ("CompositeImplicitAutograd", "Autograd", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")


def inlined(gm: torch.fx.GraphModule) -> str | None:
    """Return the name of a call in the graph whose body may become part of compiled code, None if there is none."""
    for each in gm.modules():
        if not isinstance(each, torch.fx.GraphModule):
            continue
        for node in each.graph.nodes:
            if node.op == "call_function" and not _is_opaque(node.target):
                is_function = isinstance(node.target, FunctionType)
                return node.target.__qualname__ if is_function else str(node.target)
            if node.op == "call_module" and not isinstance(each.get_submodule(node.target), torch.fx.GraphModule):
                return str(node.target)
    return None


def _is_opaque(target: object) -> bool:
    """Return whether compiled code calls `target` itself, or has of it what torch's release determines."""
    if isinstance(target, OpOverloadPacket):
        return all(map(_is_opaque, overloads_of(target)))
    if isinstance(target, OpOverload):
        return target.namespace in TORCH_NAMESPACES or not _is_traced(target)
    if isinstance(target, FunctionType):
        return is_own(target)
    return is_library_name(getattr(target, "__module__", None) or type(target).__module__)


def _is_traced(op: OpOverload) -> bool:
    """Return whether an operator's own Python code may become part of a graph."""
    # A custom_op's own kernel for autograd calls the operator again.
    keys = [key for key in TRACED_KEYS if key != "Autograd" or not is_custom(op)]
    return (
        any(has_kernel(op, key) for key in keys)
        or bool(op.py_kernels)
        or has_dispatch_rules(op)
        or is_lowered_by_inductor(op)
    )


def is_own(function: FunctionType) -> bool:
    """Return whether a function's code is in the source file of a library's module."""
    name = function.__globals__.get("__name__", "")
    module = sys.modules.get(name)
    return (
        module is not None
        and is_library_name(name)
        and function.__globals__ is vars(module)
        and function.__code__.co_filename in (getattr(module, "__file__", None), f"<frozen {name}>")
    )


def is_library_name(name: str) -> bool:
    """Return whether a Python module of this name belongs to a library whose release is compared."""
    return name.partition(".")[0] in LIBRARIES
