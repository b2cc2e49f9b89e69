"""Inductor's pattern matcher and its passes over graphs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch._inductor import custom_graph_pass
from torch._inductor.pattern_matcher import (
    CallFunction,
    CallFunctionVarArgs,
    KeywordArg,
    Match,
    PatternEntry,
    PatternExpr,
    PatternMatcherPass,
    fwd_only,
    fx_to_pattern,
    is_match,
    register_graph_pattern,
)

# torch calls such a pass with `is_inference`, which a user's pass may use; torch 2.11 has no such class.
InferenceAwarePass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)


def only_where(passes: PatternMatcherPass, wanted: Callable[[Match], bool]) -> PatternMatcherPass:
    """Return the same patterns, which match only where `wanted` says so of a match."""

    def narrowed(entry: PatternEntry) -> PatternEntry:
        return replace(entry, extra_check=lambda match: bool(entry.extra_check(match)) and wanted(match))

    narrow = PatternMatcherPass("backend_kwargs")
    narrow.patterns.update({key: [*map(narrowed, entries)] for key, entries in passes.patterns.items()})
    return narrow


def takes_is_inference(graph_pass: object) -> bool:
    """Return whether torch calls a pass with `is_inference`; torch 2.11 calls none so."""
    return InferenceAwarePass is not custom_graph_pass.CustomGraphPass and isinstance(graph_pass, InferenceAwarePass)
