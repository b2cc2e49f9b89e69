"""A backend as a value: a compiler with checked templates and options, which dynamo calls and compares."""

import base64
import binascii
import json
import pickle
import pkgutil
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cached_property, partial
from inspect import signature
from math import isinf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from backend_kwargs.backends import CapturedGraph, Compiler, Inputs
from backend_kwargs.backends.dynamo import DynamoCompiler
from backend_kwargs.backends.inductor.compiler import InductorCompiler
from backend_kwargs.backends.others import is_former, removed
from backend_kwargs.compile_records import recorded
from backend_kwargs.errors import (
    BackendKwargsError,
    BrokenPluginError,
    error_text,
    shown,
    unknown,
    warn_once,
    wrong_value,
)
from backend_kwargs.facts import Call, Compiled
from backend_kwargs.files import check_plain, write_whole
from backend_kwargs.keys import digest
from backend_kwargs.options import (
    DYNAMO_BACKENDS,
    Check,
    Layer,
    Limit,
    Option,
    Options,
    check,
    check_length,
    consent,
    convert,
    copied,
    join_spec,
    merge,
    require,
    same,
    untrusted,
)
from backend_kwargs.options.templates import template_names
from backend_kwargs.pipeline import COMPILERS, compile_graph, request_of
from backend_kwargs.stores import Store

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from backend_kwargs.auto.question import Request

CompilerFn: TypeAlias = Callable[..., Any]  # a backend of dynamo's: takes (gm, example_inputs, **kwargs)
CONFIG_VERSION = 1
OURS = COMPILERS  # looked up before dynamo's registry; "dynamo:NAME" finds a backend of dynamo's of one of these names


