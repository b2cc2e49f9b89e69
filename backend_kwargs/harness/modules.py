"""Import a user's modules and files in the way that `python FILE.py` does."""

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from backend_kwargs.errors import BackendKwargsError, error_text

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
