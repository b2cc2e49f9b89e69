"""Graphs as Inductor lowers them, rewritten and run in eager without a C++ compiler, which is fast."""

from collections import Counter

import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

from backend_kwargs.rewrites.table import find_rewrite, resolved
from backend_kwargs.rewrites.traced import rewrite_graph


class Rewriting:
    """A function that is lowered as by Inductor, rewritten, and run in eager; `counts` are the matches."""

    def __init__(self, fn, *names):
        self.names = names
        self.counts = Counter()
        self.graphs = []
        torch._dynamo.reset()
        self.call = torch.compile(fn, backend=self._compile)

    def __call__(self, *args):
        return self.call(*args)

    def _compile(self, gm, example_inputs):
        with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(gm, example_inputs, inner_compile=self._lower)

    def _lower(self, gm, example_inputs, **kwargs):
        for name in self.names:
            self.counts[name] += rewrite_graph(gm.graph, name)
        gm.recompile()
        self.graphs.append(gm)
        return make_boxed_func(gm.forward)

    def operators(self):
        """Return the names of the rewrites' operators, in the graph's order."""
        known = {operator for name in self.names for operator in find_rewrite(name).operators}
        targets = [node.target for gm in self.graphs for node in gm.graph.nodes if node.op == "call_function"]
        names = [target.name().removesuffix(".default") for target in targets if hasattr(target, "name")]
        return [name.removeprefix("backend_kwargs::") for name in names if name in known]


class Changed(Rewriting):
    """A function whose dynamo graph is changed, lowered, and run in eager."""

    def _compile(self, gm, example_inputs):
        for name in self.names:
            change = resolved(find_rewrite(name).traced)(gm, example_inputs)
            self.counts[name] += change.count if change else 0
            gm = change.gm if change else gm
        return super()._compile(gm, example_inputs)

    def _lower(self, gm, example_inputs, **kwargs):
        names, self.names = self.names, ()
        try:
            return super()._lower(gm, example_inputs, **kwargs)
        finally:
            self.names = names


def gradients(fn, args):
    """Return a scalar function's result, and the gradients of its arguments."""
    args = [arg.detach().requires_grad_() if arg.is_floating_point() else arg for arg in args]
    loss = fn(*args)
    loss.backward()
    return [loss.detach(), *(arg.grad for arg in args if arg.is_floating_point())]


def matched(fn, args, *names):
    """Return the number of matches in inference, after checking the results against float64."""
    rewriting = Rewriting(fn, *names)
    with torch.no_grad():
        agrees(rewriting(*args), fn, args)
    return rewriting.counts.total()


def agrees(got, fn, args):
    """Raise unless `got` equals float64's result up to the rounding of its dtype, with eager's strides."""
    plain = fn(*args)
    want = _exact(fn)(*(_wide(arg) for arg in args))
    for one, exact, eager in zip(_flat(got), _flat(want), _flat(plain), strict=True):
        assert one.dtype == eager.dtype
        assert one.shape == eager.shape
        assert one.stride() == eager.stride() or one.numel() < 2 or 1 in one.shape
        scale = exact.abs().max().clamp(min=1e-3)
        tolerance = max(4 * torch.finfo(one.dtype).eps, 1e-5)
        own = (eager.double() - exact).abs().max() / scale
        error = (one.double() - exact).abs().max() / scale
        assert error <= tolerance + 2 * own, (float(error), float(own))


def _flat(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _wide(arg):
    return arg.detach().double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg


def _exact(fn):
    import copy

    return copy.deepcopy(fn).double() if isinstance(fn, torch.nn.Module) else fn
