"""Options: types, the check of values, layers, the conversion from text, specs, and which options are code.

A spec is `"backend[:template[+template]]"`; a candidate may have options in brackets. Imports no torch.

A file may set only data, unless it is loaded with `trust=True`. An option is *code* if its value can make this process
run a program, import, call or load something, change a command line, or read or write a file that the value names. It
is *data* if it only chooses among what is already there. Numbers and words from a fixed list are data; other options
are data if a table here or the module that declares them names them, and code otherwise. So a new option of a new torch
is code until someone has reviewed it.
"""

import json
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import partial
from operator import is_
from pathlib import PurePath
from string import whitespace
from types import GenericAlias, MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, ForwardRef, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from backend_kwargs.errors import BackendKwargsError, shortened, shown, unknown, wrong_value
from backend_kwargs.files import why_not_plain

LONGEST_TYPE = 120
Options = Mapping[str, Any]  # values by name
# Options that permit what they name, so that `auto` also races code without it: (the user's value, a candidate's).
PERMITTING: Mapping[str, tuple[object, object]] = MappingProxyType({"freezing": (True, False)})


@dataclass(frozen=True, slots=True)
class Option:
    """One option; `type` is any typing form, Any if it is unknown."""

    name: str
    type: object = Any
    default: Any = None
    doc: str = ""
    env: tuple[str, ...] = ()  # environment variables that set the default
    env_force: tuple[str, ...] = ()  # environment variables that override any patch
    forced: bool = False  # one of env_force is set in this process
    forced_value: object = None
    alias: str | None = None
    deprecated: str | None = None
    data: bool = False  # a file may set it, whatever its type: see `trust`


@dataclass(frozen=True, slots=True)
class Where:
    """In an Annotated type: a condition on the value, in words and as a function."""

    words: str
    holds: Callable[[Any], bool]


AtLeastOne = Annotated[int, Where("of at least 1", lambda number: number >= 1)]
Tolerance = Annotated[float, Where("above 0", lambda tolerance: tolerance > 0)]


def declared(settings: type, data: Collection[str] = ()) -> Mapping[str, Option]:
    """Return the options declared by a dataclass's fields, each `Annotated[type, doc]` with its default."""
    hints = get_type_hints(settings, include_extras=True)
    options = {}
    for field in (field for field in fields(settings) if field.init):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        *besides, doc = hints[field.name].__metadata__
        wanted = hints[field.name].__origin__
        wanted = Annotated[(wanted, *besides)] if besides else wanted
        options[field.name] = Option(field.name, wanted, default, doc, data=field.name in data)
    return MappingProxyType(options)


def lookup(name: str, catalogue: Mapping[str, Option], kind: str = "option", otherwise: str = "") -> Option:
    """Return the option called `name`, with `-` read as `_`; else raise, with the closest name or `otherwise`."""
    if not isinstance(name, str):
        raise wrong_value(f"{_capital(kind)} name", "str", name)
    plain = name.replace("-", "_")
    if plain in catalogue:
        return catalogue[plain]
    grouped = [known for known in catalogue if known.endswith(f".{plain}")]
    advice = f"Did you mean {grouped[0]!r}?" if grouped else otherwise
    raise unknown(kind, name, grouped or catalogue, otherwise=advice)


def check(option: Option, value: object, kind: str = "option") -> Any:
    """Return `value` if it has the option's type (an int becomes a float if that is the type); else raise."""
    fitted = value if type(value) is option.type else _fit(option.type, value)
    if fitted is _MISFIT:
        raise _wrong(option, value, kind)
    return fitted


def convert(option: Option, value: object, kind: str = "option") -> Any:
    """Return `value`, from text, JSON or TOML, converted to the option's type; else raise.

    Text for a str is not changed; for an untyped option it is parsed as JSON if possible; "a,b" may be a list of str.
    """
    for reading in _readings(option.type, value):
        fitted = _fit(option.type, reading, as_text=True)
        if fitted is not _MISFIT:
            return fitted
    raise _wrong(option, value, kind, _spelling(option.type) if isinstance(value, str) else "")


def describe(wanted: object) -> str:
    """Return a short name for a typing form, as a person would write it: "bool", "int | None", "'none' | 'all'"."""
    return shortened(_described(wanted), LONGEST_TYPE)


def _wrong(option: Option, value: object, kind: str, how: str = "") -> BackendKwargsError:
    return wrong_value(f"{_capital(kind)} {shown(option.name)}", describe(option.type) + how, value)


def _capital(kind: str) -> str:
    return kind[:1].upper() + kind[1:]


