"""Templates: named sets of Inductor options, their sources, and files of them.

A name is looked up in the built-in table, then among those registered in this process, then among the entry points
of installed packages; only the entry point with that name is loaded.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from backend_kwargs.errors import BackendKwargsError, BrokenPluginError, error_text, unknown, wrong_value
from backend_kwargs.files import read_toml
from backend_kwargs.options.catalogue import inductor_options
from backend_kwargs.options.option import Options, check_name, copied, same, split_templates

ENTRY_POINT_GROUP = "backend_kwargs.templates"


T = TypeVar("T")


@dataclass(frozen=True)
class NamedValues(Generic[T]):
    """Values of one kind, such as templates.

    `read` converts the object of an entry point of `group`, or returns None if it is not what is `wanted`. `advice`
    returns the next step for a name that is close to no other.
    """

    kind: str
    group: str
    built_in: Mapping[str, T]
    read: Callable[[EntryPoint, object], T | None]
    wanted: str
    advice: Callable[[list[str]], str]
    registered: dict[str, T] = field(default_factory=dict)

    def find(self, name: str) -> T:
        """Return the value called `name`, or raise with the nearest name."""
        if self.is_known(name):
            return self.built_in[name] if name in self.built_in else self.registered[name]
        for entry in entry_points(group=self.group, name=name):
            try:
                loaded = entry.load()
            except Exception as error:  # a plug-in may fail in any way, and must not break the others
                what = f"{self.kind.capitalize()} {entry.name!r} of {entry.value!r}"
                raise BrokenPluginError(f"{what} does not load: {error_text(error)}.") from error
            value = self.read(entry, loaded)
            if value is None:
                raise wrong_value(f"Entry point {entry.value!r}", self.wanted, loaded)
            return value
        raise unknown(self.kind, name, self.names(), otherwise=self.advice(self.names()))

    def names(self) -> list[str]:
        """Return the names of all values."""
        plugged_in = (entry.name for entry in entry_points(group=self.group))
        return list(dict.fromkeys((*self.built_in, *self.registered, *plugged_in)))

    def is_known(self, name: str) -> bool:
        """Return whether `name` is built in or registered, so that no entry point is needed."""
        return name in self.built_in or name in self.registered

    def register(self, values: Mapping[str, T], equal: Callable[[T, T], bool], other: str) -> None:
        """Register all or none; the same value may be registered again, another one under a used name raises."""
        for name, value in values.items():
            check_name(f"A {self.kind}", name)
            if self.is_known(name) and not equal(self.find(name), value):
                raise BackendKwargsError(f"{self.kind.capitalize()} {name!r} {other}; choose another name.")
        self.registered.update({name: value for name, value in values.items() if not self.is_known(name)})


@dataclass(frozen=True, slots=True)
class Template:
    """A named set of Inductor options.

    `where_known` has options of some torch releases only: they apply if the installed release has them. `needs` names
    entries of `options.machine.REQUIREMENTS`; `otherwise` names the fallback if one is not met.
    """

    summary: str
    options: Options = field(default_factory=dict)
    costs: str = ""
    needs: tuple[str, ...] = ()
    otherwise: str = ""
    where_known: Options = field(default_factory=dict)

    def known_options(self) -> Options:
        """Return the options that the installed torch has."""
        return {**self.options, **{k: v for k, v in self.where_known.items() if k in inductor_options()}}


ORDINARY_KERNELS = "ordinary kernels are compiled"

_TUNED = Template(
    "Time candidate kernels for GEMMs, tune the others, replay CUDA graphs",
    {"max_autotune": True, "coordinate_descent_tuning": True, "triton.cudagraphs": True},
    costs="minutes of compile time, memory of its own for each graph; the next call overwrites results",
    needs=("gpu", "triton", "large_gpu"),
    otherwise="only the C++ GEMM templates are tried, where weights are frozen",
)

BUILT_IN: Mapping[str, Template] = MappingProxyType(
    {
        "default": Template("Inductor's defaults: fused kernels, library GEMMs"),
        "auto": Template(
            "Race candidates for each graph, keep the fastest that passes the accuracy check, remember it",
            {"auto": True},
            costs="about budget_s seconds for the graphs of a call, once",
        ),
        "cudagraphs": Template(
            "Replay a recorded CUDA graph, so that a call costs one launch",
            {"triton.cudagraphs": True},
            costs=(
                "memory of its own for each graph; non-static inputs are copied at each call; "
                "the next call overwrites results"
            ),
            needs=("gpu",),
            otherwise="kernels are launched one by one",
        ),
        "max_autotune": _TUNED,
        "max_autotune_no_cudagraphs": replace(
            _TUNED,
            summary="Time candidate kernels for GEMMs and tune the others, without CUDA graphs",
            options={**_TUNED.options, "triton.cudagraphs": False},
            costs="minutes of compile time",
        ),
        "coordinate_descent": Template(
            "Tune the blocks of generated Triton kernels one coordinate at a time, in all directions",
            {"coordinate_descent_tuning": True, "coordinate_descent_check_all_directions": True},
            costs="seconds to a minute, at the first call and not at compile",
            needs=("gpu", "triton"),
            otherwise=ORDINARY_KERNELS,
        ),
        "triton": Template(
            "GEMMs and convolutions as generated Triton kernels, none from a library",
            {
                "max_autotune_gemm": True,
                "max_autotune_gemm_backends": "TRITON",
                "max_autotune_conv_backends": "TRITON",
            },
            costs="compile time for each GEMM's candidates; often slower than the library",
            needs=("gpu", "triton", "large_gpu"),
            otherwise="library GEMMs are called, as for each graph in which one has no Triton kernel",
        ),
        "aten": Template(
            "GEMMs and convolutions by calls into ATen's libraries only, also with max_autotune",
            {"max_autotune_gemm_backends": "ATEN", "max_autotune_conv_backends": "ATEN"},
            costs="no epilogue is fused into a GEMM",
        ),
        "cutlass": Template(
            "GEMMs as CUTLASS kernels",
            {
                "max_autotune_gemm": True,
                "max_autotune_gemm_backends": "CUTLASS",
                # Without a limit every matching kernel is compiled: hundreds for one GEMM.
                "cutlass.cutlass_max_profiling_configs": 8,
            },
            costs="about five seconds of nvcc for each candidate kernel; only the first eight by name are tried",
            needs=("gpu", "triton", "large_gpu", "cutlass", "nvcc"),
            otherwise="library GEMMs are called, as for each graph in which one has no CUTLASS kernel",
        ),
        "tma": Template(
            "Triton GEMM candidates also include persistent kernels that load with the tensor memory accelerator",
            {
                "max_autotune_gemm": True,
                "max_autotune_gemm_backends": "TRITON",
                "triton.enable_persistent_tma_matmul": True,
            },
            costs="compile time for each GEMM's candidates; operands must be 16-byte aligned",
            needs=("gpu", "triton", "large_gpu", "tma"),
            otherwise=ORDINARY_KERNELS,
        ),
        "freezing": Template(
            "Parameters become constants of the graph: batch norm folds, weights are packed",
            {"freezing": True},
            costs="a copy of each weight it repacks; changes of weights compile again; inference only",
        ),
        "cpp_wrapper": Template(
            "Generate the code between kernels in C++ instead of Python",
            {"cpp_wrapper": True},
            costs="C++ compile time for each graph: some seconds on a CPU, up to a minute on a GPU",
            needs=("cxx",),
            otherwise="compiling fails",
        ),
        "fast_compile": Template(
            "The shortest time to the first result: ATen's operators in a graph, almost no generated kernels",
            {
                "fallback_by_default": True,
                "selective_decompose": True,
                # For channels-last inputs, ATen's backward of a norm returns other strides than Inductor expects.
                "layout_optimization": False,
                "pattern_matcher": False,
            },
            costs="nothing is fused; about eager's speed",
        ),
        "debug": Template(
            "Write each graph and its code to torch_compile_debug/; assert sizes, indices and finite numbers",
            {
                "trace.enabled": True,
                "size_asserts": True,
                "alignment_asserts": True,
                "nan_asserts": True,
                "debug_index_asserts": True,
                # Graphs and code from a cache would not be written.
                "fx_graph_cache": False,
                "fx_graph_remote_cache": False,
            },
            costs="slower compile and slower calls",
        ),
        "eager_numerics": Template(
            "Results as close to eager's as Inductor can get: eager's rounding of each step, eager's random numbers",
            {
                "emulate_precision_casts": True,
                "fallback_random": True,
                "eager_numerics.division_rounding": True,
                "eager_numerics.disable_ftz": True,
            },
            costs="more conversions in half precision, slower division",
            where_known={"eager_numerics.use_pytorch_libdevice": True},
        ),
    }
)


def _read(entry: EntryPoint, loaded: object) -> Template | None:
    if isinstance(loaded, Mapping):
        return Template(f"from {entry.value}", loaded)
    return loaded if isinstance(loaded, Template) else None


_TEMPLATES = NamedValues(
    "template",
    ENTRY_POINT_GROUP,
    BUILT_IN,
    read=_read,
    wanted="a Template or a mapping of options",
    advice=lambda names: "`backend-kwargs list` shows all.",
)
_registered = _TEMPLATES.registered

find_template = _TEMPLATES.find
template_names = _TEMPLATES.names
is_published = _TEMPLATES.is_known  # dynamo finds "tmpl-inductor:NAME"


def add_templates(templates: Mapping[str, Template]) -> None:
    """Register all or none; registering equal options again is allowed, others under a used name are an error."""
    _TEMPLATES.register(
        templates, lambda one, other: same(dict(one.options), dict(other.options)), "exists with other options"
    )


def derive(
    base: str | None,
    options: Options,
    summary: str = "",
    find: Callable[[str], Template] = find_template,
) -> Template:
    """Return a template that merges `options` onto those of `base`, template names joined by "+"."""
    bases = [find(name) for name in split_templates(base)] if base else []
    return Template(
        summary or (f"{base}, with options of its own" if base else "options of its own"),
        MappingProxyType(_union(t.options for t in bases) | copied(options)),
        costs="; ".join(t.costs for t in bases if t.costs),
        needs=tuple(dict.fromkeys(need for t in bases for need in t.needs)),
        otherwise="; ".join(t.otherwise for t in bases if t.otherwise),
        where_known=MappingProxyType(_union(t.where_known for t in bases)),
    )


def _union(mappings: Iterable[Options]) -> Options:
    return {name: value for mapping in mappings for name, value in mapping.items()}


KEYS = {"base": str, "summary": str, "options": dict}


def read_templates(path: str | Path, own: Collection[str] = ()) -> dict[str, Template]:
    """Read `[templates.NAME]` tables, or `[tool.backend_kwargs.templates.NAME]` of a pyproject.toml.

    A table may have `base`, `summary` and `options`; an option's dotted name is quoted, or written as nested tables. A
    `base` may name a template that precedes it in the file. `own` are options that Inductor does not have.
    """
    if not isinstance(path, str | Path):
        raise wrong_value("A templates file", "a str or a Path", path)
    document = read_toml(path, "templates")
    tables = _inner(document, "tool", "backend_kwargs", "templates") or _inner(document, "templates")
    if not isinstance(tables, dict) or not tables:
        raise BackendKwargsError(f"{str(path)!r} has no [templates.NAME] table.")
    templates: dict[str, Template] = {}
    for name, table in tables.items():
        templates[name] = _template(name, table, templates, {*inductor_options(), *own})
    return templates


def _inner(table: object, *keys: str) -> Any:
    for key in keys:
        table = table.get(key, {}) if isinstance(table, dict) else {}
    return table


def _template(name: str, table: object, above: Mapping[str, Template], known: Collection[str]) -> Template:
    if not isinstance(table, dict):
        raise wrong_value(f"[templates.{name}]", "a table", table)
    for key, value in table.items():
        if key not in KEYS:
            raise unknown(f"key in [templates.{name}]", key, KEYS, otherwise=f"It takes {', '.join(KEYS)}.")
        if not isinstance(value, KEYS[key]):
            raise wrong_value(f"{key!r} in [templates.{name}]", KEYS[key].__name__, value)
    options = _flat(table.get("options", {}), known)
    return derive(table.get("base"), options, table.get("summary", ""), lambda n: above.get(n) or find_template(n))


def _flat(options: Options, known: Collection[str], prefix: str = "") -> dict[str, object]:
    """Flatten nested tables to dotted names, down to those that name an option."""
    flat: dict[str, object] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        nested = isinstance(value, dict) and name.replace("-", "_") not in known
        flat |= _flat(value, known, f"{name}.") if nested else {name: value}
    return flat
