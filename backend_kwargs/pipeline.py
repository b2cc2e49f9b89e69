"""The stages of a compile, in order. Each takes the options that it owns, and hands the rest on; adding one is a row.

`auto` and the precisions come first, since what they measure is what all later stages make. The copies of results are
the last thing done to a call, then come changes of dynamo's graph, and what Inductor does with the graphs it lowers.

A stage wraps the call only if an option asks for that; otherwise the callable is the compiler's own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from backend_kwargs.auto import settings as auto
from backend_kwargs.auto.candidates import check_candidates
from backend_kwargs.backends import CapturedGraph, CompileFn, Compiler, Stage, Tell
from backend_kwargs.backends.inductor import compiler as inductor
from backend_kwargs.backends.inductor.compiler import InductorCompiler, records, tell_or_raise
from backend_kwargs.backends.others import OTHERS
from backend_kwargs.errors import BackendKwargsError, warn_once
from backend_kwargs.facts import Compiled
from backend_kwargs.options import (
    OWN_DATA,
    Option,
    Options,
    Rule,
    generators,
    limits,
    merge,
    precisions,
    split_templates,
    with_users,
)
from backend_kwargs.options.machine import Machine
from backend_kwargs.rewrites.table import check_rewrites, chosen_places, find_rewrite, raced_rewrites

if TYPE_CHECKING:
    from backend_kwargs.auto.question import Request


def compile_graph(
    compiler: Compiler, graph: CapturedGraph, options: Options, stages: Sequence[Stage] | None = None
) -> Compiled:
    """Compile a graph with `compiler`, through those of its stages that `options` ask for, or of these `stages`.

    The first one that is asked for gets what goes through those after it.
    """
    stages = compiler.stages if stages is None else stages
    for at, stage in enumerate(stages, 1):
        if options.get(stage.option):
            return stage.apply(compiler, graph, options, partial(compile_graph, compiler, stages=stages[at:]))
    return compiler.compile(graph, options)


def request_of(compiler: Compiler, graph: CapturedGraph, options: Options) -> "Request":
    """Return what `auto` is asked for a graph under these options, without answering it."""
    following = [stage for stage in compiler.stages if stage.option != "auto"]
    return _request(compiler, graph, options, partial(compile_graph, compiler, stages=following))


# ---- reproducible: what timing chose before, from a lock


def _pin(compiler: Compiler, graph: CapturedGraph, options: Options, following: CompileFn) -> Compiled:
    from backend_kwargs.auto.pinned import compile_pinned

    return compile_pinned(graph, options, following)


def _time_nothing(compiler: Compiler, graph: CapturedGraph, options: Options, following: CompileFn) -> Compiled:
    from backend_kwargs.auto.pinned import untimed

    return following(graph, untimed(graph, options))


def _check_lock(options: Options, here: Machine, tell: Tell) -> None:
    if options.get("reproducible") and not options.get("lock"):
        raise BackendKwargsError(
            "Option 'reproducible' needs 'lock', the file that `backend-kwargs pin` or bk.pin(...) wrote."
        )
    if options.get("lock") and not options.get("reproducible"):
        raise BackendKwargsError("Option 'lock' pins nothing by itself: pass reproducible='pinned' too.")
    if options.get("reproducible") and "CUTLASS" in generators(options.get("max_autotune_gemm_backends", "")):
        raise BackendKwargsError("CUTLASS cannot be pinned: leave it out of 'max_autotune_gemm_backends'.")


# ---- auto: races candidates, each of which goes through the stages after this one


def _compile_fastest(compiler: Compiler, graph: CapturedGraph, options: Options, following: CompileFn) -> Compiled:
    from backend_kwargs.auto.decide import compile_fastest

    return compile_fastest(_request(compiler, graph, options, following))


def _request(compiler: Compiler, graph: CapturedGraph, options: Options, following: CompileFn) -> "Request":
    from backend_kwargs.auto.question import Request

    # Rewrites that are named join those that are raced.
    raced = raced_rewrites(options.get("rewrites"))
    fixed = {name: value for name, value in options.items() if name not in auto.OPTIONS and name != "rewrites"}
    clones = _clones(options)

    def compile_one(graph: CapturedGraph, candidate: Options, other: str = "") -> Compiled:
        if other:
            return compile_graph(COMPILERS[other](other), graph, candidate)
        return following(graph, {**with_users(candidate, fixed), "clone_outputs": clones})

    def options_of(named: str) -> Options:
        return merge(map(compiler.template, split_templates(named)))

    return Request(graph, auto.RaceSettings.of(options), compile_one, options_of, compiler.limits, fixed, raced)


def _check_race(options: Options, here: Machine, tell: Tell) -> None:
    _needs_trees(options, here, tell)  # for the copies that auto makes unless it is told not to
    check_candidates(options.get("candidates") or ())


# ---- precision: the graph in a lower precision, measured


def _compile_lowered(compiler: Compiler, graph: CapturedGraph, options: Options, following: CompileFn) -> Compiled:
    from backend_kwargs.precision.lowered import Asked, compile_lowered

    (precision,) = precisions.named(options["precision"])
    rest = {name: value for name, value in options.items() if name not in precisions.OPTIONS}
    asked = Asked(
        precision,
        options.get("max_error"),
        freezing=bool(options.get("freezing")),
        strict=bool(options.get("strict")),
        by_compiler=precision in compiler.precisions,
    )
    return compile_lowered(graph, asked, following, {**rest, **compiler.computing_in(precision)}, rest)


# ---- clone_outputs: results that no later call changes


def _clone_outputs(compiler: Compiler, graph: CapturedGraph, options: Options, following: CompileFn) -> Compiled:
    compiled = following(graph, options)
    if not _records(options):
        return compiled
    from backend_kwargs.backends.inductor.cudagraph_outputs import with_independent_outputs
    from backend_kwargs.torch_internals.inductor_config import clones_live_outputs

    return compiled.called_by(with_independent_outputs(compiled.call, by_torch=clones_live_outputs(options)))


def _clones(options: Options) -> bool:
    """Return whether results are copied: those of `auto`, unless the user says otherwise."""
    asked = options.get("clone_outputs")
    return bool(options.get("auto") if asked is None else asked)


def _records(options: Options) -> bool:
    """Return whether CUDA graphs may be recorded, by an option or by Inductor's global configuration."""
    from backend_kwargs.torch_internals import inductor_config

    asked = bool(options.get("triton.cudagraphs", inductor_config.value("triton.cudagraphs")))
    return asked and records(options)


