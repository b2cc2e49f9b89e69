"""A case in one mode as a study: built from its seed, in its mode, possibly a sweep over inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backend_kwargs.harness.study import SEED, Inputs, Study, Subject, move
from backend_kwargs.trial.trees import tensors_of
from benchmarks.workloads.case import Case, Mode, Problem


@dataclass(kw_only=True)
class CaseStudy(Study):
    """The study of one instance of a case."""

    case: Case
    problem: Problem

    @classmethod
    def of(cls, case: Case, mode: Mode, device: torch.device, dtype: torch.dtype, scale: str) -> "CaseStudy":
        """Build the case from its seed, ready for its mode."""
        torch.manual_seed(SEED)
        problem = case.build(device, dtype, scale)
        if problem.work and problem.work.unit == "tf32":
            torch.set_float32_matmul_precision("high")
        move(problem.fn, device, training=mode != "fwd")
        if mode == "fwd_bwd" and not isinstance(problem.fn, torch.nn.Module):
            _require_gradients(problem.args)
        inputs = (problem.args, {})
        return cls(problem.fn, inputs, mode, device, dtype, problem.optimizer, case=case, problem=problem)

    @property
    def unit(self) -> str:
        """Return the unit of the case's arithmetic: that of its products, or else of its dtype."""
        words = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        work = self.problem.work
        return work.unit if work and work.flops else words.get(self.dtype, str(self.dtype))

    def bound(self, call: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
        """Return `call` bound to `inputs`, in a sweep to each of them in sequence."""
        if not self.problem.sweep:
            return super().bound(call, inputs)
        calls = [partial(call, each) for each in inputs[0]]
        return lambda: [each() for each in calls]

    def observe(self, subject: Subject, inputs: Inputs) -> dict[str, Any]:
        """Observe as any study does; in a sweep, copies, since the next call overwrites a CUDA graph's result."""
        if not self.problem.sweep:
            return super().observe(subject, inputs)
        copied = lambda each: pytree.tree_map_only(torch.Tensor, torch.clone, subject.call(each))  # noqa: E731
        return super().observe(subject._replace(call=copied), inputs)


def _require_gradients(args: tuple[Any, ...]) -> None:
    """Let the floating-point arguments of a function require gradients, unless the case says which do."""
    tensors = [tensor for tensor in tensors_of(args) if tensor.is_floating_point()]
    if not any(tensor.requires_grad for tensor in tensors):
        for tensor in tensors:
            tensor.requires_grad_()
