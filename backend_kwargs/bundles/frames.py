"""The bytecode that dynamo generated for a module, kept so that the module can be served without being traced again.

Only for a module that is one graph, compiled once, with nothing wrapped around its compiled code.
"""

import builtins
import dis
import importlib
import marshal
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType, ModuleType

import torch

from backend_kwargs.bundles.graphs import CannotLoadError, Graph, GraphBackend, load_graph
from backend_kwargs.bundles.identity.walk import identity_of
from backend_kwargs.errors import error_text, warn_once
from backend_kwargs.facts import Call
from backend_kwargs.options.layers import Options
from backend_kwargs.torch_internals.dynamo import GRAPH, RESUMES, cache_entries


@dataclass(frozen=True, slots=True)
class Frame:
    """dynamo's bytecode: `modules` are the globals that are modules, `others` the rest except for the graph.

    `identity` is that of the traced module, and `options` are those with which the graph was compiled.
    """

    bytecode: bytes
    graph: str
    modules: Mapping[str, str]
    others: Mapping[str, object]
    identity: str
    options: Options


def keep_frame(backend: GraphBackend, identity: str | None, entry: CodeType | None) -> None:
    """Keep the bytecode that calls the backend's only graph, if it is that of `entry` and can be called without dynamo.

    After a graph break it would be that of an inner function or of the rest of one, with other arguments. `identity` is
    that of the traced module before its first call, None if it cannot be compared with another.
    """
    if (
        identity is None
        or len(backend.compiled) != 1
        or len(backend.frames) != 1
        or backend.frames[0][0] is not entry
        or backend.compiled[0] not in backend.unwrapped
    ):
        return
    key = backend.compiled[0]
    try:
        frame = _frame(*backend.frames[0], identity, backend.unwrapped[key])
        content = b"" if frame is None else pickle.dumps(frame)
    except Exception:  # noqa: BLE001 - otherwise the module is traced when it is served
        return
    backend.graphs[key] = replace(backend.graphs[key], frame=content)


def _frame(code: CodeType, scope: Mapping[str, object], identity: str, options: Options) -> Frame | None:
    """Return the bytecode that dynamo generated for `code`, None if it cannot be called without dynamo."""
    entries = cache_entries(code)
    if len(entries) != 1:
        return None
    generated = entries[0].code
    loaded = {each.argval for each in dis.get_instructions(generated) if each.opname == "LOAD_GLOBAL"}
    if any(name.startswith(RESUMES) for name in loaded):
        return None
    values = {name: scope[name] for name in sorted(loaded) if name in scope}
    graphs = [name for name in values if name.startswith(GRAPH)]
    if len(graphs) != 1:
        return None
    modules = {name: value.__name__ for name, value in values.items() if isinstance(value, ModuleType)}
    if "__main__" in modules.values():  # another module in another process
        return None
    others = {name: value for name, value in values.items() if name not in modules and name not in graphs}
    return Frame(marshal.dumps(generated), graphs[0], modules, others, identity, options)


def untraced(entry: FunctionType, module: torch.nn.Module, graphs: Mapping[str, Graph], folder: str) -> Call | None:
    """Return a callable that runs the kept bytecode on `module`, or None if there is none or it does not fit."""
    if len(graphs) != 1:
        return None
    (graph,) = graphs.values()
    if not graph.frame or not graph.code:
        return None
    try:
        frame: Frame = pickle.loads(graph.frame)  # noqa: S301 - trusted, or this process made it
        if frame.identity != identity_of(module):
            return None
        call: Call = load_graph(graph, (), folder, frame.options)
        scope: dict[str, object] = {name: importlib.import_module(place) for name, place in frame.modules.items()}
        scope |= {**frame.others, frame.graph: call, "__builtins__": builtins}
        code = marshal.loads(frame.bytecode)  # noqa: S302 - as above
        return partial(FunctionType(code, scope, entry.__name__, None, entry.__closure__), module)
    except CannotLoadError:
        return None
    except Exception as error:  # noqa: BLE001 - the module is traced instead
        warn_once(f"The bundle's bytecode does not load, and the module is traced: {error_text(error)}.")
        return None
