"""Any other backend: keyword arguments bound to the signature of its function."""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from inspect import Parameter, Signature, getdoc, signature
from typing import Any, TypeAlias, Union

from backend_kwargs.backends import CapturedGraph, Compiler, Tell
from backend_kwargs.errors import BackendKwargsError, shown
from backend_kwargs.facts import Call, Compiled, CompileFacts
from backend_kwargs.options import (
    DYNAMO_BACKENDS,
    DYNAMO_FALLBACKS,
    CannotWorkError,
    Option,
    Options,
    limits,
)

CompilerFn: TypeAlias = Callable[..., Call]  # takes a graph module, its example inputs, and keyword arguments
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Takes:
    """What a compiler_fn accepts besides `(gm, example_inputs)`: named options, a mapping `options`, or anything."""

    named: Mapping[str, Option]
    required: tuple[str, ...]
    mapping: bool
    anything: bool

    @property
    def unchecked(self) -> str:
        """What it accepts besides `named`, "" if nothing."""
        return "anything in `options`" if self.mapping else "any keyword argument" if self.anything else ""

    def __str__(self) -> str:
        names = filter(None, (*self.named, self.unchecked))
        return f"it takes {', '.join(names) or 'none'}"


@dataclass(frozen=True, eq=False)
class DynamoCompiler(Compiler):
    """A dynamo backend `compiler_fn(gm, example_inputs, **kwargs)`, known as `name`.

    If `registered`, `name` is in dynamo's registry; otherwise it is "module:function".
    """

    name: str
    compiler_fn: CompilerFn
    registered: bool = False

    def __eq__(self, other: object) -> bool:
        # One function found by two spellings is one compiler.
        return isinstance(other, DynamoCompiler) and self.compiler_fn == other.compiler_fn

    def __hash__(self) -> int:
        return hash(getattr(self.compiler_fn, "__qualname__", type(self.compiler_fn).__qualname__))

    def found_by_name(self) -> bool:
        if self.registered:
            return True
        try:
            return pkgutil.resolve_name(self.name) is self.compiler_fn
        except (ImportError, AttributeError, ValueError):  # a lambda, a nested function, an object
            return False

    @cached_property
    def takes(self) -> Takes:
        return _takes(self.compiler_fn)

    def dynamo_name(self, templates: Sequence[str]) -> str:
        return self.name.removeprefix("dynamo:")

    def summary(self, templates: Sequence[str]) -> str:
        doc = getdoc(self.compiler_fn) if hasattr(self.compiler_fn, "__qualname__") else None
        return (doc or f"{self.name.removeprefix('dynamo:')}, as dynamo has it").partition("\n")[0]

    def option(self, name: str) -> Option:
        if name in self.takes.named:
            return self.takes.named[name]
        # A mode is an argument of torch.compile itself, so it is not put into a mapping of options.
        if self.takes.anything or (self.takes.mapping and name != "mode"):
            return Option(name)
        nearest = get_close_matches(str(name), list(self.takes.named), n=1)
        advice = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise BackendKwargsError(f"Backend {self.name!r} has no option {shown(name)}; {self.takes}.{advice}")

    def options(self) -> Mapping[str, Option]:
        return self.takes.named

    def unchecked(self) -> str:
        return self.takes.unchecked

    def verify(self, templates: Sequence[str], options: Options, tell: Tell) -> None:
        if missing := [name for name in self.takes.required if name not in options and name != "options"]:
            raise BackendKwargsError(f"Backend {self.name!r} needs a value for {', '.join(map(repr, missing))}.")
        known = self.name.removeprefix("dynamo:")
        needs, otherwise = DYNAMO_BACKENDS.get(known, ()), DYNAMO_FALLBACKS.get(known, "")
        for limit in limits(f"Backend {self.name!r}", needs, otherwise):
            if not otherwise:
                raise CannotWorkError(limit)
            tell(limit)

    def compile(self, graph: CapturedGraph, options: Options) -> Compiled:
        return Compiled(
            self.compiler_fn(graph.gm, graph.example_inputs, **self._kwargs(options)), CompileFacts(options)
        )

    def config(self, options: Options) -> dict[str, Any]:
        own: dict[str, Any] = getattr(self.compiler_fn, "get_compiler_config", dict)()
        return {**own, **options}

    def reset(self, options: Options) -> None:
        getattr(self.compiler_fn, "reset", lambda: None)()

    def _kwargs(self, options: Options) -> dict[str, Any]:
        if not self.takes.mapping:
            return dict(options)
        mapped = {name: value for name, value in options.items() if name not in self.takes.named}
        named = {name: value for name, value in options.items() if name in self.takes.named}
        return named | ({"options": mapped} if mapped or "options" in self.takes.required else {})


def _takes(compiler_fn: CompilerFn) -> Takes:
    from backend_kwargs.torch_internals.dynamo import is_torchs

    try:
        parameters = list(_signature(compiler_fn).parameters.values())
    except (TypeError, ValueError):  # some callables written in C have no signature
        return Takes({}, (), mapping=False, anything=True)
    graph_and_inputs = [p for p in parameters if p.kind in POSITIONAL][:2]
    named = [p for p in parameters if p.kind in BY_NAME and p not in graph_and_inputs]
    return Takes(
        {p.name: _option(p) for p in named if p.name != "options"},
        tuple(p.name for p in named if p.default is Parameter.empty),
        mapping=any(p.name == "options" for p in named),
        # torch's own debug backends and AotAutograd accept **kwargs, and only log that they ignore them.
        anything=any(p.kind is Parameter.VAR_KEYWORD for p in parameters) and not is_torchs(compiler_fn),
    )


def _option(parameter: Parameter) -> Option:
    hint = Any if parameter.annotation is Parameter.empty else parameter.annotation
    if parameter.default is None:
        hint = Union[hint, None]  # noqa: UP007 - `hint` may not be a class
    return Option(parameter.name, hint, None if parameter.default is Parameter.empty else parameter.default)


def _signature(compiler_fn: CompilerFn) -> Signature:
    try:
        return signature(compiler_fn, eval_str=True)
    except Exception:  # noqa: BLE001 - annotations may name imports that only type checkers make
        return signature(compiler_fn)
