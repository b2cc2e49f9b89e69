"""Inductor: reads templates, modes and options, and compiles with `compile_fx`."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from backend_kwargs.auto import settings as auto
from backend_kwargs.auto.candidates import check_candidates
from backend_kwargs.backends import Reading
from backend_kwargs.backends.inductor.compile_step import noted, stand_in
from backend_kwargs.backends.inductor.cutlass import asks_for_cutlass, finding_cutlass, found_by_inductor
from backend_kwargs.backends.inductor.fallbacks import aten_where_alone, can_fall_back, compile_with_fallback
from backend_kwargs.backends.inductor.torch_fixes import keeping_cubins, mode_options, name_torchs_ptxas, region_name
from backend_kwargs.errors import BackendKwargsError, warn_once, wrong_value
from backend_kwargs.options.catalogue import KIND, inductor_option, inductor_options
from backend_kwargs.options.layers import Layer, copied, merge, same, with_users
from backend_kwargs.options.option import Option, Where, check
from backend_kwargs.options.requirements import (
    RULES,
    Limit,
    Machine,
    check_answers,
    cxx_of,
    generators,
    limits,
    limits_of_options,
    machine,
)
from backend_kwargs.options.spec import split_templates
from backend_kwargs.options.templates import find_template, is_published
from backend_kwargs.options.trust import OWN_DATA, Check
from backend_kwargs.precision import table as precisions
from backend_kwargs.rewrites.table import check_rewrites, find_rewrite, raced_rewrites

Product = Annotated[str, Where("of the form 'MxNxK'", lambda name: bool(re.fullmatch(r"\d+x\d+x\d+", name)))]
OWN: Mapping[str, Option] = MappingProxyType(
    {
        option.name: option
        for option in (
            Option("strict", bool, False, "raise if a template has no effect here, instead of falling back"),
            Option(
                "clone_outputs",
                bool | None,
                None,
                "copy results that the next replay of a CUDA graph would overwrite; None: only under auto",
            ),
            Option("use_aoti", bool, False, "compile ahead of time: for torch.compile(...).aot_compile()"),
            Option(
                "rewrites",
                tuple[str, ...] | None,
                None,
                "rewrites of the graph to apply; under auto those to race, None: all that compute the same function",
                data="rewrites" in OWN_DATA,
            ),
            Option(
                "tuned_products",
                tuple[Product, ...] | None,
                None,
                "the products that max_autotune tunes, by their sizes; None: all",
                data="tuned_products" in OWN_DATA,
            ),
        )
    }
    | dict(auto.OPTIONS)
)
# Tuples of names, whether they came from Python, from a text or from a file: equal backends compile once.
NAMES = ("rewrites", "tuned_products")
# Options that torch.compile itself uses; a backend never gets them.
TORCH_COMPILE_ONLY = ("guard_filter_fn",)
# An option, and those that it cannot be combined with.
EXCLUSIVE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "use_aoti": ("auto", "freezing", "precision", "rewrites", "tuned_products"),
        "tuned_products": ("inductor_choices_class",),
    }
)
# What works only where this package compiles, and why a plain dict of options for Inductor cannot contain it.
NOT_PLAIN: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys((*auto.OPTIONS, *OWN), "it is an option of backend_kwargs, not of Inductor"),
        "auto": (
            "it decides for each graph; report(compiled).graphs[0].inductor_config() and `backend-kwargs decisions "
            "show KEY --as inductor-config` give what it decided"
        ),
        "freezing": "Inductor alone freezes nothing, since parameters are inputs of the graph",
        "fallback_by_default": "the package that AOTInductor makes fails where it calls ATen's operators",
        "triton.cudagraphs": "AOTInductor records no CUDA graphs, and vLLM records its own",
    }
)


@dataclass(frozen=True, slots=True)
class InductorCompiler:
    """Inductor, under one of the names by which a spec can refer to it."""

    name: str

    takes_inductor_options: ClassVar[bool] = True

    def found_by_name(self) -> bool:
        return True

    def dynamo_name(self, templates: Sequence[str]) -> str:
        published = self.name == "tmpl-inductor" and len(templates) == 1 and is_published(templates[0])
        return f"{self.name}:{templates[0]}" if published else self.name

    def summary(self, templates: Sequence[str]) -> str:
        return "; ".join(find_template(name).summary for name in templates) or "Inductor under templates and options"

    def option(self, name: str) -> Option:
        return OWN.get(name) or inductor_option(name, OWN)

    def options(self) -> Mapping[str, Option]:
        return {**OWN, **dict(sorted(inductor_options().items()))}

    def unchecked(self) -> str:
        return ""

    def template(self, name: str) -> Layer:
        template = find_template(name)
        known = {key: value for key, value in template.where_known.items() if key in inductor_options()}
        return Layer(f"template {name}", self._checked({**template.options, **known}, check))

    def read(self, source: str, given: Mapping[str, Any], coerce: Check) -> Reading:
        given = dict(given)
        named, mode = given.pop("template", None), given.pop("mode", None)
        explicit = [_mapping(name, given.pop(name, None)) for name in ("options", "inductor_config")]
        names = split_templates(named) if named is not None else ()
        templates = [self.template(name) for name in names]
        _tell_contradictions(templates)
        modes = [Layer(f"mode {mode}", mode_options(mode))] if mode is not None else []
        asked = "" if source == "spec" else f" ({source})"
        implied = [replace(layer, source=f"{layer.source}{asked}") for layer in (*templates, *modes)]
        options = [Layer(source, self._checked(mapping, coerce)) for mapping in (*explicit, given) if mapping]
        return Reading(names, (*implied, *options))

    def verify(self, templates: Sequence[str], options: Mapping[str, Any], tell: Callable[[Limit], None]) -> None:
        for one, others in EXCLUSIVE.items():
            for other in others:
                if _is_set(one, options.get(one)) and _is_set(other, options.get(other)):
                    raise BackendKwargsError(f"Options {one!r} and {other!r} cannot be combined; leave one out.")
        if _clones(options) and not options.get("triton.cudagraph_trees", True):
            raise BackendKwargsError("Option 'clone_outputs' needs 'triton.cudagraph_trees': leave that True.")
        check_candidates(options.get("candidates") or ())
        check_rewrites(options.get("rewrites") or ())
        for limit in _limits_of_rewrites(options):
            if options.get("strict"):
                raise BackendKwargsError(f"{replace(limit, otherwise='')}")
            tell(limit)
        precisions.verify(options, _machine(options), tell)
        for name in templates:
            template = find_template(name)
            for limit in limits(f"Template {name!r}", template.needs, template.otherwise, _machine(options)):
                if options.get("strict"):
                    raise BackendKwargsError(f"{replace(limit, otherwise='')}")
                tell(limit)

    def limits(self, options: Mapping[str, Any]) -> Mapping[str, Limit]:
        return limits_of_options(
            options, lambda name: self.option(name).default, _machine(options), (*RULES, *auto.RULES, *precisions.RULES)
        )

    def compile(
        self, gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
    ) -> Callable[..., Any]:
        if options.get("auto"):
            return self._compile_fastest(gm, example_inputs, options, name)
        if options.get("precision"):
            return self._compile_lowered(gm, example_inputs, options, name)
        if options.get("rewrites"):
            from backend_kwargs.graphs.writes import is_bare_subclass

            options = {**options, "rewrites": ()} if any(map(is_bare_subclass, example_inputs)) else options
        step = _compile_frozen if options.get("freezing") else _compile
        if names := options.get("rewrites"):
            from backend_kwargs.rewrites.traced import compile_rewritten

            compiled = compile_rewritten(gm, example_inputs, names, lambda gm, inputs: step(gm, inputs, options, name))
        else:
            compiled = step(gm, example_inputs, options, name)
        if not (options.get("clone_outputs") and _records(options)):
            return compiled
        from backend_kwargs.backends.inductor.cudagraph_outputs import with_independent_outputs

        return with_independent_outputs(compiled)

    def _compile_fastest(
        self, gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
    ) -> Callable[..., Any]:
        from backend_kwargs.auto.decide import compile_fastest
        from backend_kwargs.auto.request import Request, Tools

        # Rewrites that are named join those that are raced.
        raced = raced_rewrites(options.get("rewrites"))
        fixed = {k: value for k, value in options.items() if k not in auto.OPTIONS and k != "rewrites"}
        tools = Tools(lambda named: merge(map(self.template, split_templates(named))), self.limits, fixed, raced)

        def compile_one(gm: Any, inputs: Sequence[Any], candidate: Mapping[str, Any]) -> Callable[..., Any]:
            together = {**with_users(candidate, fixed), "clone_outputs": _clones(options)}
            return self.compile(gm, inputs, together, name)

        return compile_fastest(Request(gm, example_inputs, auto.RaceSettings.of(options), compile_one, tools))

    def _compile_lowered(
        self, gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
    ) -> Callable[..., Any]:
        from backend_kwargs.precision.lowered import Asked, compile_lowered

        (precision,) = precisions.named(options["precision"])
        asked = Asked(
            precision,
            options.get("max_error"),
            freezing=bool(options.get("freezing")),
            strict=bool(options.get("strict")),
        )
        rest = {option: value for option, value in options.items() if option not in precisions.OPTIONS}
        return compile_lowered(gm, example_inputs, asked, lambda gm, inputs: self.compile(gm, inputs, rest, name))

    def config(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return _torch_wrapper(options).get_compiler_config()  # type: ignore[no-any-return]

    def reset(self, options: Mapping[str, Any]) -> None:
        _torch_wrapper(options).reset()

    def plain(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options as a plain dict for Inductor without this package; raise if one needs the package."""
        for name, value in options.items():
            if name in NOT_PLAIN and _is_set(name, value):
                raise BackendKwargsError(f"Option {name!r} does not work in a plain dict: {NOT_PLAIN[name]}.")
        plain = {name: copied(value) for name, value in options.items() if name not in OWN}
        if "CUTLASS" in generators(plain.get("max_autotune_gemm_backends", "")):
            raise BackendKwargsError(
                "CUTLASS does not work in a plain dict: only backend_kwargs tells Inductor where it is."
            )
        return plain | aten_where_alone(plain, _machine(options))

    def _checked(self, options: Mapping[str, Any], coerce: Check) -> dict[str, Any]:
        for name in TORCH_COMPILE_ONLY:
            if name in options:
                raise BackendKwargsError(
                    f"{name!r} is for torch.compile(..., options={{{name!r}: ...}}), not a backend."
                )
        known = [(self.option(name), value) for name, value in options.items()]
        known = [(o, _names(value) if o.name in NAMES else value) for o, value in known]
        known = [(o, precisions.named(value) if o.name == "precision" else value) for o, value in known]
        return {o.name: copied(coerce(o, value, "option" if o.name in OWN else KIND)) for o, value in known}