def _needs_trees(options: Options, here: Machine, tell: Tell) -> None:
    if _clones(options) and not options.get("triton.cudagraph_trees", True):
        raise BackendKwargsError("Option 'clone_outputs' needs 'triton.cudagraph_trees': leave that True.")


# ---- rewrites: of dynamo's graph here, and by a pass on the graphs that Inductor lowers


def _rewrite(compiler: Compiler, graph: CapturedGraph, options: Options, following: CompileFn) -> Compiled:
    from backend_kwargs.graphs.writes import is_bare_subclass
    from backend_kwargs.rewrites.traced import compile_rewritten, with_rewrites

    if any(map(is_bare_subclass, graph.example_inputs)):
        return following(graph, {**options, "rewrites": ()})
    entries = options["rewrites"]
    return compile_rewritten(graph, entries, lambda changed: following(changed, with_rewrites(options, entries)))


def _check_rewrites(options: Options, here: Machine, tell: Tell) -> None:
    entries = options.get("rewrites") or ()
    check_rewrites(entries)
    for name in chosen_places(entries):
        for limit in limits(f"Rewrite {name!r}", find_rewrite(name).needs, "graphs stay as they are", here):
            tell_or_raise(limit, options, tell)


# ---- freezing: parameters as constants


def _freeze(compiler: Compiler, graph: CapturedGraph, options: Options, following: CompileFn) -> Compiled:
    import torch

    from backend_kwargs.backends.inductor.cudagraph_outputs import with_copies_of
    from backend_kwargs.backends.inductor.frozen_code import freeing_constants, noting_constants
    from backend_kwargs.graphs.freezing import UNCACHED, reattach_parameters, taking_all_inputs

    if torch.is_grad_enabled():
        warn_once("Option 'freezing' is inert while gradients are recorded: call the model under torch.no_grad().")
        return following(graph, {**options, "freezing": False})
    constants: list[torch.Tensor] = []
    gm, kept = reattach_parameters(graph.gm, graph.example_inputs)
    frozen = replace(graph, gm=gm, example_inputs=[graph.example_inputs[at] for at in kept])
    noting = partial(noting_constants, constants=constants)
    compiled = following(
        frozen.wrap_inner_compile(freeing_constants).wrap_inner_compile(noting), {**options, **UNCACHED}
    )
    if constants:
        compiled = compiled.called_by(with_copies_of(compiled.call, constants))
    return compiled if gm is graph.gm else compiled.called_by(taking_all_inputs(compiled.call, kept))


