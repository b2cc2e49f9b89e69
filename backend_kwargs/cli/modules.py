"""A user's own modules and files, imported as `python FILE.py` imports what lies beside it."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from backend_kwargs.errors import BackendKwargsError, error_text


def file_of(where: str) -> Path | None:
    """Return the file that `where` names, None where it names a module; raise where there is no such file."""
    file = Path(where) if where.endswith(".py") else None
    if file and not file.is_file():
        raise BackendKwargsError(f"No file {where!r}.")
    return file


def folder_of(where: str) -> str:
    """Return the folder that is searched first for what `where`, a file or a module, imports."""
    return str(Path(where).resolve().parent if where.endswith(".py") else Path.cwd())


@contextmanager
def importable(directory: str) -> Iterator[None]:
    """Let the user's code import from `directory` first, as `python FILE.py` and `python -m` do; afterwards last.

    A model may still import late, but a json.py there must not become the json of Inductor's compile workers, whose
    PYTHONPATH is our path.
    """
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path[:] = [*(entry for entry in sys.path if entry != directory), directory]


def imported(where: str) -> ModuleType:
    """Return the module that `where` names, or the file, from its importable folder."""
    file = file_of(where)
    try:
        if file is None or _is_called_so(file):
            return importlib.import_module(file.stem if file else where)
        return _loaded(file)
    except (Exception, SystemExit) as error:  # the user's own code
        raise BackendKwargsError(f"Cannot import {where!r}: {error_text(error)}.") from error


def spec_of(text: str) -> str:
    """Return a backend's spec, of which "file.py:function" becomes "module:function" with the module imported."""
    where, _, name = text.rpartition(":")
    if not where.endswith(".py"):
        return text
    with importable(folder_of(where)):
        module = imported(where)
    if module.__name__ != Path(where).stem:
        raise BackendKwargsError(f"File {where!r} cannot hold a backend: its name is another module's; rename it.")
    return f"{module.__name__}:{name}"


def _is_called_so(file: Path) -> bool:
    """Tell whether an import by the file's name finds the file: a json.py beside it is not the standard library's."""
    spec = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    return bool(spec and spec.origin and Path(spec.origin).resolve() == file.resolve())


def _loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", f"factory_file_{file.stem}"), file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dynamo looks a function's module up
    spec.loader.exec_module(module)
    return module