class Backend:
    """What `make_backend` returns and `torch.compile(..., backend=...)` takes. Immutable; compares by value."""

    # Neither a frozen dataclass nor slotted: dynamo's register_backend() sets `_tags` on it.

    def __init__(self, compiler: Compiler, templates: tuple[str, ...] = (), layers: tuple[Layer, ...] = ()) -> None:
        self._compiler = compiler
        self._templates = templates
        self._layers = layers
        self._options = merge(layers)

    @cached_property
    def compiler_name(self) -> str:
        """A name under which dynamo has registered this compiler; dynamo's own wrappers have it too."""
        return self._compiler.dynamo_name(self._templates)

    @property
    def __name__(self) -> str:
        return self.compiler_name

    @property
    def spec(self) -> str:
        """The backend's name and templates, in the form that `make_backend` takes."""
        return join_spec(self._compiler.name, self._templates)

    @property
    def takes_inductor_options(self) -> bool:
        """Whether the options are Inductor's."""
        return self._compiler.takes_inductor_options

    @property
    def summary(self) -> str:
        """A description in one line."""
        return self._compiler.summary(self._templates)

    @property
    def options(self) -> Options:
        """Every option that any layer sets; read-only."""
        return MappingProxyType(copied(self._options))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Where the options come from, lowest first."""
        return self._layers

    def bind(self, source: str, given: Options, coerce: Check = check) -> "Backend":
        """Return this backend with `given` merged on top, as a layer named `source`; raise if an option is wrong."""
        if not given:
            return self
        reading = self._compiler.read(source, given, coerce)
        return Backend(self._compiler, self._templates + reading.templates, self._layers + reading.layers)

    def verify(self, tell: Callable[[Limit], None] = warn_once) -> None:
        """Raise if this backend cannot compile here; call `tell` for each limit that has a documented fallback."""
        self._compiler.verify(self._templates, self._options, tell)

    def option(self, name: str) -> Option:
        """Return the option called `name`."""
        return self._compiler.option(name)

    def known_options(self) -> Mapping[str, Option]:
        """Return all options with a known name."""
        return self._compiler.options()

    def unchecked_options(self) -> str:
        """Describe the arguments that are accepted beyond those without a check, "" if there are none."""
        return self._compiler.unchecked()

    def limits(self) -> Mapping[str, Limit]:
        """Return the reason for each option that has no effect on this machine or with the other options."""
        return self._compiler.limits(self._options)

    def __call__(
        self,
        gm: "GraphModule",
        example_inputs: Inputs,
        *,
        mode: str | None = None,
        options: Options | None = None,
        config_patches: Options | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Call:
        """Compile the graph `gm`, as dynamo asks; return what the compiler returned, unwrapped."""
        bound = self.called_with(mode=mode, options=options, config_patches=config_patches, **kwargs)
        return bound.compile(CapturedGraph(gm, example_inputs, name)).call

    def called_with(
        self,
        *,
        mode: str | None = None,
        options: Options | None = None,
        config_patches: Options | None = None,
        **kwargs: Any,
    ) -> "Backend":
        """Return this backend with the options of a call by dynamo: those that torch.compile was given."""
        # `config_patches` come only from dynamo's environment variables.
        call_options = {**(options or {}), **kwargs, **({} if mode is None else {"mode": mode})}
        return self.bind("torch.compile", call_options).bind("dynamo's config_patches", config_patches or {})

    def compile(self, graph: CapturedGraph) -> Compiled:
        """Compile a graph, and return its callable with what is known about it, which `report` reads too."""
        from backend_kwargs.torch_internals.dynamo import BY_NAME, REGISTERED

        self._compiler.verify(self._templates, self._options, warn_once)
        REGISTERED.setdefault(*BY_NAME)
        return recorded(self, graph.gm, lambda: compile_graph(self._compiler, graph, self._options))

    def request(self, graph: CapturedGraph) -> "Request":
        """Return what `auto` would be asked for a graph, for those who ask it otherwise."""
        return request_of(self._compiler, graph, self._options)

    def get_compiler_config(self) -> dict[str, Any]:
        """Return the compiler's whole configuration with these options."""
        return self._compiler.config(self._options)

    def inductor_config(self, *, ahead_of_time: bool = False) -> dict[str, Any]:
        """Return the options as a plain dict: AOTInductor's `inductor_configs`, vLLM's `inductor_compile_config`.

        `ahead_of_time` is for AOTInductor alone: the dict may then contain `freezing`, which has no effect elsewhere.

        Raises:
            BackendKwargsError: if an option works only in this package, or the compiler is not Inductor.

        """
        if not isinstance(self._compiler, InductorCompiler):
            raise BackendKwargsError(f"Backend {self.spec!r} has no options of Inductor.")
        return self._compiler.plain(self._options, ahead_of_time=ahead_of_time)

    def reset(self) -> None:
        """Free what compiling keeps in this process, such as CUDA-graph trees; torch._dynamo.reset() calls this."""
        from backend_kwargs.auto.process_memory import end_alternations

        end_alternations()
        self._compiler.reset(self._options)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Backend):
            return NotImplemented
        return (
            self._compiler == other._compiler
            and self._templates == other._templates
            and same(self._options, other._options)
        )

    def __hash__(self) -> int:
        # Values may be unhashable; equal backends have the same option names, so the names suffice.
        return hash((self._compiler, self._templates, frozenset(self._options)))

    # Lightning and transformers copy the backend they pass to torch.compile; dynamo would recompile for an unequal
    # copy.
    def __copy__(self) -> "Backend":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Backend":
        return self

    def __repr__(self) -> str:
        options = self._own_options()
        target = (
            repr(self.spec)
            if self._compiler.found_by_name()
            else shown(getattr(self._compiler, "compiler_fn", self.spec))
        )
        written = ", ".join(f"{name!r}: {_literal(value)}" for name, value in options.items())
        return f"make_backend({target}{f', {{{written}}}' if options else ''})"

    def __reduce__(self) -> tuple[object, ...]:
        own = self._own_options()
        for name, value in own.items():
            if not _pickles(value):
                raise _not_writable(name, value)
        return _restored, (self._writable_spec(), own)

    @classmethod
    def from_config(cls, config: Options | str, *, trust: bool = False) -> "Backend":
        """Make a backend from a mapping, its JSON text, or base64 of that; `backend` defaults to tmpl-inductor.

        Besides options it takes `template`, `mode`, `freezing`, `inductor_config`, and the keys of `to_config`. A
        backend or an option that is code, such as a function to import or a compiler's path, raises unless you pass
        `trust=True`.
        """
        fields = _config_mapping(config)
        version = fields.pop("version", CONFIG_VERSION)
        if type(version) is not int or version not in range(1, CONFIG_VERSION + 1):
            raise BackendKwargsError(
                f"Config version {shown(version)} is not 1 to {CONFIG_VERSION}; update backend-kwargs."
            )
        check_plain("A config", fields)
        backend = find_backend(fields.pop("backend", "tmpl-inductor"), trust=consent(trust))
        return backend.bind("config", fields, _from_json if trust else untrusted(_from_json))

    def to_config(self) -> dict[str, Any]:
        """Return plain data that `from_config` reads: sorted, with a version; raise if a value cannot be written."""
        options = {name: self._written(name, value) for name, value in sorted(self._own_options().items())}
        return {"backend": self._writable_spec(), "options": options, "version": CONFIG_VERSION}

    def to_json(self, path: str | Path) -> None:
        """Write `to_config` to a file atomically."""
        write_whole(Path(path), json.dumps(self.to_config(), indent=2, sort_keys=True) + "\n")

    def key(self) -> str:
        """Return a hash of `to_config`, 64 hexadecimal digits, the same in every process and on every machine."""
        return digest(self.to_config(), sort_keys=True)

    def _own_options(self) -> dict[str, Any]:
        """Return the options that differ from what the templates set."""
        of_templates = merge(map(self._compiler.template, self._templates))
        own = {k: v for k, v in self._options.items() if k not in of_templates or not same(of_templates[k], v)}
        return copied(own)  # type: ignore[no-any-return]

    def _writable_spec(self) -> str:
        """Return the spec if another process can find this compiler by it; else raise."""
        if not self._compiler.found_by_name():
            raise BackendKwargsError(
                f"Backend {self.spec!r} cannot be written: use a function at the top of a module, or register_backend."
            )
        return self.spec

    def _written(self, name: str, value: object) -> object:
        try:
            written = json.loads(json.dumps(_as_json(value), allow_nan=False))
            if same(Backend(self._compiler).bind("config", {name: written}, _from_json)._options[name], value):
                return written
        except (TypeError, ValueError):
            pass
        raise _not_writable(name, value)


