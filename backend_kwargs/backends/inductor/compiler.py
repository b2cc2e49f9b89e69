"""Inductor: reads templates, modes and options, compiles with `compile_fx`, and falls back where some options fail."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from backend_kwargs.backends import CapturedGraph, CompileInner, Compiler, Inputs, Reading, Stage, Tell
from backend_kwargs.backends.inductor.cutlass import asks_for_cutlass, found_by_inductor
from backend_kwargs.errors import BackendKwargsError, NoCompilerError, removed, unknown, warn_once, wrong_value
from backend_kwargs.facts import Call, Compiled, CompileFacts
from backend_kwargs.options import (
    RULES,
    Check,
    Layer,
    Limit,
    Option,
    Options,
    check,
    copied,
    generators,
    limits,
    limits_of_options,
    same,
    split_templates,
)
from backend_kwargs.options.catalogue import KIND, inductor_option, inductor_options, usual_options
from backend_kwargs.options.machine import CXX_LIMIT_S, Machine, machine, silent_cxx
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
# Options that cannot be combined with `use_aoti`.
NOT_AHEAD = ("auto", "freezing", "precision", "reproducible", "rewrites")
AUTOTUNED_BACKENDS = ("max_autotune_gemm_backends", "max_autotune_conv_backends")
# Options with which some graphs do not compile, or that need more than a call of `compile_fx_inner`.
UNUSUAL = {*AUTOTUNED_BACKENDS, "fallback_by_default", "cpp_wrapper"}
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


@dataclass(frozen=True)
class InductorCompiler(Compiler):
    """Inductor, under one of the names by which a spec can refer to it."""

    name: str
    stages: tuple[Stage, ...] = field(default=(), compare=False, repr=False)

    takes_inductor_options: ClassVar[bool] = True

    @cached_property
    def own(self) -> dict[str, Option]:
        """The options of this package, which Inductor does not get."""
        return {**OWN, **{name: option for stage in self.stages for name, option in stage.options.items()}}

    @cached_property
    def reads(self) -> dict[str, Callable[[Any], Any]]:
        """The functions that turn short spellings of an option's value into its type."""
        return {name: read for stage in self.stages for name, read in stage.reads.items()}

    def dynamo_name(self, templates: Sequence[str]) -> str:
        published = self.name == "tmpl-inductor" and len(templates) == 1 and is_published(templates[0])
        return f"{self.name}:{templates[0]}" if published else self.name

    def summary(self, templates: Sequence[str]) -> str:
        return "; ".join(find_template(name).summary for name in templates) or "Inductor under templates and options"

    def option(self, name: str) -> Option:
        if name in TORCH_COMPILE_ONLY:
            raise BackendKwargsError(f"{name!r} is for torch.compile(..., options={{{name!r}: ...}}), not a backend.")
        plain = str(name).replace("-", "_")
        for stage in self.stages:
            if plain in stage.removed:
                raise removed(f"Option {plain!r}", stage.removed[plain])
        return inductor_option(name, self.own)

    def options(self) -> Mapping[str, Option]:
        return {**self.own, **dict(sorted(inductor_options().items()))}

    def template(self, name: str) -> Layer:
        return self.read("spec", {"template": name}, check).layers[0]

    def read(self, source: str, given: Options, coerce: Check) -> Reading:
        given = dict(given)
        named, mode = given.pop("template", None), given.pop("mode", None)
        names = split_templates(named) if named is not None else ()
        asked = "" if source == "spec" else f" ({source})"
        parts: list[tuple[str, Options, Check]] = [
            (f"template {name}{asked}", find_template(name).known_options(), check) for name in names
        ]
        if mode is not None:
            parts.append((f"mode {mode}{asked}", mode_options(mode), check))
        for name in ("options", "inductor_config"):
            mapping = given.pop(name, None)
            if mapping is not None and not isinstance(mapping, Mapping):
                raise wrong_value(repr(name), "a mapping of options", mapping)
            parts.append((source, mapping or {}, coerce))
        layers = []
        for named_as, options, fit in (*parts, (source, given, coerce)):
            checked: dict[str, Any] = {}
            for name, value in options.items():
                option = self.own.get(name) or usual_options().get(name) or self.option(name)
                read = self.reads.get(option.name)
                kind = "option" if option.name in self.own else KIND
                checked[option.name] = copied(fit(option, read(value) if read else value, kind))
            if options or named_as != source:
                layers.append(Layer(named_as, MappingProxyType(checked)))
        for (one, first), (other, second) in combinations(zip(names, layers, strict=False), 2):
            for name in sorted(first.options.keys() & second.options.keys()):
                if not same(first.options[name], value := second.options[name]):
                    warn_once(f"template {one} and template {other} disagree on {name!r}; the later wins: {value!r}.")
        return Reading(names, tuple(layers))

    def verify(self, templates: Sequence[str], options: Options, tell: Tell) -> None:
        for other in NOT_AHEAD if options.get("use_aoti") else ():
            if options.get(other):
                raise BackendKwargsError(f"Options 'use_aoti' and {other!r} cannot be combined; leave one out.")
        for stage in self.stages:
            if any(map(options.get, stage.options)):
                stage.verify(options, machine_of(options), tell)
        for name in templates:
            template = find_template(name)
            for limit in limits(f"Template {name!r}", template.needs, template.otherwise, machine_of(options)):
                tell_or_raise(limit, options, tell)

    def limits(self, options: Options) -> Mapping[str, Limit]:
        return limits_of_options(
            options,
            lambda name: self.option(name).default,
            machine_of(options),
            (*RULES, *(rule for stage in self.stages for rule in stage.rules)),
        )

    def compile(self, graph: CapturedGraph, options: Options) -> Compiled:
        from backend_kwargs.torch_internals.compile_fx import compile_fx_inner, inductor_wrapper
        from backend_kwargs.torch_internals.triton import name_torchs_ptxas

        here, strict = machine(), bool(options.get("strict"))
        on_gpu = [value.is_cuda for value in graph.example_inputs if hasattr(value, "is_cuda")]
        if here.triton and not here.hip and any(on_gpu):
            name_torchs_ptxas()
        ahead = bool(options.get("use_aoti"))
        code_for = "" if ahead else "cuda" if here.gpu and all(on_gpu) else "cpu"
        wrapper = inductor_wrapper(copied(options), self.own, code_for=code_for)
        inner_compile: CompileInner = compile_fx_inner
        if UNUSUAL & wrapper.config.keys():
            here = machine_of(options)
            wrapper.config |= {} if strict else aten_where_alone(wrapper.config, here)
            inner_compile = _inner_compile(wrapper.config, here, strict=strict)
        if ahead:
            wrapper.name = graph.region
            with found_by_inductor(here.nvcc) if asks_for_cutlass(wrapper.config, here) else nullcontext():
                return Compiled(wrapper(graph.gm, graph.example_inputs), CompileFacts(options))
        for around in graph.around_inner:
            inner_compile = around(inner_compile)
        compile_step: Callable[..., Call] = partial(_compile_fx, options, graph.region)
        if graph.compile_fx:
            compile_step = partial(graph.compile_fx, compile_step)
        if options.get("record_cudagraphs") is False:
            from backend_kwargs.torch_internals.relowering import recording_nothing

            compile_step, inner_compile = recording_nothing()(compile_step), recording_nothing()(inner_compile)
        # As config_patches, not patched around the call: Inductor compiles the backward graph later, under them.
        call = compile_step(graph.gm, graph.example_inputs, inner_compile, config_patches=wrapper.config)
        return Compiled(call, CompileFacts(options))

    def config(self, options: Options) -> dict[str, Any]:
        from backend_kwargs.torch_internals.compile_fx import inductor_wrapper

        return inductor_wrapper(options, self.own).get_compiler_config()  # type: ignore[no-any-return]

    def reset(self, options: Options) -> None:
        from backend_kwargs.torch_internals.compile_fx import inductor_wrapper

        inductor_wrapper(options, self.own).reset()

    def plain(self, options: Options, *, ahead_of_time: bool = False) -> dict[str, Any]:
        """Return the options as a plain dict for Inductor without this package; raise if one needs the package."""
        unrecorded = {} if records(options) else {"triton.cudagraphs": False}
        options = {name: value for name, value in {**options, **unrecorded}.items() if name != "record_cudagraphs"}
        reasons = {**dict.fromkeys(self.own, "it is an option of backend_kwargs, not of Inductor"), **NOT_PLAIN}
        for name, value in options.items():
            if name in reasons and value and not (ahead_of_time and name == WORKS_AHEAD):
                raise BackendKwargsError(f"Option {name!r} does not work in a plain dict: {reasons[name]}.")
        plain = {name: copied(value) for name, value in options.items() if name not in self.own}
        if "CUTLASS" in generators(plain.get("max_autotune_gemm_backends", "")):
            raise BackendKwargsError(
                "CUTLASS does not work in a plain dict: only backend_kwargs tells Inductor where it is."
            )
        return plain | aten_where_alone(plain, machine_of(options))


