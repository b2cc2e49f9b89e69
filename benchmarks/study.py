"""A case in one mode: what eager and the reference make of it, whether a callable is right, and the step to time."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backend_kwargs import measure
from backend_kwargs.measure import Accuracy
from benchmarks.case import Case, Mode, Problem

SEED = 0
FRESH = (1, 2)  # seeds of the inputs before and after timing


@dataclass(frozen=True, slots=True)
class Truth:
    """What eager and the reference make of one set of inputs."""

    args: tuple[Any, ...]
    eager: dict[str, Any]
    reference: dict[str, Any] | None


@dataclass
class Study:
    """One instance of a case, with what is right for it.

    `saved` holds what a call changes in the module, by name, as it was: each check starts from there.
    """

    case: Case
    mode: Mode
    device: torch.device
    dtype: torch.dtype
    problem: Problem
    cotangents: list[torch.Tensor] = field(default_factory=list)
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    truths: list[Truth] = field(default_factory=list)

    @classmethod
    def of(cls, case: Case, mode: Mode, device: torch.device, dtype: torch.dtype, scale: str) -> "Study":
        """Build the case from its seed, ready for its mode."""
        torch.manual_seed(SEED)
        problem = case.build(device, dtype, scale)
        if problem.work and problem.work.unit == "tf32":
            torch.set_float32_matmul_precision("high")
        study = cls(case, mode, device, dtype, problem)
        if isinstance(problem.fn, torch.nn.Module):
            problem.fn.to(device).train(mode != "fwd")
            _without_dropout(problem.fn)
        elif mode == "fwd_bwd":
            study.require_gradients()
        return study

    @property
    def unit(self) -> str:
        """Return the arithmetic that the case is for: that of its products, where it has none that of its dtype."""
        words = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        work = self.problem.work
        return work.unit if work and work.flops else words.get(self.dtype, str(self.dtype))

    def require_gradients(self) -> None:
        """Have the floating arguments of a function want gradients, unless the case says which do."""
        tensors = [tensor for tensor in tensors_of(self.problem.args) if tensor.is_floating_point()]
        if not any(tensor.requires_grad for tensor in tensors):
            for tensor in tensors:
                tensor.requires_grad_()

    def prepare(self) -> None:
        """Run eager once, and see what a call gives gradients to and what it changes."""
        model = self.model()
        before = {name: (tensor, tensor._version) for name, tensor in _state(model).items()}
        held = {name: tensor.detach().clone() for name, tensor in _state(model).items()}
        args = copy.deepcopy(self.problem.args)
        outputs = _differentiable(self.called(model, args)) if self.mode != "fwd" else []
        self.cotangents = measure.cotangents(outputs, SEED)
        after = _state(model)
        self.saved = held if self.mode == "train" else {n: held[n] for n in before if before[n][1] != after[n]._version}

    def learn(self) -> Accuracy:
        """Learn eager's results and the reference's; return whether eager agrees with itself."""
        model = self.model()
        self.truths = [self._truth(measure.fresh_inputs(self.problem.args, seed)) for seed in FRESH]
        return measure.worst([self.verify(model, model, at) for at in range(len(FRESH))])

    def _truth(self, args: tuple[Any, ...]) -> Truth:
        model = self.model()
        eager = self.observe(model, model, copy.deepcopy(args))
        reference = measure.reference(model, args, run=lambda fn, wide: self.observe(fn, fn, wide))
        return Truth(args, eager, reference)

    def model(self) -> Callable[..., Any]:
        """Return what a peer compiles: training steps change its parameters, so there it is one of its own."""
        return copy.deepcopy(self.problem.fn) if self.mode == "train" else self.problem.fn

    def called(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return what one call of the case gives."""
        return [call(each) for each in args] if self.problem.sweep else call(*args)

    def optimizer(self, model: Callable[..., Any]) -> torch.optim.Optimizer | None:
        """Return a new optimizer of the model's parameters; None but in "train"."""
        if self.mode != "train" or not self.problem.optimizer or not isinstance(model, torch.nn.Module):
            return None
        return self.problem.optimizer(model.parameters())

    def observe(
        self,
        call: Callable[..., Any],
        model: Callable[..., Any],
        args: tuple[Any, ...],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Run once, from the same seed and state; return copies of all that came out or was changed."""
        self._restore(model)
        torch.manual_seed(SEED)
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        output = self.called(call, args)
        seen = {"output": output}
        if self.mode == "fwd_bwd":
            leaves = self.leaves(model, args)
            seen["gradients"] = dict(zip(leaves, self.gradients(output, list(leaves.values())), strict=True))
        if self.mode == "train":
            seen |= self._trained(output, model, optimizer or self.optimizer(model))
        if self.problem.mutates:
            seen["arguments"] = args
        seen["state"] = {name: tensor for name, tensor in _state(model).items() if name in self.saved}
        return pytree.tree_map(_kept, seen)

    def _restore(self, model: Callable[..., Any]) -> None:
        with torch.no_grad():
            for name, tensor in _state(model).items():
                if name in self.saved:
                    tensor.copy_(self.saved[name])

    def _trained(self, output: Any, model: Any, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Go backward and step from a fresh state of the optimizer."""
        model.zero_grad(set_to_none=True)
        self.backward(output)
        seen = {"gradients": {name: _kept(p.grad) for name, p in model.named_parameters()}}
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return seen

    def leaves(self, model: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
        """Return, by name, what gets gradients: parameters, and the arguments that want them."""
        named = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}
        named |= {f"argument {at}": tensor for at, tensor in enumerate(tensors_of(args))}
        return {name: tensor for name, tensor in named.items() if tensor.requires_grad}

    def gradients(self, output: Any, leaves: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of `leaves`, without touching their `.grad`."""
        outputs, cotangents = self._paired(output)
        return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)

    def backward(self, output: Any) -> None:
        """Add the gradients to each parameter's `.grad`."""
        outputs, cotangents = self._paired(output)
        torch.autograd.backward(outputs, cotangents)

    def _paired(self, output: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outputs = _differentiable(output)
        if len(outputs) != len(self.cotangents):
            raise RuntimeError(f"{len(outputs)} outputs require grad, in eager {len(self.cotangents)}")
        return outputs, [c.to(o.dtype) for c, o in zip(self.cotangents, outputs, strict=True)]

    def step(
        self, call: Callable[..., Any], model: Callable[..., Any], optimizer: torch.optim.Optimizer | None
    ) -> Callable[[], object]:
        """Return the callable that is timed.

        All peers share its arguments, also those that calls change: a copy for each would fill a GPU. Their values
        drift, and no check reads them.
        """
        args = self.problem.args
        if self.mode == "fwd":
            return partial(self.called, call, args) if self.problem.sweep else partial(call, *args)
        if self.mode == "train":
            return partial(self._train_step, call, args, optimizer, list(self.leaves(model, ()).values()))
        leaves = list(self.leaves(model, args).values())
        return lambda: self.gradients(self.called(call, args), leaves)

    def _train_step(self, call: Any, args: Any, optimizer: Any, parameters: list[torch.Tensor]) -> None:
        self.backward(self.called(call, args))
        if optimizer is not None:
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def verify(
        self,
        call: Callable[..., Any],
        model: Callable[..., Any],
        at: int,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Accuracy:
        """Check all that a call gives and changes, on fresh inputs, against eager's and the reference's."""
        truth = self.truths[at]
        seen = self.observe(call, model, copy.deepcopy(truth.args), optimizer)
        judge = partial(measure.check, dtype=self.dtype, training=self.mode != "fwd")
        precise = truth.reference or {}
        return measure.worst([judge(seen[what], truth.eager[what], precise.get(what), what=what) for what in seen])


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _kept(leaf: Any) -> Any:
    # A CUDA graph writes its next result over this one.
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _without_dropout(model: torch.nn.Module) -> None:
    # Inductor draws other masks than eager, which cannot be compared.
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _state(model: Callable[..., Any]) -> dict[str, torch.Tensor]:
    if not isinstance(model, torch.nn.Module):
        return {}
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _differentiable(output: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(output) if tensor.requires_grad]
