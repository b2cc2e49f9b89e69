"""Time a tuned graph against eager on its example inputs: tuning measures kernels alone, which may not be enough."""

import torch
from torch.fx import GraphModule

from backend_kwargs import measure
from backend_kwargs.backends import Inputs
from backend_kwargs.facts import Call
from backend_kwargs.graphs.eligibility import communicates, why_not_repeatable
from backend_kwargs.graphs.replay import Task
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.measure.draws import DrawsError
from backend_kwargs.torch_internals.guards import tracing

ROUNDS, BUDGET_S = 30, 1.0


def why_eager(gm: GraphModule, example_inputs: Inputs, compiled: Call) -> str:
    """Return why dynamo's graph runs faster in eager than `compiled`, with both times; "" if it does not.

    Both are called as the compiled function is, without gradients, and on copies of inputs that a call changes. What
    `auto` would not race is not timed either, nor are operators that are not torch's: each call would repeat them.
    """
    if communicates(gm) or why_not_repeatable(gm, example_inputs, custom_ops=False):
        return ""
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    # The calls are not part of dynamo's compile, whose context AOTAutograd would change.
    with tracing(None):
        try:
            task = Task.of(copy_of_graph(gm), example_inputs)
        except DrawsError:  # as another thread may
            return ""
        calls = {"eager": task.caller(gm.forward), "TVM": task.caller(compiled)}
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), tensors[0].device)
        with task.generators_kept():
            samples = measure.interleave(calls, rounds=ROUNDS, device=device, warmup=2, budget_s=BUDGET_S)
    if measure.ratio_interval(samples["eager"], samples["TVM"]).median >= 1:
        return ""
    eager, tvm = (f"{measure.median_interval(samples[name]).median * 1e3:.3g} ms" for name in calls)
    return f"it is faster: {eager} a call, and {tvm} with TVM"