def tell_or_raise(limit: Limit, options: Options, tell: Tell) -> None:
    """Tell a limit that has a fallback, or raise it under `strict`."""
    if options.get("strict"):
        raise BackendKwargsError(f"{replace(limit, otherwise='')}")
    tell(limit)


def records(options: Options) -> bool:
    """Return whether CUDA graphs are recorded of what is compiled for them."""
    return options.get("record_cudagraphs") is not False


def machine_of(options: Options) -> Machine:
    """Return this machine, with the paths that `options` give."""
    here = machine()
    return replace(
        here,
        cutlass=options.get("cutlass.cutlass_dir") or here.cutlass,
        nvcc=options.get("cuda.cuda_cxx") or here.nvcc,
    )


def _compile_fx(
    options: Options, region: str | None, gm: "GraphModule", example_inputs: Inputs, *args: Any, **kwargs: Any
) -> Call:
    """Call Inductor's compile_fx; raise NoCompilerError where it would wait for a C++ compiler, or none works."""
    from backend_kwargs.torch_internals.compile_fx import NAMES_REGIONS, compile_fx
    from backend_kwargs.torch_internals.triton import start_compile_processes

    if any(getattr(value, "is_cuda", False) for value in example_inputs):
        start_compile_processes()
    on_cpu = any(getattr(value, "is_cpu", False) for value in example_inputs)
    if on_cpu and (cxx := silent_cxx(options.get("cpp.cxx"), os.environ.get("CXX"))):
        raise NoCompilerError(
            f"Inductor needs a C++ compiler, but {cxx!r} did not answer --version within {CXX_LIMIT_S:g} s: set CXX to "
            "another one."
        )
    compiling: Callable[..., Any] = compile_fx
    named = {"compile_region_name": region} if NAMES_REGIONS else {}
    try:
        return compiling(gm, example_inputs, *args, **kwargs, **named)  # type: ignore[no-any-return]
    except Exception as error:
        from backend_kwargs.trial.failures import without_compiler  # which imports torch

        if lacking := without_compiler(error):
            raise lacking from error
        raise