def _spelling(wanted: object) -> str:
    """Return a note on how to write values of a type as text, "" for plain words and numbers."""
    text = describe(wanted)
    if "callable" in text:
        return " (as 'package.module:function')"
    return " (as JSON)" if "[" in text or wanted in (list, tuple, set, frozenset, dict) else ""


def _described(wanted: object) -> str:
    origin, args = get_origin(wanted), get_args(wanted)
    if _unknown(wanted):
        return "anything"
    if wanted is None or wanted is NoneType:
        return "None"
    if origin in (Union, UnionType):
        return " | ".join(map(_described, args))
    if origin is Literal:
        return " | ".join(map(repr, args))
    if origin is Annotated:
        return " ".join((_described(args[0]), *(where.words for where in _wheres(args))))
    if Callable in (wanted, origin):
        return "callable"
    name = getattr(origin or wanted, "__name__", None) or str(wanted)
    return f"{name}[{', '.join('...' if a is ... else _described(a) for a in args)}]" if args else name


# --- layers: later ones take precedence, and each value keeps the name of its layer -----------------------------------


def copied(value: Any) -> Any:
    """Copy the containers in `value` and share their elements, so that neither side sees changes by the other."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(copied(item) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class Layer:
    """Options from one source, and the source's name, such as "template max_autotune"."""

    source: str
    options: Options  # a copy, since torch.compile removes some options from the caller's dict


def merge(layers: Iterable[Layer]) -> Options:
    """Return each option's value in the last layer that sets it."""
    return {name: value for layer in layers for name, value in layer.options.items()}


def sources(layers: Iterable[Layer]) -> dict[str, str]:
    """Return the name of the layer from which each option's value comes."""
    return {name: layer.source for layer in layers for name in layer.options}


def with_users(options: Options, users: Options) -> Options:
    """Return what a graph is compiled with under a candidate of `auto`: its `options`, with the user's own on top.

    The exception are options of the user's that only permit what they name: `freezing=True` lets a candidate win that
    sets it to False.
    """
    return {**options, **standing(users, options)}


def standing(users: Options, options: Options) -> Options:
    """Return the user's own options that precede a candidate's `options`: all but those that only permit."""
    return {name: value for name, value in users.items() if PERMITTING.get(name) != (value, options.get(name))}