def find_backend(spec: str, *, trust: bool = True) -> Backend:
    """Return the backend that `spec` names, with its templates' options only; raise BackendKwargsError if none does.

    The order of lookup: this package's backends, dynamo's registry (with backends registered here), entry points, and
    "module:function", which is imported only if `trust` is true.
    """
    if not isinstance(spec, str):
        raise wrong_value("A backend's spec", "a str", spec)
    check_length("A backend's spec", spec)
    head, colon, rest = spec.partition(":")
    if head in OURS:
        given = {"template": rest} if colon else {}
        return Backend(OURS[head](head)).bind("spec", given)
    forced = head == "dynamo"
    if found := find_in_dynamo(rest if forced else spec):
        return found
    if colon and not forced and head in _dynamo_names():
        raise BackendKwargsError(f"Backend {head!r} has no templates, got {shown(rest)}.")
    if colon and not forced and not get_close_matches(head, OURS, n=1, cutoff=0.8):
        if not trust:
            raise BackendKwargsError(
                f"Backend {shown(spec)} is code to import, which a config may name only if it is trusted: "
                "pass trust=True if you trust its author."
            )
        return backend_of_function(_imported(spec))
    require(f"Backend {spec!r}", *DYNAMO_BACKENDS.get(rest if forced else spec, ()))
    if is_former(spec):
        raise removed(spec)
    if set(spec.split("+")) <= set(template_names()):
        raise BackendKwargsError(f"Unknown backend {spec!r}; it is a template. Did you mean 'tmpl-inductor:{spec}'?")
    kind, name, ours = ("dynamo backend", rest, ()) if forced else ("backend", spec, OURS)
    raise unknown(kind, name, [*ours, *_dynamo_names()], otherwise="`backend-kwargs list` shows all.")