def _inner_compile(config: Options, here: Machine, *, strict: bool) -> CompileInner:
    """Return the function that compiles each lowered graph under `UNUSUAL` options; each call enters its contexts."""
    from backend_kwargs.torch_internals import inductor_config
    from backend_kwargs.torch_internals.compile_fx import compile_fx_inner, lost_cpp_wrapper_options

    falls_back = can_fall_back(config)
    inner_compile: CompileInner = partial(compile_with_fallback, strict=strict) if falls_back else compile_fx_inner
    # Before torch 2.13 the cubins that a C++ wrapper calls are dropped for the backward graph.
    if config.get("cpp_wrapper") and (lost := lost_cpp_wrapper_options()):
        inner_compile = inductor_config.patched(lost)(inner_compile)
    return found_by_inductor(here.nvcc)(inner_compile) if asks_for_cutlass(config, here) else inner_compile


# torch's "max-autotune-no-cudagraphs" does not turn CUDA graphs off.
MODE_ADDITIONS = {"max-autotune-no-cudagraphs": {"triton.cudagraphs": False}}


def mode_options(mode: str) -> dict[str, Any]:
    """Return the options of `mode`: torch's table, corrected to do what the names say."""
    from backend_kwargs.torch_internals.compile_fx import list_mode_options

    modes = list_mode_options()
    if mode not in list(modes):  # a list, since `mode` may not be hashable
        raise unknown("mode", mode, modes, otherwise=f"Modes are {', '.join(modes)}.")
    return {**modes[mode], **MODE_ADDITIONS.get(mode, {})}


