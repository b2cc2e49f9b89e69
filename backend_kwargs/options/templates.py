"""Templates: named sets of Inductor options, and their sources.

A name is looked up in the built-in table, then among those registered in this process, then among the entry points
of installed packages; only the entry point with that name is loaded.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from types import MappingProxyType

from backend_kwargs.options.layers import Options, copied, same
from backend_kwargs.options.named_values import NamedValues
from backend_kwargs.options.option import split_templates

ENTRY_POINT_GROUP = "backend_kwargs.templates"


@dataclass(frozen=True, slots=True)
class Template:
    """A named set of Inductor options.

    `where_known` has options of some torch releases only: they apply if the installed release has them. `needs` names
    entries of `requirements.REQUIREMENTS`; `otherwise` names the fallback if one is not met.
    """

    summary: str
    options: Options = field(default_factory=dict)
    costs: str = ""
    needs: tuple[str, ...] = ()
    otherwise: str = ""
    where_known: Options = field(default_factory=dict)


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