def _names(value: Any) -> Any:
    """Return a list of names, or a text such as "packed,patches", as a tuple without repetitions."""
    if isinstance(value, str) and not value.lstrip().startswith("[") and value.strip().lower() not in ("none", "null"):
        value = [name.strip() for name in value.split(",") if name.strip()]
    hashable = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return tuple(dict.fromkeys(value)) if hashable else value


def _is_set(name: str, value: Any) -> bool:
    """Return whether an option asks for something: of the lists of names only `tuned_products` does when empty."""
    return value is not None and value is not False and (value != () or name == "tuned_products")


def _clones(options: Mapping[str, Any]) -> bool:
    asked = options.get("clone_outputs")
    return bool(options.get("auto") if asked is None else asked)


def _limits_of_rewrites(options: Mapping[str, Any]) -> list[Limit]:
    """Return the limits of the requested rewrites on this machine."""
    here = _machine(options)
    return [
        limit
        for name in options.get("rewrites") or ()
        for limit in limits(f"Rewrite {name!r}", find_rewrite(name).needs, "graphs stay as they are", here)
    ]


def _records(options: Mapping[str, Any]) -> bool:
    """Return whether CUDA graphs may be recorded, by an option or by Inductor's global configuration."""
    from torch._inductor import config

    return bool(options.get("triton.cudagraphs", config.triton.cudagraphs))


