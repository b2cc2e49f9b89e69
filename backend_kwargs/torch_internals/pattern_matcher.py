"""Inductor's pattern matcher and its passes over graphs."""

from typing import Any

from torch._inductor import custom_graph_pass
from torch._inductor.pattern_matcher import (
    CallFunction,
    CallFunctionVarArgs,
    KeywordArg,
    Match,
    PatternExpr,
    PatternMatcherPass,
    fwd_only,
    fx_to_pattern,
    is_match,
    register_graph_pattern,
)

# torch calls such a pass with `is_inference`, which a user's pass may use; torch 2.11 has no such class.
InferenceAwarePass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)


def takes_is_inference(graph_pass: object) -> bool:
    """Return whether torch calls a pass with `is_inference`; torch 2.11 calls none so."""
    return InferenceAwarePass is not custom_graph_pass.CustomGraphPass and isinstance(graph_pass, InferenceAwarePass)
