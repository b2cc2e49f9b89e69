"""Rewrites: named replacements of parts of a graph, and the lookup of a name. Imports no torch.

The built-in ones have a module of their name in this folder, which has the row of this table.

A name is looked up in the built-in table, then among the rewrites registered in this process, then among the entry
points of installed packages. Only the entry point of that name is loaded.
"""

import hashlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from backend_kwargs.errors import BackendKwargsError, removed, wrong_value
from backend_kwargs.options.templates import NamedValues

ENTRY_POINT_GROUP = "backend_kwargs.rewrites"
# Training may rely on nan being propagated, so `auto` uses such calls for inference only.
NAN = "the library's ReLU may turn nan into 0"
OBJECTIVES = ("latency", "memory")  # of the races that may try a rewrite
OURS = "backend_kwargs.rewrites"
DIGITS = 16  # of what stands for a place
PLACE = re.compile(rf"(?P<name>[^@]+)@(?P<version>\d{{1,9}}):(?P<place>[0-9a-f]{{{DIGITS}}})")  # as in an option
Stats: TypeAlias = Any  # `auto`'s statistics of a graph, a layer above


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A named replacement of part of a graph.

    Give exactly one of `patterns` and `traced`: a function, or "module:function", which is imported for the first
    graph. `patterns(matcher_pass)` registers patterns on a `torch._inductor.pattern_matcher.PatternMatcherPass`; they
    apply to the graphs that Inductor lowers, forward and backward. `traced(gm, example_inputs)` takes dynamo's graph
    and returns a `Change` or None.

    `operators` lists the operators of the rewrite that the generated code calls, as "namespace::name": `report` counts
    them there. Without any, what the rewrite replaces in dynamo's graph is counted. `needs` names entries of
    `options.machine.REQUIREMENTS`; `applies` describes dtypes, layouts and modes that it matches; `explain` shows it,
    with `costs`. `same_function` is False if the result can differ from the graph's by more than rounding; such a
    rewrite applies only where it is named. `fitting(stats)` returns whether a graph with these statistics can match,
    and `objective` names the races that try the rewrite. `order` sorts the built-in rewrites, lower ones first: races
    try them, and Inductor's pass applies them, in this order, unless names are given in another; registered ones
    follow.
    """

    summary: str
    patterns: str | Callable[[Any], None] = ""
    traced: str | Callable[[Any, Any], object] = ""
    operators: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    applies: str = ""
    same_function: bool = True
    costs: str = ""
    version: int = 1
    fitting: Callable[[Stats], bool] = lambda stats: True
    objective: str = "latency"
    order: int = 1000

    def __post_init__(self) -> None:
        for name in ("operators", "needs"):
            if isinstance(value := getattr(self, name), str):
                raise wrong_value(f"Rewrite's {name!r}", "a tuple of str", value)
            object.__setattr__(self, name, tuple(value))
        if bool(self.patterns) == bool(self.traced):
            raise BackendKwargsError("A rewrite must have either `patterns` or `traced`; give exactly one.")
        function = self.patterns or self.traced
        if not (callable(function) or (isinstance(function, str) and ":" in function)):
            name = "patterns" if self.patterns else "traced"
            raise wrong_value(f"Rewrite's {name!r}", "a function or 'module:function'", function)
        if wrong := [each for each in self.operators if "::" not in each]:
            raise wrong_value("Rewrite's 'operators'", "of the form 'namespace::name'", wrong[0])
        if self.objective not in OBJECTIVES:
            raise wrong_value("Rewrite's 'objective'", " or ".join(map(repr, OBJECTIVES)), self.objective)


def ran(stats: Stats, *names: str) -> bool:
    """Return whether one of these operators ran, in place or not."""
    return any(name in stats.names or f"{name}_" in stats.names for name in names)


def _rows() -> dict[str, Rewrite]:
    """Return the rows of the modules in this folder by the modules' names.

    A row is evaluated from the module's text, with the names of this module: to import the other would import torch.
    It ends at a blank line, since parsing all modules takes 70 ms and this 3. A generated copy of the rows would be
    read as fast, but has to be kept up to date.
    """
    rows = {}
    for module in pkgutil.iter_modules(sys.modules[OURS].__path__):
        name = f"{OURS}.{module.name}"
        loader: Any = module.module_finder.find_spec(name, None).loader  # type: ignore[union-attr]
        source = "" if module.ispkg else loader.get_source(name)
        if source is None:
            raise ImportError(f"{name} has no source, which its rewrite is read from: install the package's .py files.")
        head, start, text = source.partition("\nREWRITE = ")
        if start:
            text = "\n" * (head.count("\n") + 1) + text.partition("\n\n")[0]  # so that errors name the right line
            code = compile(text, loader.get_filename(name), "eval")
            rows[module.name] = eval(code, {**globals(), "__name__": name})  # noqa: S307 - our own source
    return dict(sorted(rows.items(), key=lambda item: item[1].order))


BUILT_IN: Mapping[str, Rewrite] = MappingProxyType(_rows())

# What never won on record, with what to write instead.
REMOVED = {
    "cudnn_attention": "leave it out; torch chooses cuDNN's kernel itself where it is faster",
    "rotary": "leave it out; Inductor's own code is as fast",
    "joined_linear": "leave it out; whole models gained nothing by it",
}
_REWRITES = NamedValues(
    "rewrite",
    ENTRY_POINT_GROUP,
    BUILT_IN,
    read=lambda entry, loaded: loaded if isinstance(loaded, Rewrite) else None,
    wanted="a Rewrite",
    advice=lambda names: f"Rewrites are {', '.join(names)}.",
)
_registered = _REWRITES.registered

find_rewrite = _REWRITES.find


def list_rewrites() -> list[str]:
    """Return the names of every rewrite: built in, registered, or offered by an installed package."""
    return _REWRITES.names()


def register_rewrite(name: str, rewrite: Rewrite) -> None:
    """Register `rewrite` for options and `auto`. Raise if another rewrite already has this name."""
    if not isinstance(rewrite, Rewrite):
        raise wrong_value("register_rewrite's second argument", "a Rewrite", rewrite)
    _REWRITES.register({name: rewrite}, Rewrite.__eq__, "exists and is another")


def check_rewrites(entries: Iterable[str]) -> None:
    """Raise if an entry of the option names no rewrite, or a place as another version of it has them."""
    for entry in entries:
        name, version, signature = _parts_of(entry)
        if name in REMOVED:
            raise removed(f"Rewrite {name!r}", REMOVED[name])
        rewrite = find_rewrite(name)
        if signature and version != rewrite.version:
            raise BackendKwargsError(
                f"Rewrite {name!r} has version {rewrite.version} here, and {entry!r} is a place of version {version}: "
                f"name {name!r} for all of its places, or race again."
            )


def permits_entry(entry: object, names: Collection[str]) -> bool:
    """Return whether an entry is one of the rewrites `names`, or a place as this release's version of it has them."""
    if not isinstance(entry, str) or (name := name_of(entry)) not in names:
        return False
    return entry == name or _parts_of(entry)[1] == find_rewrite(name).version


