"""Inductor: reads templates, modes and options, and compiles with `compile_fx`. Its stages are in `pipeline`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from backend_kwargs.backends import CapturedGraph, CompileInner, Inputs, Reading, Stage, Tell
from backend_kwargs.backends.inductor.cutlass import asks_for_cutlass, found_by_inductor
from backend_kwargs.backends.inductor.fallbacks import aten_where_alone, can_fall_back, compile_with_fallback
from backend_kwargs.errors import BackendKwargsError, removed, unknown, warn_once, wrong_value
from backend_kwargs.facts import Call, Compiled, CompileFacts
from backend_kwargs.options import (
    RULES,
    Check,
    Layer,
    Limit,
    Option,
    Options,
    check,
    check_answers,
    copied,
    generators,
    limits,
    limits_of_options,
    same,
    split_templates,
)
from backend_kwargs.options.catalogue import KIND, inductor_option, inductor_options
from backend_kwargs.options.machine import Machine, cxx_of, machine
from backend_kwargs.options.templates import find_template, is_published

if TYPE_CHECKING:
    from torch.fx import GraphModule

OWN: Mapping[str, Option] = MappingProxyType(
    {
        option.name: option
        for option in (
            Option("strict", bool, False, "raise if a template has no effect here, instead of falling back"),
            Option("record_cudagraphs", bool, True, "False: compile as for CUDA graphs, and record none"),
            Option("use_aoti", bool, False, "compile ahead of time: for torch.compile(...).aot_compile()"),
        )
    }
)
# Options that torch.compile itself uses; a backend never gets them.
TORCH_COMPILE_ONLY = ("guard_filter_fn",)
# An option, and those that it cannot be combined with.
EXCLUSIVE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "use_aoti": ("auto", "freezing", "precision", "reproducible", "rewrites"),
    }
)
# What works only where this package compiles, and why a plain dict of options for Inductor cannot contain it; its own
# options cannot be in one either. Ahead of time parameters are constants, so `freezing` works there.
WORKS_AHEAD = "freezing"
NOT_PLAIN: Mapping[str, str] = MappingProxyType(
    {
        "auto": (
            "it decides for each graph; report(compiled).graphs[0].inductor_config() and `backend-kwargs decisions "
            "show KEY --as inductor-config` give what it decided"
        ),
        "freezing": (
            "under torch.compile, Inductor alone freezes nothing, since parameters are inputs of the graph; "
            "inductor_config(ahead_of_time=True) gives it to AOTInductor, which freezes them"
        ),
        "fallback_by_default": "the package that AOTInductor makes fails where it calls ATen's operators",
        "triton.cudagraphs": "AOTInductor records no CUDA graphs, and vLLM records its own",
    }
)


@dataclass(frozen=True, slots=True)
class InductorCompiler:
    """Inductor, under one of the names by which a spec can refer to it."""

    name: str
    stages: tuple[Stage, ...] = field(default=(), compare=False, repr=False)

    takes_inductor_options: ClassVar[bool] = True
    precisions: ClassVar[tuple[str, ...]] = ()

    @property
    def own(self) -> dict[str, Option]:
        """The options of this package, which Inductor does not get."""
        return {**OWN, **{name: option for stage in self.stages for name, option in stage.options.items()}}

    def computing_in(self, precision: str) -> Options:
        return {}

    def found_by_name(self) -> bool:
        return True

    def dynamo_name(self, templates: Sequence[str]) -> str:
        published = self.name == "tmpl-inductor" and len(templates) == 1 and is_published(templates[0])
        return f"{self.name}:{templates[0]}" if published else self.name

    def summary(self, templates: Sequence[str]) -> str:
        return "; ".join(find_template(name).summary for name in templates) or "Inductor under templates and options"

    def option(self, name: str) -> Option:
        plain = str(name).replace("-", "_")
        for stage in self.stages:
            if plain in stage.removed:
                raise removed(f"Option {plain!r}", stage.removed[plain])
        return self.own.get(name) or inductor_option(name, self.own)

    def options(self) -> Mapping[str, Option]:
        return {**self.own, **dict(sorted(inductor_options().items()))}

    def unchecked(self) -> str:
        return ""

    def template(self, name: str) -> Layer:
        template = find_template(name)
        known = {key: value for key, value in template.where_known.items() if key in inductor_options()}
        return Layer(f"template {name}", self._checked({**template.options, **known}, check))

    def read(self, source: str, given: Options, coerce: Check) -> Reading:
        given = dict(given)
        named, mode = given.pop("template", None), given.pop("mode", None)
        explicit = [(name, given.pop(name, None)) for name in ("options", "inductor_config")]
        for name, value in explicit:
            if value is not None and not isinstance(value, Mapping):
                raise wrong_value(repr(name), "a mapping of options", value)
        names = split_templates(named) if named is not None else ()
        templates = [self.template(name) for name in names]
        for earlier, later in combinations(templates, 2):
            for name in sorted(earlier.options.keys() & later.options.keys()):
                if not same(earlier.options[name], value := later.options[name]):
                    warn_once(f"{earlier.source} and {later.source} disagree on {name!r}; the later wins: {value!r}.")
        modes = [Layer(f"mode {mode}", mode_options(mode))] if mode is not None else []
        asked = "" if source == "spec" else f" ({source})"
        implied = [replace(layer, source=f"{layer.source}{asked}") for layer in (*templates, *modes)]
        options = [Layer(source, self._checked(mapping, coerce)) for _, mapping in (*explicit, ("", given)) if mapping]
        return Reading(names, (*implied, *options))

    def verify(self, templates: Sequence[str], options: Options, tell: Tell) -> None:
        for one, others in EXCLUSIVE.items():
            for other in others:
                if is_set(one, options.get(one)) and is_set(other, options.get(other)):
                    raise BackendKwargsError(f"Options {one!r} and {other!r} cannot be combined; leave one out.")
        here = machine_of(options)
        for stage in self.stages:
            if any(is_set(name, options.get(name)) for name in stage.options):
                stage.verify(options, here, tell)
        for name in templates:
            template = find_template(name)
            for limit in limits(f"Template {name!r}", template.needs, template.otherwise, here):
                tell_or_raise(limit, options, tell)

    def limits(self, options: Options) -> Mapping[str, Limit]:
        return limits_of_options(
            options,
            lambda name: self.option(name).default,
            machine_of(options),
            (*RULES, *(rule for stage in self.stages for rule in stage.rules)),
        )

    def compile(self, graph: CapturedGraph, options: Options) -> Compiled:
        from backend_kwargs.torch_internals.compile_fx import region_name
        from backend_kwargs.torch_internals.inductor_config import vector_width
        from backend_kwargs.torch_internals.triton import name_torchs_ptxas

        wrapper, here = _torch_wrapper(options, self.own), machine_of(options)
        if here.triton and not here.hip and any(getattr(value, "is_cuda", False) for value in graph.example_inputs):
            name_torchs_ptxas()
        if not options.get("strict"):
            wrapper.config |= aten_where_alone(wrapper.config, here)
        if options.get("use_aoti"):
            wrapper.name = graph.region
            with found_by_inductor(here.nvcc) if asks_for_cutlass(wrapper.config, here) else nullcontext():
                return Compiled(wrapper(graph.gm, graph.example_inputs), CompileFacts(options))
        if not (here.gpu and all(getattr(value, "is_cuda", True) for value in graph.example_inputs)):
            wrapper.config = vector_width() | wrapper.config
        inner_compile = _inner_compile(wrapper.config, here, strict=bool(options.get("strict")))
        for around in graph.around_inner:
            inner_compile = around(inner_compile)
        # As config_patches, not patched around the call: Inductor compiles the backward graph later, under them.
        compile_step: Callable[..., Call] = partial(_compile_fx, options)
        if graph.compile_fx:
            compile_step = partial(graph.compile_fx, compile_step)
        if not records(options):
            from backend_kwargs.torch_internals.cudagraph_recording import recording_nothing

            compile_step, inner_compile = recording_nothing()(compile_step), recording_nothing()(inner_compile)
        region = region_name(graph.region)
        call = compile_step(graph.gm, graph.example_inputs, inner_compile, config_patches=wrapper.config, **region)
        return Compiled(call, CompileFacts(options))

    def config(self, options: Options) -> dict[str, Any]:
        return _torch_wrapper(options, self.own).get_compiler_config()  # type: ignore[no-any-return]

    def reset(self, options: Options) -> None:
        _torch_wrapper(options, self.own).reset()

    def plain(self, options: Options, *, ahead_of_time: bool = False) -> dict[str, Any]:
        """Return the options as a plain dict for Inductor without this package; raise if one needs the package."""
        unrecorded = {} if records(options) else {"triton.cudagraphs": False}
        options = {name: value for name, value in {**options, **unrecorded}.items() if name != "record_cudagraphs"}
        reasons = {**dict.fromkeys(self.own, "it is an option of backend_kwargs, not of Inductor"), **NOT_PLAIN}
        for name, value in options.items():
            if name in reasons and is_set(name, value) and not (ahead_of_time and name == WORKS_AHEAD):
                raise BackendKwargsError(f"Option {name!r} does not work in a plain dict: {reasons[name]}.")
        plain = {name: copied(value) for name, value in options.items() if name not in self.own}
        if "CUTLASS" in generators(plain.get("max_autotune_gemm_backends", "")):
            raise BackendKwargsError(
                "CUTLASS does not work in a plain dict: only backend_kwargs tells Inductor where it is."
            )
        return plain | aten_where_alone(plain, machine_of(options))

    def _checked(self, options: Options, coerce: Check) -> dict[str, Any]:
        for name in TORCH_COMPILE_ONLY:
            if name in options:
                raise BackendKwargsError(
                    f"{name!r} is for torch.compile(..., options={{{name!r}: ...}}), not a backend."
                )
        known = [(self.option(name), value) for name, value in options.items()]
        reads = {name: read for stage in self.stages for name, read in stage.reads.items()}
        known = [(o, reads[o.name](value) if o.name in reads else value) for o, value in known]
        return {o.name: copied(coerce(o, value, "option" if o.name in self.own else KIND)) for o, value in known}


def tell_or_raise(limit: Limit, options: Options, tell: Tell) -> None:
    """Tell a limit that has a fallback, or raise it under `strict`."""
    if options.get("strict"):
        raise BackendKwargsError(f"{replace(limit, otherwise='')}")
    tell(limit)


def records(options: Options) -> bool:
    """Return whether CUDA graphs are recorded of what is compiled for them."""
    return options.get("record_cudagraphs") is not False


def is_set(name: str, value: object) -> bool:
    """Return whether an option asks for something."""
    return value is not None and value is not False and value != ()


def machine_of(options: Options) -> Machine:
    """Return this machine, with the paths that `options` give."""
    here = machine()
    return replace(
        here,
        cutlass=options.get("cutlass.cutlass_dir") or here.cutlass,
        nvcc=options.get("cuda.cuda_cxx") or here.nvcc,
    )


def _compile_fx(options: Options, gm: "GraphModule", example_inputs: Inputs, *args: Any, **kwargs: Any) -> Call:
    """Call Inductor's compile_fx; raise NoCompilerError where it would wait for a C++ compiler, or none works."""
    from backend_kwargs.torch_internals.compile_fx import compile_fx
    from backend_kwargs.torch_internals.triton import start_compile_processes

    compiling: Callable[..., Any] = compile_fx
    if any(getattr(value, "is_cuda", False) for value in example_inputs):
        start_compile_processes()
    if any(getattr(value, "is_cpu", False) for value in example_inputs):
        check_answers(cxx_of(options))
    try:
        return compiling(gm, example_inputs, *args, **kwargs)  # type: ignore[no-any-return]
    except Exception as error:
        from backend_kwargs.trial.failures import without_compiler  # which imports torch

        if lacking := without_compiler(error):
            raise lacking from error
        raise


