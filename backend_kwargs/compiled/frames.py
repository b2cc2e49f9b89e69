"""The bytecode that dynamo generated for a module, kept so that the module can be served without being traced again.

Only for a module that is one graph, compiled once, with nothing wrapped around its compiled code.
"""

import builtins
import dis
import hashlib
import importlib
import json
import marshal
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from backend_kwargs.compiled.graphs import CannotLoadError, GraphBackend, load_graph
from backend_kwargs.errors import error_text, warn_once

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
PLAIN = (bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device)
PER_PROCESS = {"_original_object_hash"}  # transformers keeps Python's hash of a text in its GenerationConfig
CODE = (FunctionType, *PLAIN)
GRAPH = "__compiled_fn"  # how dynamo names the global through which its bytecode calls a graph


@dataclass(frozen=True, slots=True)
class Frame:
    """dynamo's bytecode: `modules` are the globals that are modules, `others` the rest except for the graph.

    `structure` is that of the traced module, and `options` are those with which the graph was compiled.
    """

    bytecode: bytes
    graph: str
    modules: Mapping[str, str]
    others: Mapping[str, Any]
    structure: str
    options: Mapping[str, Any]


def keep_frame(backend: GraphBackend, module: torch.nn.Module) -> None:
    """Keep the bytecode that calls the backend's only graph, if it can be called without dynamo."""
    if len(backend.compiled) != 1 or len(backend.frames) != 1 or backend.compiled[0] not in backend.unwrapped:
        return
    key = backend.compiled[0]
    try:
        frame = _frame(*backend.frames[0], module, backend.unwrapped[key])
        kept = b"" if frame is None else pickle.dumps(frame)
    except Exception:  # noqa: BLE001 - otherwise the module is traced when it is served
        return
    backend.graphs[key] = replace(backend.graphs[key], frame=kept)


def _frame(
    code: CodeType, scope: Mapping[str, Any], module: torch.nn.Module, options: Mapping[str, Any]
) -> Frame | None:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    entries = _debug_get_cache_entry_list(code)
    if len(entries) != 1:
        return None
    generated = entries[0].code
    loaded = {each.argval for each in dis.get_instructions(generated) if each.opname == "LOAD_GLOBAL"}
    values = {name: scope[name] for name in sorted(loaded) if name in scope}
    graphs = [name for name in values if name.startswith(GRAPH)]
    if len(graphs) != 1:
        return None
    modules = {name: value.__name__ for name, value in values.items() if isinstance(value, ModuleType)}
    if "__main__" in modules.values():  # another module in another process
        return None
    others = {name: value for name, value in values.items() if name not in modules and name not in graphs}
    return Frame(marshal.dumps(generated), graphs[0], modules, others, structure_of(module), options)


def structure_of(module: torch.nn.Module) -> str:
    """Return a hash of a module and its submodules: types with their code, training flags, hooks, plain attributes.

    dynamo makes such attributes (the eps of a norm, the form of a GELU) constants of the graph. Parameters and buffers
    count with what new values do not change: sizes, strides, types, and which of them are the same.
    """
    own = vars(torch.nn.Module()).keys() - {"training"}  # parameters, buffers, submodules and hooks
    seen: dict[int, int] = {}
    parts: list[Any] = []
    for name, each in module.named_modules():
        attributes = {key: _data(value, seen) for key, value in vars(each).items() if key not in own}
        hooks = [_data(list(getattr(each, key).values()), seen) for key in HOOKS]
        parts.append((name, type(each).__qualname__, attributes, hooks))
    bases = dict.fromkeys(base for each in module.modules() for base in type(each).__mro__)
    for base in bases:
        if base.__module__.partition(".")[0] != "torch":  # torch's release is compared when a bundle is loaded
            plain = {key: value for key, value in vars(base).items() if isinstance(value, CODE)}
            parts.append((base.__qualname__, {key: _data(value, seen) for key, value in plain.items()}))
    places: dict[int, int] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        place, strided = places.setdefault(id(tensor), len(places)), tensor.layout == torch.strided
        kind = list(tensor.shape), tensor.stride() if strided else None, str(tensor.dtype), tensor.device.type
        parts.append((name, place, kind))
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _data(value: Any, seen: dict[int, int], depth: int = 8) -> Any:
    """Return an attribute as data: objects by type and attributes, functions by name, code and what they close over.

    A function or object that was `seen` before is only a number.
    """
    if value is None or isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        pairs = (
            [(repr(key), value[key]) for key in value] if isinstance(value, Mapping) else [("", each) for each in value]
        )
        each = [json.dumps([key, _data(item, seen, depth - 1)]) for key, item in pairs] if depth else []
        return each if isinstance(value, list | tuple) else sorted(each)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, torch.Tensor | torch.nn.Module | type | ModuleType) or not depth:
        return name
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    inside: Any = ()
    if isinstance(value, partial):
        inside = (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        # Other objects in a closure, such as loggers, are not the module's.
        kept = [each for each in cells if isinstance(each, (*CODE, list, tuple, partial))]
        inside = (_code(value.__code__), value.__defaults__, value.__kwdefaults__, kept)
    elif not callable(value):
        inside = {key: each for key, each in getattr(value, "__dict__", {}).items() if key not in PER_PROCESS}
    return [name, _data(inside, seen, depth - 1)]


def _code(code: CodeType) -> Any:
    """Return a function's code as data that is the same in each process."""
    constants = [_code(each) if isinstance(each, CodeType) else each for each in code.co_consts]
    return code.co_code.hex(), list(code.co_names), constants


def untraced(entry: FunctionType, module: torch.nn.Module, graphs: Mapping[str, Any], folder: str) -> Any | None:
    """Return a callable that runs the kept bytecode on `module`, or None if there is none or it does not fit."""
    kept = [graph for graph in graphs.values() if graph.frame and graph.code]
    if len(graphs) != 1 or not kept:
        return None
    try:
        frame: Frame = pickle.loads(kept[0].frame)  # noqa: S301 - trusted, or this process made it
        if frame.structure != structure_of(module):
            return None
        call: Callable[..., Any] = load_graph(kept[0], (), folder, frame.options)
        scope: dict[str, Any] = {name: importlib.import_module(found) for name, found in frame.modules.items()}
    except CannotLoadError:
        return None
    except Exception as error:  # noqa: BLE001 - the module is traced instead
        warn_once(f"The bundle's bytecode does not load, and the module is traced: {error_text(error)}.")
        return None
    scope |= {**frame.others, frame.graph: call, "__builtins__": builtins}
    code = marshal.loads(frame.bytecode)  # noqa: S302 - as above
    return partial(FunctionType(code, scope, entry.__name__, None, entry.__closure__), module)