# ---- the table


def _names(value: Any) -> object:
    """Return a list of names, or a text such as "packed,patches", as a tuple without repetitions.

    Equal backends compile once, whether names come from Python, from a text or from a file.
    """
    if isinstance(value, str) and not value.lstrip().startswith("[") and value.strip().lower() not in ("none", "null"):
        value = [name.strip() for name in value.split(",") if name.strip()]
    hashable = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return tuple(dict.fromkeys(value)) if hashable else value


def _option(name: str, kind: object, doc: str) -> Mapping[str, Option]:
    return MappingProxyType({name: Option(name, kind, None, doc, data=name in OWN_DATA)})


PRECISION = Stage(
    "precision",
    {name: auto.OPTIONS[name] for name in precisions.OPTIONS},
    _compile_lowered,
    precisions.verify,
    precisions.RULES,
    {"precision": precisions.named},
)
STAGES: tuple[Stage, ...] = (
    Stage(
        "reproducible",
        {
            **_option("reproducible", Literal["pinned"] | None, "pinned: time nothing, and choose by `lock`"),
        },
        _pin,
        _check_lock,
    ),
    Stage(
        "auto",
        {name: option for name, option in auto.OPTIONS.items() if name not in precisions.OPTIONS},
        _compile_fastest,
        _check_race,
        auto.RULES,
        {
            "store": auto.read_store,
            "race": auto.read_race,
            "candidates": lambda given: [*given] if isinstance(given, tuple) else given,
        },
        auto.REMOVED,
    ),
    PRECISION,
    Stage(
        "clone_outputs",
        _option(
            "clone_outputs",
            bool | None,
            "copy results that the next replay of a CUDA graph would overwrite; None: only under auto",
        ),
        _clone_outputs,
        _needs_trees,
    ),
    Stage(
        "rewrites",
        _option(
            "rewrites",
            tuple[str, ...] | None,
            "rewrites of the graph to apply; under auto those to race, None: all that compute the same function",
        ),
        _rewrite,
        _check_rewrites,
        reads={"rewrites": _names},
    ),
    Stage("freezing", {}, _freeze),  # an option of Inductor's
    Stage(
        "lock",
        _option("lock", str | None, "the file with what timing chose for `reproducible`"),
        _time_nothing,
        _check_lock,
        rules=(
            Rule("lock", unless=lambda value: "" if value("reproducible") else "it is read only under reproducible"),
        ),
    ),
)
# The options of this package under Inductor, which Inductor itself does not get.
OWN: Mapping[str, Option] = MappingProxyType(
    {**inductor.OWN, **{name: option for stage in STAGES for name, option in stage.options.items()}}
)
# The compilers of this package by name; a compiler that computes in lower precisions by itself has that stage too.
COMPILERS: Mapping[str, Callable[[str], Compiler]] = MappingProxyType(
    {
        **dict.fromkeys(("tmpl-inductor", "inductor"), partial(InductorCompiler, stages=STAGES)),
        **{name: partial(other, stages=(PRECISION,) if other.precisions else ()) for name, other in OTHERS.items()},
    }
)
