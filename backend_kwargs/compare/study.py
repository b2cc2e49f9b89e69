"""One model and its inputs: what eager and the reference make of them, and whether a candidate is right."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backend_kwargs import measure
from backend_kwargs.compare.rows import Mode, Row
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.measure import Accuracy, Status

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
SEED = 0


@dataclass(frozen=True)
class _Truth:
    """Inputs of one check, with eager's results and the reference's."""

    inputs: Inputs
    eager: dict[str, Any]
    reference: dict[str, Any] | None


@dataclass
class Study:
    """A copy of the model, its inputs, and what is right for them."""

    model: Callable[..., Any]
    inputs: Inputs
    training: bool
    device: torch.device
    dtype: torch.dtype | None
    notes: list[str]
    cotangents: list[torch.Tensor] = field(default_factory=list)
    changed: dict[str, torch.Tensor | None] = field(default_factory=dict)
    truths: list[_Truth] = field(default_factory=list)

    @classmethod
    def of(cls, model: Callable[..., Any], inputs: Inputs, mode: Mode, device: torch.device) -> "Study":
        """Copy the model and the inputs to `device`; raise BackendKwargsError where they cannot be copied."""
        try:
            copied, inputs = copy.deepcopy((model, inputs))
        except Exception as error:
            reason = measure.status_of(error)[1]
            raise BackendKwargsError(f"compare copies the model and its inputs, which fails here: {reason}") from error
        inputs = pytree.tree_map(partial(_moved, device=device), inputs)
        training, notes = mode == "training", []
        if isinstance(copied, torch.nn.Module):
            copied = copied.to(device).train(training)
            notes = _without_dropout(copied) if training else []
        return cls(copied, inputs, training, device, _dtype_of(copied, inputs), notes)

    def settle(self, rows: Sequence[Row]) -> None:
        """Learn eager's results and the reference's; where eager itself is not to be relied on, every row says so."""
        try:
            self._learn()
        except Exception as error:  # noqa: BLE001 - the rows tell it
            status, reason = measure.status_of(error)
            self._spoil(rows, status, f"eager failed: {reason}")
            return
        again = [self.verify(self.model, self.model, truth) for truth in self.truths]
        if not all(accuracy.passed for accuracy in again):
            self._spoil(rows, "eager_two_runs_differ", measure.worst(again).reason)

    def _spoil(self, rows: Sequence[Row], status: Status, reason: str) -> None:
        for row in rows:
            row.status, row.reason = status, reason

    def _learn(self) -> None:
        inputs = copy.deepcopy(self.inputs)
        before = {name: (tensor, tensor._version) for name, tensor in _state(self.model, inputs).items()}
        saved = {name: tensor.detach().clone() for name, tensor in _state(self.model, ((), {})).items()}
        output = self.model(*inputs[0], **inputs[1])
        self.cotangents = _cotangents(output) if self.training else []
        after = _state(self.model, inputs)
        touched = [
            n for n, t in after.items() if n not in before or before[n][0] is not t or before[n][1] != t._version
        ]
        self.changed = {name: saved.get(name) for name in touched}
        self.truths = [self._truth(measure.fresh_inputs(self.inputs, seed)) for seed in (1, 2)]

    def _truth(self, inputs: Inputs) -> _Truth:
        eager = self.observe(self.model, self.model, copy.deepcopy(inputs))
        precise = measure.reference(self.model, inputs, run=lambda fn, args: self.observe(fn, fn, args))
        return _Truth(inputs, eager, precise)

    def observe(self, call: Callable[..., Any], model: Callable[..., Any], inputs: Inputs) -> dict[str, Any]:
        """Run once from the same seed and buffers; return copies of the outputs, gradients and changed state."""
        with torch.no_grad():
            for name, tensor in _state(model, ((), {})).items():
                saved = self.changed.get(name)
                if saved is not None and saved.shape == tensor.shape:
                    tensor.copy_(saved)
        torch.manual_seed(SEED)
        output = call(*inputs[0], **inputs[1])
        seen = {"output": output}
        if self.training:
            leaves = _leaves(model, inputs)
            seen["gradients"] = dict(zip(leaves, self.backward(output, list(leaves.values())), strict=True))
        seen["state"] = {name: tensor for name, tensor in _state(model, inputs).items() if name in self.changed}
        return {what: pytree.tree_map(_kept, tree) for what, tree in seen.items()}

    def backward(self, output: Any, leaves: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of `leaves`, without touching their `.grad`."""
        outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if len(outputs) != len(self.cotangents):
            raise RuntimeError(f"{len(outputs)} outputs require grad, in eager {len(self.cotangents)}")
        cotangents = [c.to(o.dtype) for c, o in zip(self.cotangents, outputs, strict=True)]
        return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)

    def step(self, call: Callable[..., Any], model: Callable[..., Any]) -> Callable[[], object]:
        """Return the callable that is timed, on inputs of its own."""
        args, kwargs = inputs = copy.deepcopy(self.inputs)
        if not self.training:
            return partial(call, *args, **kwargs)
        leaves = list(_leaves(model, inputs).values())
        return lambda: self.backward(call(*args, **kwargs), leaves)

    def verify(self, call: Callable[..., Any], model: Callable[..., Any], truth: _Truth) -> Accuracy:
        """Check outputs, gradients and changed state against eager's and the reference's."""
        seen = self.observe(call, model, copy.deepcopy(truth.inputs))
        judge = partial(measure.check, dtype=self.dtype, training=self.training)
        precise = truth.reference or {}
        return measure.worst([judge(seen[w], truth.eager[w], precise.get(w), what=w) for w in seen])


def _moved(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.device == device:
        return leaf
    return leaf.detach().to(device).requires_grad_(leaf.requires_grad)


def _kept(leaf: Any) -> Any:
    # A CUDA graph writes its next result over this one.
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _without_dropout(model: torch.nn.Module) -> list[str]:
    dropouts = [m for m in model.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p]
    for dropout in dropouts:
        dropout.p = 0.0
    return ["Dropout is off: Inductor draws other masks than eager, which cannot be compared."] if dropouts else []


def _dtype_of(model: Callable[..., Any], inputs: Inputs) -> torch.dtype | None:
    held = [*(model.parameters() if isinstance(model, torch.nn.Module) else ()), *tensors(inputs)]
    found = [tensor.dtype for tensor in held if tensor.is_floating_point()]
    return min(found, key=lambda dtype: dtype.itemsize, default=None)


def _state(model: Callable[..., Any], inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return what a call may change in place: the module's buffers and the input tensors."""
    buffers = model.named_buffers() if isinstance(model, torch.nn.Module) else ()
    given = {f"input {at}": tensor for at, tensor in enumerate(tensors(inputs))}
    return dict(buffers) | given


def _leaves(model: Callable[..., Any], inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return what a backward pass gives gradients to."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}
    named |= {f"input {at}": tensor for at, tensor in enumerate(tensors(inputs))}
    return {name: tensor for name, tensor in named.items() if tensor.requires_grad}


def _cotangents(output: Any) -> list[torch.Tensor]:
    # A mean of squares would leave the output of a normalisation without a gradient to check.
    outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
    if not outputs:
        raise BackendKwargsError("mode='training' needs an output that requires grad.")
    return measure.cotangents(outputs, SEED)


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a pytree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