def backend_of_function(compiler_fn: CompilerFn, name: str = "") -> Backend:
    """Return the backend that calls `compiler_fn(gm, example_inputs, **kwargs)`, called `name` or as it is imported."""
    if isinstance(compiler_fn, Backend):
        return compiler_fn
    if not callable(compiler_fn):
        raise wrong_value("A backend's spec", "a str or a callable", compiler_fn)
    if isinstance(compiler_fn, partial) and not compiler_fn.args:
        # Two partials with the same content are unequal; one function with the same bound options is equal.
        return backend_of_function(compiler_fn.func, name).bind("functools.partial", compiler_fn.keywords)
    _check_takes_graph(compiler_fn)
    named = compiler_fn if hasattr(compiler_fn, "__qualname__") else type(compiler_fn)
    if name:
        return Backend(DynamoCompiler(name, compiler_fn, registered=True))
    return Backend(DynamoCompiler(f"{named.__module__}:{named.__qualname__}", compiler_fn))


def _check_takes_graph(compiler_fn: CompilerFn) -> None:
    if _is_module(compiler_fn) or (isinstance(compiler_fn, type) and "__call__" not in dir(compiler_fn)):
        raise wrong_value("A backend", "a callable that takes (gm, example_inputs)", compiler_fn)
    try:
        taken = signature(compiler_fn)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        taken.bind_partial(None, None)
    except TypeError:
        raise wrong_value("A backend", "a callable that takes (gm, example_inputs)", compiler_fn) from None


def _is_module(value: object) -> bool:
    """Return whether `value` is a torch.nn.Module or such a class, whose signature takes anything."""
    if not (torch := sys.modules.get("torch")):
        return False
    return issubclass(value if isinstance(value, type) else type(value), torch.nn.Module)


def find_in_dynamo(name: str) -> Backend | None:
    """Return the backend that dynamo knows as `name`, None if there is none."""
    if name not in _dynamo_names():
        return None
    from backend_kwargs.torch_internals.dynamo import lookup_backend

    try:
        compiler_fn = lookup_backend(name)  # this imports the target of an entry point
    except BackendKwargsError:  # an entry point of ours, of a backend that was removed
        raise
    except Exception as error:  # an entry point of some installed package, which may fail in any way
        raise BrokenPluginError(f"Backend {name!r} does not load: {error_text(error)}.") from error
    if isinstance(compiler_fn, Backend):
        return compiler_fn
    return Backend(DynamoCompiler(f"dynamo:{name}" if name in OURS else name, compiler_fn, registered=True))


def _dynamo_names() -> list[str]:
    from backend_kwargs.torch_internals.dynamo import list_backends

    return list_backends()


def _imported(qualified: str) -> Any:
    try:
        return pkgutil.resolve_name(qualified)
    except Exception as error:  # importing a module may fail in any way
        raise BackendKwargsError(
            f"No backend is called {shown(qualified)}, and it cannot be imported: {error_text(error)}."
        ) from error


def _restored(spec: str, options: Options) -> Backend:
    return find_backend(spec).bind("unpickled", options)


def _literal(value: object) -> str:
    """Return Python code for a value: its repr, or a call of `float` for an infinite number, whose repr is a name."""
    return f"float('{value}')" if isinstance(value, float) and isinf(value) else repr(value)


def _pickles(value: object) -> bool:
    try:
        return same(pickle.loads(pickle.dumps(value)), value)  # noqa: S301 - pickled in this line
    except Exception:  # noqa: BLE001 - whatever a value's own __reduce__ raises
        return False


def _not_writable(name: str, value: object) -> BackendKwargsError:
    return BackendKwargsError(
        f"Option {name!r} cannot be written: {shown(value)} ({type(value).__name__}) would not read back equal."
    )


def _config_mapping(config: object) -> dict[str, Any]:
    if isinstance(config, str):
        try:
            # The command base64(1) breaks lines.
            config = json.loads(
                config if config.lstrip().startswith("{") else base64.b64decode("".join(config.split()), validate=True)
            )
        except (ValueError, binascii.Error, RecursionError):
            raise wrong_value("A config", "a mapping, its JSON text, or base64 of that", config) from None
    if not isinstance(config, Mapping):
        raise wrong_value("A config", "a mapping, its JSON text, or base64 of that", config)
    return dict(config)


def _from_json(option: Option, value: object, kind: str) -> object:
    # JSON has its own null, numbers and lists, so a string stays text if the option may be text.
    as_it_is = option.type is Any or (isinstance(value, str) and str in get_args(option.type))
    return value if as_it_is else convert(option, value, kind)


def _as_json(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Store):
        value = value.given
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_as_json, value))
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    raise TypeError(type(value).__name__)
