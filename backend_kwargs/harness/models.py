"""The model of a command: one of a library by name, or the result of the user's factory.

A user's modules and files are imported in the way that `python FILE.py` does.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from backend_kwargs.errors import BackendKwargsError, error_text, wrong_value

MAKES_NAMES = frozenset({"*", "__getattr__", "globals", "exec", "setattr"})  # in ways that no reader sees


def file_of(where: str) -> Path | None:
    """Return the file that `where` names, None if it names a module; raise if there is no such file."""
    file = Path(where) if where.endswith(".py") else None
    if file and not file.is_file():
        raise BackendKwargsError(f"No file {where!r}.")
    return file


def folder_of(where: str) -> str:
    """Return the folder from which `where`, a file or a module, imports first."""
    return str(Path(where).resolve().parent if where.endswith(".py") else Path.cwd())


@contextmanager
def importable(directory: str) -> Iterator[None]:
    """Let the user's code import from `directory` first, as with `python FILE.py`; afterwards, search it last.

    Last, not never, since a model may import late; but a json.py there must not replace json in Inductor's compile
    workers, whose PYTHONPATH is our sys.path.
    """
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path[:] = [*(entry for entry in sys.path if entry != directory), directory]


def imported(where: str) -> ModuleType:
    """Return the module or file that `where` names, imported with its folder on the path."""
    file = file_of(where)
    try:
        if file is None or _is_called_so(file):
            return importlib.import_module(file.stem if file else where)
        return _loaded(file)
    except (Exception, SystemExit) as error:  # the user's own code
        raise BackendKwargsError(f"Cannot import {where!r}: {with_cause(error)}.") from error


def check_defines(file: Path, name: str) -> None:
    """Raise if a file surely has no such name: read before it is imported, which may take as long as torch does."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    except (OSError, ValueError, SyntaxError, RecursionError):  # whoever imports it says what is wrong
        return
    names = {
        *(each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)),
        *(each.id for each in nodes if isinstance(each, ast.Name)),
        *((each.asname or each.name).partition(".")[0] for each in nodes if isinstance(each, ast.alias)),
    }
    if name not in names and not names & MAKES_NAMES:
        raise no_function(str(file), name, names)


def no_function(where: str, name: str, names: Iterable[str]) -> BackendKwargsError:
    """Return the error that a file or module has no such function, with the nearest of its names."""
    nearest = get_close_matches(name, [each for each in names if not each.startswith("_")], n=1)
    did = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return BackendKwargsError(f"{where!r} has no function {name!r}.{did}")


def with_cause(error: BaseException) -> str:
    """Return an error of the user's code and its first cause; the option --traceback shows all."""
    first = error
    while (cause := first.__cause__ or (None if first.__suppress_context__ else first.__context__)) is not None:
        first = cause
    because = f", because of {error_text(first)}" if first is not error else ""
    return f"{error_text(error)}{because}"


def spec_of(text: str) -> str:
    """Return a backend's spec; "file.py:function" becomes "module:function", and the module is imported."""
    where, _, name = text.rpartition(":")
    if not where.endswith(".py"):
        return text
    with importable(folder_of(where)):
        module = imported(where)
    if module.__name__ != Path(where).stem:
        raise BackendKwargsError(f"File {where!r} cannot be imported: another module has its name; rename it.")
    return f"{module.__name__}:{name}"


def _is_called_so(file: Path) -> bool:
    """Return whether an import by the file's name finds this file; for a json.py, it finds the standard library's."""
    spec = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    return bool(spec and spec.origin and Path(spec.origin).resolve() == file.resolve())


def _loaded(file: Path) -> ModuleType:
    """Return a file as a module of a name that no other has."""
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", f"factory_file_{file.stem}"), file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dynamo looks up the module of a function
    spec.loader.exec_module(module)
    return module


# ---- the models of factories and libraries

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
            raise no_function(where, name, [each for each, value in vars(module).items() if callable(value)])
        _check_takes(factory, build, sizes)
        try:
            result = build(**sizes)
        except (Exception, SystemExit) as error:  # the user's own code
            raise BackendKwargsError(f"Factory {factory!r} failed: {with_cause(error)}.") from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise wrong_value(f"The result of factory {factory!r}", "(model, example_inputs)", result)
    if not callable(result[0]):
        raise wrong_value(f"The model of factory {factory!r}", "a module or a function", result[0])
    from backend_kwargs.torch_internals.sealing import wrapped

    if wrapped(result[0]):  # what is called eager would run its code
        raise BackendKwargsError(f"The model of factory {factory!r} is compiled: return it without torch.compile.")
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