def _inner_compile(config: Options, here: Machine, *, strict: bool) -> CompileInner:
    """Return the function that compiles each lowered graph, forward and backward; each call enters its contexts."""
    from backend_kwargs.torch_internals import inductor_config
    from backend_kwargs.torch_internals.compile_fx import compile_fx_inner, lost_cpp_wrapper_options

    falls_back = can_fall_back(config)
    inner_compile: CompileInner = partial(compile_with_fallback, strict=strict) if falls_back else compile_fx_inner
    # Before torch 2.13 the cubins that a C++ wrapper calls are dropped for the backward graph.
    if config.get("cpp_wrapper") and (lost := lost_cpp_wrapper_options()):
        inner_compile = inductor_config.patched(lost)(inner_compile)
    return found_by_inductor(here.nvcc)(inner_compile) if asks_for_cutlass(config, here) else inner_compile


def _torch_wrapper(options: Options, own: Collection[str]) -> Any:
    """Return torch's own wrapper for "inductor", which sets the CUPTI variables and holds what the bisector changes.

    torch gives these, `get_compiler_config`, `reset` and ahead-of-time compiling to the name "inductor" alone, so its
    wrapper is used, not copied.
    """
    from backend_kwargs.torch_internals.compile_fx import inductor_wrapper

    kind = inductor_wrapper(ahead=bool(options.get("use_aoti")))
    wrapper = kind(None, {"triton.cudagraphs": options.get("triton.cudagraphs", False)}, None)
    # Not by its apply_options(), which rejects every value of an option whose declared type is NoneType.
    patches = {name: copied(value) for name, value in options.items() if name not in own}
    wrapper.config = patches | {k: v for k, v in wrapper.config.items() if k != "triton.cudagraphs"}
    return wrapper


# torch's "max-autotune-no-cudagraphs" does not turn CUDA graphs off.
MODE_ADDITIONS = {"max-autotune-no-cudagraphs": {"triton.cudagraphs": False}}


def mode_options(mode: str) -> dict[str, Any]:
    """Return the options of `mode`: torch's table, corrected to do what the names say."""
    from backend_kwargs.torch_internals.compile_fx import list_mode_options

    modes = list_mode_options()
    if mode not in list(modes):  # a list, since `mode` may not be hashable
        raise unknown("mode", mode, modes, otherwise=f"Modes are {', '.join(modes)}.")
    return {**modes[mode], **MODE_ADDITIONS.get(mode, {})}
