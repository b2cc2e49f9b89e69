"""Buckets of DistributedDataParallel: dynamo compiles each with fake inputs, but a race needs the real ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from backend_kwargs.graphs.replay import run_apart
from backend_kwargs.graphs.writes import copy_of_graph, has_memory, has_side_effects, holds_state, may_communicate
from backend_kwargs.torch_internals.dynamo import TracingContext
from backend_kwargs.torch_internals.tensors import FakeTensor, without_modes
from backend_kwargs.trial.roundings import DrawsError

# An attribute on dynamo's context of one compile: the bucket that returns a fake tensor, by the tensor's id.
PRODUCERS = "_backend_kwargs_producers"

Outputs = dict[int, torch.Tensor]  # by the id of the fake tensor


class Bucket:
    """One part of a graph that DDPOptimizer split at DDP's bucket boundaries. It stores no real tensor."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[object]) -> None:
        self.gm = copy_of_graph(gm, with_inputs=True)
        self.example_inputs = example_inputs
        self.returned = gm.graph.output_node().all_input_nodes
        for node in self.returned:
            _producers().setdefault(id(node.meta.get("example_value")), self)

    def inputs(self, outputs: dict["Bucket", Outputs] | None = None) -> list[object]:
        """Return the inputs of this call with the strides of the fake ones; where one is unknown, the fake itself.

        `outputs` are those of the buckets that have already run for it.
        """
        outputs = {} if outputs is None else outputs
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        return [
            self._real(node, value, outputs) if isinstance(value, FakeTensor) else value
            for node, value in zip(placeholders, self.example_inputs, strict=True)
        ]

    def _real(self, node: Node, value: FakeTensor, outputs: dict["Bucket", Outputs]) -> torch.Tensor:
        fake = node.meta.get("example_value")
        producer = _producers().get(id(fake))
        if producer is None or producer is self:
            # A tensor of the user's, or a parameter.
            real: torch.Tensor | None = getattr(node.meta.get("grapharg"), "example", None)
        else:
            if producer not in outputs:
                outputs[producer] = producer._run(outputs)
            real = outputs[producer].get(id(fake))
        symbolic = any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
        if real is None or symbolic or not has_memory(real):  # comparing a symbolic size would add a guard
            return value
        if real.stride() == value.stride():
            return real
        laid_out: torch.Tensor = torch.empty_strided(real.shape, value.stride(), dtype=real.dtype, device=real.device)
        return laid_out.copy_(real.detach()).requires_grad_(real.requires_grad)

    def _run(self, outputs: dict["Bucket", Outputs]) -> Outputs:
        """Run the bucket in eager and return its outputs, by the id of the fake; {} if it must not be run."""
        inputs = self.inputs(outputs)
        unknown = any(isinstance(each, FakeTensor) for each in inputs)
        if unknown or has_side_effects(self.gm) or holds_state(self.gm) or may_communicate(self.gm):
            return {}

        def copies() -> list[Any]:
            # Of all inputs: the fakes of a bucket do not show which ones it mutates, such as running means.
            return [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in inputs]

        try:
            with torch.no_grad(), without_modes():
                results, _ = run_apart(self.gm, copies)
        except DrawsError:
            return {}
        results = results if isinstance(results, list | tuple) else [results]
        fakes = [node.meta.get("example_value") for node in self.returned]
        return {
            id(fake): result.detach().requires_grad_(fake.requires_grad)
            for fake, result in zip(fakes, results, strict=True)
            if isinstance(fake, FakeTensor)
        }


def bucket_of(gm: GraphModule, example_inputs: Sequence[object]) -> Bucket | None:
    """Return the bucket for `gm`, None if its inputs are real, since then it is not a bucket."""
    return Bucket(gm, example_inputs) if any(isinstance(each, FakeTensor) for each in example_inputs) else None


def _producers() -> dict[int, Bucket]:
    context = TracingContext.try_get()
    return {} if context is None else vars(context).setdefault(PRODUCERS, {})