def _machine(options: Mapping[str, Any]) -> Machine:
    """Return this machine, with the paths that `options` give."""
    here = machine()
    return replace(
        here,
        cutlass=options.get("cutlass.cutlass_dir") or here.cutlass,
        nvcc=options.get("cuda.cuda_cxx") or here.nvcc,
    )


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise wrong_value(repr(name), "a mapping of options", value)
    return value or {}


def _tell_contradictions(templates: Sequence[Layer]) -> None:
    for earlier, later in combinations(templates, 2):
        for name, value in later.options.items():
            if name in earlier.options and not same(earlier.options[name], value):
                warn_once(f"{earlier.source} and {later.source} disagree on {name!r}; the later wins: {value!r}.")


def _compile_frozen(
    gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
) -> Callable[..., Any]:
    import torch

    if torch.is_grad_enabled():
        warn_once("Option 'freezing' is inert while gradients are recorded: call the model under torch.no_grad().")
        return _compile(gm, example_inputs, {**options, "freezing": False}, name)
    from backend_kwargs.graphs.freezing import UNCACHED, compile_frozen

    frozen = {**options, **UNCACHED}
    return compile_frozen(gm, example_inputs, lambda gm, inputs: _compile(gm, inputs, frozen, name))


def _compile(
    gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    wrapper, here = _torch_wrapper(options), _machine(options)
    if here.triton and not here.hip and any(getattr(value, "is_cuda", False) for value in example_inputs):
        name_torchs_ptxas()
    if not options.get("strict"):
        wrapper.config |= aten_where_alone(wrapper.config, here)
    if options.get("use_aoti"):
        wrapper.name = name
        with found_by_inductor(here.nvcc) if asks_for_cutlass(wrapper.config, here) else nullcontext():
            return wrapper(gm, example_inputs)  # type: ignore[no-any-return]
    inner_compile = _inner_compile(wrapper.config, here, strict=bool(options.get("strict")))
    if (tuned := options.get("tuned_products")) is not None:
        from backend_kwargs.backends.inductor.tuned_products import tuning_only, with_tuned

        wrapper.config, inner_compile = with_tuned(wrapper.config, tuned), tuning_only(inner_compile, tuned)
    if names := options.get("rewrites"):
        from backend_kwargs.rewrites.apply import with_rewrites

        wrapper.config = with_rewrites(wrapper.config, names)
    constants: list[Any] = []
    if options.get("freezing"):
        from backend_kwargs.backends.inductor.frozen_code import freeing_constants, noting_constants

        inner_compile = noting_constants(freeing_constants(inner_compile), constants)
    # Passed on as config_patches, not patched around the call: Inductor compiles the backward graph later, under them.
    compile_step: Callable[..., Any] = partial(_compile_fx, options)
    if instead := stand_in.get():
        compile_step = partial(instead, compile_step)
    compiled: Any = compile_step(
        gm, example_inputs, inner_compile, config_patches=wrapper.config, **region_name(compile_fx, name)
    )
    if not constants:
        return compiled  # type: ignore[no-any-return]
    from backend_kwargs.backends.inductor.cudagraph_outputs import with_copies_of

    return with_copies_of(compiled, constants)


def _compile_fx(
    options: Mapping[str, Any], gm: Any, example_inputs: Sequence[Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Call Inductor's compile_fx; raise NoCompilerError where it would wait for a C++ compiler, or none works."""
    from torch._inductor.compile_fx import compile_fx

    compiling: Callable[..., Any] = compile_fx
    if any(getattr(value, "is_cpu", False) for value in example_inputs):
        check_answers(cxx_of(options))
    try:
        return compiling(gm, example_inputs, *args, **kwargs)  # type: ignore[no-any-return]
    except Exception as error:
        from backend_kwargs.measure.failures import without_compiler  # which imports torch

        if lacking := without_compiler(error):
            raise lacking from error
        raise


def _inner_compile(config: Mapping[str, Any], here: Machine, *, strict: bool) -> Callable[..., Any]:
    """Return the function that compiles each lowered graph, forward and backward."""
    from torch._inductor.compile_fx import compile_fx_inner

    inner_compile = partial(compile_with_fallback, strict=strict) if can_fall_back(config) else compile_fx_inner
    inner_compile = noted(inner_compile)
    if config.get("cpp_wrapper"):
        inner_compile = keeping_cubins(inner_compile)
    return finding_cutlass(inner_compile, here.nvcc) if asks_for_cutlass(config, here) else inner_compile


def _torch_wrapper(options: Mapping[str, Any]) -> Any:
    """Return torch's own wrapper for "inductor", which sets the CUPTI variables and holds what the bisector changes."""
    import torch

    ahead = options.get("use_aoti")
    kind: Any = torch._TorchCompileAOTInductorWrapper if ahead else torch._TorchCompileInductorWrapper
    wrapper = kind(None, {"triton.cudagraphs": options.get("triton.cudagraphs", False)}, None)
    # Not by its apply_options(), which rejects every value of an option whose declared type is NoneType.
    patches = {name: copied(value) for name, value in options.items() if name not in OWN}
    wrapper.config = patches | {k: v for k, v in wrapper.config.items() if k != "triton.cudagraphs"}
    return wrapper
