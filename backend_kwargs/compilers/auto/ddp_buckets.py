"""Buckets of DistributedDataParallel: dynamo compiles each with fake inputs, for which a race needs the real ones."""

from collections.abc import Sequence
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

Outputs = dict[int, torch.Tensor]  # by id of the fake tensors


class Bucket:
    """One part of a graph that DDPOptimizer cut at the boundaries of DDP's buckets. It keeps no real tensor."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        self.gm = copy_of_graph(gm)
        self.example_inputs = example_inputs
        self.returned = gm.graph.output_node().all_input_nodes
        for node in self.returned:
            _producers().setdefault(id(node.meta.get("example_value")), self)

    def inputs(self, outputs: dict["Bucket", Outputs] | None = None) -> list[Any]:
        """Return the inputs of this call, laid out as the fake ones; a fake one where it is not known.

        `outputs` are those of the buckets that have been run for it.
        """
        outputs = {} if outputs is None else outputs
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        pairs = zip(placeholders, self.example_inputs, strict=True)
        return [self._real(*pair, outputs) if isinstance(pair[1], FakeTensor) else pair[1] for pair in pairs]

    def _real(self, node: Node, value: FakeTensor, outputs: dict["Bucket", Outputs]) -> torch.Tensor:
        fake = node.meta.get("example_value")
        producer = _producers().get(id(fake))
        if producer is None or producer is self:
            # The user's tensor, or a parameter.
            real: torch.Tensor | None = getattr(node.meta.get("grapharg"), "example", None)
        else:
            if producer not in outputs:
                outputs[producer] = producer._run(outputs)
            real = outputs[producer].get(id(fake))
        symbolic = any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
        if real is None or symbolic or not has_memory(real):  # to compare a symbol would guard on it
            return value
        if real.stride() == value.stride():
            return real
        laid_out: torch.Tensor = torch.empty_strided(real.shape, value.stride(), dtype=real.dtype, device=real.device)
        return laid_out.copy_(real.detach()).requires_grad_(real.requires_grad)

    def _run(self, outputs: dict["Bucket", Outputs]) -> Outputs:
        """Return what the bucket returns in eager, by id of the fakes; {} where it is not to be run."""
        inputs = self.inputs(outputs)
        unknown = any(isinstance(each, FakeTensor) for each in inputs)
        if unknown or has_side_effects(self.gm) or holds_state(self.gm) or may_communicate(self.gm):
            return {}
        # Copies of all: which of them it writes, running means say, the fakes of a part do not tell.
        copies = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in inputs]
        with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices()), _disable_current_modes():
            results = self.gm(*copies)
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