def same(a: Any, b: Any) -> bool:
    """Return whether two option values have equal value and type: `1`, `1.0` and `True` differ, `nan` equals `nan`."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    try:
        equal = a == b
        return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
    except Exception:  # noqa: BLE001 - such as tensors of two shapes: values that cannot be compared are not equal
        return False


# --- whether a value has a type -------------------------------------------------------------------------------------

_MISFIT: object = object()


def _unknown(wanted: object) -> bool:
    # An annotation left as a string refers to an import of type checkers only, so it cannot be resolved here.
    return wanted is Any or isinstance(wanted, str | ForwardRef | TypeVar)


def _fit(wanted: object, value: object, as_text: bool = False) -> object:
    """Return `value` converted to the type `wanted`, or _MISFIT.

    With `as_text`, also converts what JSON cannot write: a list to a tuple or set, "module:name" to a callable.
    """
    if _unknown(wanted):
        return value
    if wanted is None or wanted is NoneType:
        return value if value is None else _MISFIT
    fitter = _FITTERS.get(get_origin(wanted) or wanted)
    return fitter(get_args(wanted), value, as_text) if fitter else _fit_class(wanted, value)


def _fit_class(wanted: Any, value: object) -> object:
    if wanted is int and isinstance(value, bool):
        return _MISFIT
    if wanted is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return _MISFIT
    if wanted is str and isinstance(value, PurePath):  # as the text that a config can hold
        return str(value)
    try:
        return value if isinstance(value, get_origin(wanted) or wanted) else _MISFIT
    except TypeError:  # a form that isinstance cannot check, such as a Protocol
        return value


def _fit_union(args: tuple[object, ...], value: object, as_text: bool) -> object:
    fits = [fitted for arg in args if (fitted := _fit(arg, value, as_text)) is not _MISFIT]
    return next((fitted for fitted in fits if fitted is value), fits[0] if fits else _MISFIT)


def _fit_literal(args: tuple[object, ...], value: object, as_text: bool) -> object:
    # 1 == True == 1.0, but their meanings differ.
    return value if any(type(arg) is type(value) and arg == value for arg in args) else _MISFIT


def _fit_annotated(args: tuple[object, ...], value: object, as_text: bool) -> object:
    fitted = _fit(args[0], value, as_text)
    return fitted if fitted is _MISFIT or all(where.holds(fitted) for where in _wheres(args)) else _MISFIT


def _wheres(args: tuple[object, ...]) -> list[Where]:
    return [arg for arg in args if isinstance(arg, Where)]


def _fit_callable(args: tuple[object, ...], value: object, as_text: bool) -> object:
    if as_text and isinstance(value, str) and ":" in value:
        with suppress(ImportError, AttributeError, ValueError):
            value = pkgutil.resolve_name(value)
    return value if callable(value) else _MISFIT


def _fit_container(make: Any, args: tuple[object, ...], value: Any, as_text: bool) -> object:
    if not isinstance(value, make) and not (as_text and make is not dict and isinstance(value, list)):
        return _MISFIT
    items = list(value.items() if make is dict else value)
    wants = _item_types(make, args, len(items))
    fitted = [_fit(wanted, item, as_text) for wanted, item in zip(wants, items, strict=False)]
    if len(wants) != len(items) or any(item is _MISFIT for item in fitted):
        return _MISFIT
    # The original if nothing changed, to keep its identity and its subclass.
    return value if isinstance(value, make) and all(map(is_, fitted, items)) else _made(make, fitted)


def _item_types(make: object, args: tuple[object, ...], count: int) -> list[object]:
    if make is dict:
        return [GenericAlias(tuple, args or (Any, Any))] * count
    if make is tuple and args and args[-1] is not ...:
        return list(args)
    return [args[0] if args else Any] * count


def _made(make: Callable[[list[object]], object], items: list[object]) -> object:
    try:
        return make(items)
    except TypeError:  # a set with an unhashable element
        return _MISFIT


_FITTERS: Mapping[object, Callable[[tuple[object, ...], object, bool], object]] = {
    Union: _fit_union,
    UnionType: _fit_union,
    Literal: _fit_literal,
    Annotated: _fit_annotated,
    Callable: _fit_callable,
} | {make: partial(_fit_container, make) for make in (list, set, frozenset, tuple, dict)}


# --- the meaning of a text ------------------------------------------------------------------------------------------

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None, "null": None}
_FLAGS = {"1": True, "0": False}


def _readings(wanted: object, value: object) -> Iterator[object]:
    """Yield the possible meanings of `value`, likeliest first; the first that fits the type is used."""
    if not isinstance(value, str):
        yield value
        return
    word = value.strip().lower()
    with suppress(ValueError, RecursionError):
        read = json.loads(value)
        # Quotes are part of the text for a str option; for an unknown type they are JSON's.
        if not why_not_plain(read) and (_unknown(wanted) or not isinstance(read, str)):
            yield read
    yield from (table[word] for table in (_WORDS, _FLAGS) if word in table)
    if not _unknown(wanted):
        with suppress(ValueError):
            yield float(word)
    yield value
    if not word.startswith(("[", "{")):  # JSON that does not fit stays an error
        yield split_outside(value)


NAME = re.compile(r"[A-Za-z_][\w.-]*")
LONGEST = 10_000  # characters of a spec
# Matched from one comma to the next and without ambiguity: its time is linear in the length of any text.
CANDIDATE = re.compile(r"([^\[\],]+)(?:\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\s*)?(?:,|\Z)")


def join_spec(backend: str, templates: Sequence[str]) -> str:
    """Return the spec of a backend and its templates, of which later ones take precedence."""
    return f"{backend}:{'+'.join(templates)}" if templates else backend


def split_templates(text: str) -> tuple[str, ...]:
    """Split `"a+b"` into names; raise if one is empty or not a valid name."""
    check_length("Template names", text)
    names = tuple(text.split("+")) if isinstance(text, str) else (text,)
    for name in names:
        check_name("A template", name)
    return names


def check_name(what: str, name: object) -> None:
    """Raise if `name` cannot be part of a spec."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong_value(f"{what}'s name", "letters, digits and '_', '-', '.', a letter first", name)


def check_length(what: str, text: object) -> None:
    """Raise if `text` is longer than any spec, which may take hours to look up."""
    if isinstance(text, str) and len(text) > LONGEST:
        raise wrong_value(what, f"at most {LONGEST} characters long", text)