def are_outdated(entries: object) -> bool:
    """Return whether one of the entries, which may be anything, is a place of another version than is here."""
    texts = [each for each in entries if isinstance(each, str)] if isinstance(entries, list | tuple) else []
    named = [(name, version) for name, version, _ in map(_parts_of, texts) if version and _REWRITES.is_known(name)]
    return any(version != find_rewrite(name).version for name, version in named)


def name_of(entry: str) -> str:
    """Return the name of the rewrite in an entry of the option, which may name one of its places."""
    return _parts_of(entry)[0]


def chosen_places(entries: Iterable[str]) -> dict[str, frozenset[str] | None]:
    """Return the rewrites that an option names, in order, each with the places chosen for it; None for all of them."""
    chosen: dict[str, frozenset[str] | None] = {}
    for name, _, signature in map(_parts_of, entries):
        others = chosen.get(name, frozenset())
        chosen[name] = None if others is None or not signature else others | {signature}
    return chosen


def _parts_of(entry: str) -> tuple[str, int | None, str]:
    """Return the name, the version and the place in an entry; None and "" where it names the rewrite alone."""
    found = PLACE.fullmatch(entry)
    return (found["name"], int(found["version"]), found["place"]) if found else (entry, None, "")


def raced_rewrites(named: Iterable[str] | None) -> tuple[str, ...]:
    """Return the rewrites that `auto` may race: those that compute the same function, and those in `named`.

    An empty `named` allows none. Rewrites of installed packages are raced only if named.
    """
    if named is not None and not tuple(named):
        return ()
    exact = (name for name, rewrite in {**BUILT_IN, **_registered}.items() if rewrite.same_function)
    return tuple(dict.fromkeys((*exact, *map(name_of, named or ()))))


def in_keys(names: Iterable[str]) -> list[tuple[str, str | int]] | None:
    """Return what a decision's key has of the rewrites that its race may try, None if it may try none.

    Those that every race may try are left out, so that a new one forgets no decision. A built-in one that was named has
    its version; a user's own, whose version may stay when its code changes, a hash of its source too.
    """
    known = [(name, find_rewrite(name).version) for name in names if name in BUILT_IN]
    others = {name: fingerprint([name]) for name in names if name not in BUILT_IN}
    named = [each for each in known if not BUILT_IN[each[0]].same_function]
    return [*named, *others.items()] if known or others else None


def fingerprint(entries: Iterable[str]) -> str:
    """Return a hash of rewrites' names, places, versions and sources, for the keys of Inductor's caches."""
    named = [(entry, find_rewrite(name_of(entry))) for entry in entries]
    parts = [f"{entry} {rewrite.version} {_source_hash(rewrite)}" for entry, rewrite in named]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def resolved(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, imported if it is given as "module:function"."""
    imported: Callable[..., Any] = pkgutil.resolve_name(function) if isinstance(function, str) else function
    return imported


def _source_hash(rewrite: Rewrite) -> str:
    function = rewrite.patterns or rewrite.traced
    module = function.partition(":")[0] if isinstance(function, str) else getattr(function, "__module__", "")
    text = _main_text() if module == "__main__" else _module_text(module)
    if not isinstance(function, str):
        text += _code_text(function) + _values_of(function)
    return hashlib.sha256(text.encode()).hexdigest()


def _code_text(function: Callable[..., object]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # typed at a prompt, or not a plain function
        code = getattr(function, "__code__", None)
        return f"{code.co_code.hex()} {code.co_consts} {code.co_names}" if code else repr(function)


def _values_of(function: object) -> str:
    """Return the values that a function holds, as text: those of its closure and defaults.

    The text of an object with an address differs in each process, so that nothing is found that may be another's.
    """
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return repr((cells, getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)))


def _main_text() -> str:
    """Return the source of the running script; without one, what differs in each process."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return Path(path).read_text() if path else repr(os.getpid())
    except OSError:
        return repr(os.getpid())


@cache
def _module_text(module: str) -> str:
    """Return the source of a module; for one of ours, of all modules in its folder."""
    try:
        spec = find_spec(module) if module else None
    except (ImportError, ValueError):
        return ""
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return ""
    path = Path(spec.origin)
    files = sorted(path.parent.rglob("*.py")) if module.startswith(f"{OURS}.") else [path]
    return "\n".join(each.read_text() for each in files)
