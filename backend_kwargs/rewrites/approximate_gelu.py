"""Linear with bias and exact GELU as one call with tanh-GELU, which differs from it by up to 5e-4."""

import torch.nn.functional as F  # noqa: N812

from backend_kwargs.rewrites.linear_activation import add_linear, define_linear, tanh_gelu
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.torch_internals.pattern_matcher import PatternMatcherPass

REWRITE = Rewrite(
    "Linear with bias and exact GELU as one library call with tanh-GELU",
    patterns=f"{__name__}:add_patterns",
    operators=("backend_kwargs::linear_approximated_gelu",),
    applies="float32 or half precision (on a CPU not float16)",
    same_function=False,
    costs="tanh-GELU differs from exact GELU by up to 5e-4",
    fitting=lambda stats: stats.gemms > 0 and ran(stats, "gelu", "erf"),
    order=180,
)

# `linear_gelu` under another name, so that generated code shows which rewrite inserted the call.
linear_approximated_gelu = define_linear("linear_approximated_gelu", tanh_gelu, ("gelu", "tanh"))


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register the pattern that ends in exact GELU, which tanh-GELU replaces."""
    add_linear(passes, F.gelu, linear_approximated_gelu)