def split_candidates(text: str) -> list[tuple[str, dict[str, str]]]:
    """Split `"spec[name=value,...],spec"` at the commas outside brackets into specs and their options as text."""
    candidates: list[tuple[str, dict[str, str]]] = []
    rest, at = text.rstrip(f"{whitespace},"), 0
    while at < len(rest) or not candidates:
        match = CANDIDATE.match(rest, at)
        if not match or not (spec := match[1].strip()):
            raise BackendKwargsError(f"Cannot read backends {shown(text)}; write them 'a,b:template,c[option=value]'.")
        # A part after a comma without "name=" belongs to the value before it: "backends=ATEN,TRITON".
        assignments = re.split(r",\s*(?=[\w.\-]+\s*=)", match[2]) if match[2] else []
        candidates.append((spec, dict(map(split_assignment, assignments))))
        at = match.end()
    return candidates


def join_candidate(spec: str, options: Mapping[str, str]) -> str:
    """Write one of the candidates that `split_candidates` reads."""
    return f"{spec}[{','.join(f'{name}={value}' for name, value in options.items())}]" if options else spec


def split_outside(text: str) -> list[str]:
    """Split "a,b[x=1,y=2]" at the commas outside brackets."""
    return [part.strip() for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text) if part.strip()]


def split_assignment(text: str) -> tuple[str, str]:
    """Split `"name=value"`."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise BackendKwargsError(f"Cannot read option {shown(text)}; write it 'name=value'.")
    return name.strip(), value.strip()


def consent(trust: object) -> bool:
    """Return `trust`; raise if it is no bool: "false", as a configuration may write it, would be consent."""
    if not isinstance(trust, bool):
        raise wrong_value("`trust`", "True or False", trust)
    return trust


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Inductor's options with str, list, callable or Any in their type, from torch 2.11 to 2.15.
INDUCTOR_DATA = _names(
    """
    _conv_default_backends add_pre_grad_passes aot_inductor.filtered_kernel_names autoheuristic_collect
    autoheuristic_use compile_worker_mode cpp.gemm_cache_blocking cpp.gemm_thread_factors
    cuda.cutlass_enabled_ops cuda.cutlass_instantiation_level cuda.cutlass_op_allowlist_regex
    cuda.cutlass_op_denylist_regex cudagraph_unsafe_unbacked_ops custom_should_partition_ops
    cutlass.cutlass_enabled_ops cutlass.cutlass_instantiation_level cutlass.cutlass_op_allowlist_regex
    cutlass.cutlass_op_denylist_regex disabled_passes estimate_op_runtime layout_opt_default
    max_autotune_conv_backends max_autotune_conv_bwd_input_backends max_autotune_conv_bwd_weight_backends
    max_autotune_gemm_backends nvgemm_pdl post_grad_fusion_options pre_grad_fusion_options
    profile_bandwidth_regex remove_pre_grad_passes test_configs.autotune_choice_desc_regex
    test_configs.autotune_choice_name_regex test_configs.distort_benchmarking_result trace.dot_graph_shape
    worker_start_method xpu.cutlass_enabled_ops xpu.cutlass_instantiation_level xpu.cutlass_op_allowlist_regex
    xpu.cutlass_op_denylist_regex
    """
)
# Names of what is registered in this process or installed.
OWN_DATA = frozenset({"rewrites"})
AUTO_DATA = frozenset({"candidates"})
# Takes an option, a value, and the option's name in an error; returns the value converted to the option's type.
Check = Callable[[Option, object, str], object]
INERT = (bool, int, float, None, NoneType)


def is_data(option: Option) -> bool:
    """Return whether a file may set `option`: by its type, or because a table lists it."""
    return option.data or chooses(option.type)


def chooses(wanted: object) -> bool:
    """Return whether a type contains only numbers and words from a fixed list."""
    origin, args = get_origin(wanted), get_args(wanted)
    if wanted in INERT or origin is Literal:
        return True
    if origin is Annotated:
        return chooses(args[0])
    holds = origin in (Union, UnionType, list, tuple, set, frozenset, dict)
    return holds and bool(args) and all(arg is ... or chooses(arg) for arg in args)


def untrusted(coerce: Check) -> Check:
    """Return `coerce` for values from a file: it rejects options that are code before it looks at their values."""

    def refusing(option: Option, value: object, kind: str) -> object:
        if not is_data(option) and names_something(value):
            raise BackendKwargsError(
                f"{kind[:1].upper()}{kind[1:]} {option.name!r} is code, which a file may set only if it is trusted: "
                "pass trust=True if you trust its author."
            )
        return coerce(option, value, kind)

    return refusing


def names_something(value: object) -> bool:
    """Return whether `value` contains a text or an object; without either it cannot name anything."""
    if isinstance(value, Mapping):
        return any(map(names_something, value.values())) or any(map(names_something, value))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(names_something, value))
    return not isinstance(value, bool | int | float | NoneType)
