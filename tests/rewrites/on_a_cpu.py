"""Rewrites of dynamo's graph that need a GPU to gain, applied on any device."""

import torch
from torch._inductor.compile_fx import compile_fx


def compiled_by(rewrite, fn, *, inductor=False, dynamic=None):
    """Return `fn` compiled after the function `rewrite`, and a list with the count of each graph's replacements."""
    counts = []

    def backend(gm, example_inputs):
        change = rewrite(gm, example_inputs)
        counts.append(change.count if change else 0)
        if change is None:
            return compile_fx(gm, example_inputs) if inductor else gm.forward
        return change.wrap(compile_fx(change.gm, change.example_inputs) if inductor else change.gm.forward)

    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, dynamic=dynamic), counts
