"""Races: measure which candidate compiles a graph best, check its results, and store the decision.

`decide` finds the decision for a graph, by its key: one that is stored (`store`, `decisions_toml`), that of
another rank (`ranks`), or that of a race. `race` says what is done; its `steps` compile candidates, check their results
(`result_checks`) and time them in turn within a `budget`. `selection` says which is next: a step of `candidates` that
can gain by `graph_stats`, or rewrites, in the `places` of the graph where they are faster by themselves. `sandbox`
restores what candidates change in torch.

A race runs inside the backend's call, where `example_inputs` are the real tensors. `compiling` traces the model once
and lowers its graphs for each candidate. The winner is what was raced, or what the user's calls choose with CUDA graphs
and without (`alternating`); where sizes are symbols, for several ranks and to be saved, it is compiled again, mostly
out of Inductor's cache.
"""

import logging

logger = logging.getLogger("backend_kwargs.auto")
