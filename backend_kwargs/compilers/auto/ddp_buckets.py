"""Buckets of DistributedDataParallel: dynamo compiles each with fake inputs, for which a race needs the real ones."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from backend_kwargs.compilers.auto.eligibility import has_side_effects, holds_state, may_communicate
from backend_kwargs.compilers.auto.workload import cuda_devices
from backend_kwargs.compilers.graphs import copy_of_graph, has_memory

# On dynamo's context of one compile, by id of the fake tensor that an earlier bucket returns: that bucket.
PRODUCERS = "_backend_kwargs_producers"


class Bucket:
    """One part of a graph that DDPOptimizer cut at the boundaries of DDP's buckets."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        self.gm = copy_of_graph(gm)
        self.example_inputs = example_inputs
        self.returned = gm.graph.output_node().all_input_nodes
        for node in self.returned:
            _producers().setdefault(id(node.meta.get("example_value")), self)

    @cached_property
    def inputs(self) -> list[Any]:
        """The inputs of this call, laid out as the fake ones; a fake one where it is not known."""
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        return [self._real(*pair) for pair in zip(placeholders, self.example_inputs, strict=True)]

    def _real(self, node: Node, value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        fake = node.meta.get("example_value")
        producer = _producers().get(id(fake))
        if producer is not None and producer is not self:
            real = producer.outputs.get(id(fake))
        else:
            real = getattr(node.meta.get("grapharg"), "example", None)  # the user's tensor, or a parameter
        symbolic = any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
        if real is None or symbolic or not has_memory(real):  # to compare a symbol would guard on it
            return value
        if real.stride() == value.stride():
            return real
        laid_out = torch.empty_strided(real.shape, value.stride(), dtype=real.dtype, device=real.device)
        return laid_out.copy_(real.detach()).requires_grad_(real.requires_grad)

    @cached_property
    def outputs(self) -> dict[int, torch.Tensor]:
        """What the bucket returns in eager for its real inputs, by id of the fakes; {} where it is not to be run."""
        unknown = any(isinstance(each, FakeTensor) for each in self.inputs)
        if unknown or has_side_effects(self.gm) or holds_state(self.gm) or may_communicate(self.gm):
            return {}
        # Copies of all: which of them it writes, running means say, the fakes of a part do not tell.
        inputs = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in self.inputs]
        with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices()), _disable_current_modes():
            results = self.gm(*inputs)
        results = results if isinstance(results, list | tuple) else [results]
        fakes = [node.meta.get("example_value") for node in self.returned]
        return {
            id(fake): result.detach().requires_grad_(fake.requires_grad)
            for fake, result in zip(fakes, results, strict=True)
            if isinstance(fake, FakeTensor)
        }


def bucket_of(gm: GraphModule, example_inputs: Sequence[Any]) -> Bucket | None:
    """Return the bucket that `gm` is, None where its inputs are real: then it is no bucket."""
    return Bucket(gm, example_inputs) if any(isinstance(each, FakeTensor) for each in example_inputs) else None


def _producers() -> dict[int, Bucket]:
    context = TracingContext.try_get()
    return {} if context is None else vars(context).setdefault(PRODUCERS, {})