# ---- graphs that Inductor cannot compile with some options, and the options used instead
#
# Triton's kernels alone fail if one GEMM has none, and ATen's operators alone if a list of tensors is changed in place.
# A forward and its backward graph fall back separately.


def aten_where_alone(config: Options, here: Machine) -> dict[str, str]:
    """Return the lists of GEMM backends with ATen added, if none of the requested kernel generators works here."""
    if "max_autotune_gemm_backends" not in config:
        return {}
    limited = limits_of_options(config, lambda name: inductor_option(name).default, here)
    alone = (limit := limited.get("max_autotune_gemm_backends")) and limit.of_machine  # no generator
    return _with_aten(config) if alone else {}


def _with_aten(config: Options) -> dict[str, str]:
    """Return the lists of backends that lack ATen, with ATen."""
    asked = {name: config[name] for name in AUTOTUNED_BACKENDS if name in config}
    return {name: f"{backends},ATEN" for name, backends in asked.items() if "ATEN" not in generators(backends)}


def _no_kernel(config: Options) -> str:
    names = " or ".join(dict.fromkeys(each.removesuffix(",ATEN") for each in _with_aten(config).values()))
    return f"A GEMM or convolution of this graph has no {names} kernel"


@dataclass(frozen=True, slots=True)
class Fallback:
    """A failure of Inductor with some options, recognized by the text of its error.

    `instead` returns replacements for the offending ones among the requested options, {} if there are none; `reason`
    names the cause, and `remedy` what is done about it.
    """

    error: str
    instead: Callable[[Options], dict[str, Any]]
    reason: Callable[[Options], str]
    remedy: str


FALLBACKS = (
    Fallback(
        "NoValidChoicesError",
        _with_aten,
        _no_kernel,
        "ATEN's serve the graph as well",
    ),
    # An in-place operator on a list of tensors, as in an optimizer, has no fallback.
    Fallback(
        "<built-in function getitem> is not an OpOverload",
        lambda config: {"fallback_by_default": False} if config.get("fallback_by_default") else {},
        lambda config: "Inductor cannot leave what this graph does to ATen's operators alone",
        "it generates code",
    ),
)


def can_fall_back(config: Options) -> bool:
    """Return whether `config` has options with which some graphs fail to compile."""
    return any(fallback.instead(config) for fallback in FALLBACKS)


def compile_with_fallback(gm: "GraphModule", example_inputs: Inputs, *, strict: bool, **kwargs: Any) -> Call:
    """Compile a lowered graph; if the requested options make it fail, compile it without them, or raise if `strict`."""
    from backend_kwargs.torch_internals import inductor_config
    from backend_kwargs.torch_internals.compile_fx import compile_fx_inner
    from backend_kwargs.torch_internals.relowering import spare_of

    spare = spare_of(gm)
    asked = {name: inductor_config.value(name) for name in (*AUTOTUNED_BACKENDS, "fallback_by_default")}
    try:
        return compile_fx_inner(gm, example_inputs, **kwargs)
    except Exception as error:
        fallback = next((h for h in FALLBACKS if h.error in str(error) and h.instead(asked)), None)
        if fallback is None:
            raise
        why = fallback.reason(asked)
        if strict:
            raise BackendKwargsError(f"{why}; without strict=True {fallback.remedy}.") from None
    warn_once(f"{why}; {fallback.remedy}.")
    with inductor_config.patched(fallback.instead(asked)):
        return compile_fx_inner(spare, example_inputs, **kwargs)
