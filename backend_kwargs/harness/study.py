"""One model and its inputs: eager's and the reference's results, the check of a result, and the step to time.

Also what eager only reads, and which of it a candidate has changed.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from backend_kwargs import trial
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.graphs.replay import detached_copy
from backend_kwargs.options.option import Options
from backend_kwargs.torch_internals.tensors import Dropout
from backend_kwargs.trial import (
    Accuracy,
    Expected,
    Results,
    bits_of,
    copied,
    generators,
    layout_of,
    map_tensors,
    memory_of,
    parts,
    room_for_copies,
    same_bits,
    tensors_of,
)

Model: TypeAlias = Callable[..., Any]  # a module, or another callable that computes on tensors
PIECE = 1 << 18  # elements of a checksum at a time, which stay in a cache


class ReadOnly:
    """The tensors of a model but those `written`, by name: copies, or checksums if copies take too much memory.

    Version counters would not tell: neither a kernel nor `tensor.data` advances them. Tensor subclasses are not
    compared.
    """

    def __init__(self, model: Model, written: Collection[int], device: torch.device) -> None:
        tensors = {name: tensor for name, tensor in _plain(model).items() if id(tensor) not in written}
        self.copied = sum(tensor.nbytes for tensor in tensors.values()) <= room_for_copies(device)
        keep = copied if self.copied else checksum
        self.before = {name: keep(tensor) for name, tensor in tensors.items()}

    def forget(self, model: Model) -> None:
        """Put back what eager has changed in `model` with other inputs, and compare it no more."""
        for name in self.put_back(model):
            del self.before[name]

    def put_back(self, model: Model) -> list[str]:
        """Return the names of what has changed in `model`; put the values back, or without copies accept the new ones.

        Otherwise each later candidate would be blamed.
        """
        there = _plain(model)
        same = same_bits if self.copied else lambda now, before: torch.equal(checksum(now), before)
        changed = [name for name in there if name in self.before and not same(there[name], self.before[name])]
        for name in changed:
            now, before = there[name], self.before[name]
            if not self.copied:
                self.before[name] = checksum(now)
            elif (now.dtype, now.shape, now.stride()) == (before.dtype, before.shape, before.stride()):
                memory_of(now).copy_(memory_of(before))
            else:
                now.data = before.clone()
        return changed


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each piece of a tensor, summed with random weights, so that other orders give other sums."""
    pieces = torch.split(bits_of(memory_of(tensor)).flatten(), PIECE)
    drawn = torch.Generator().manual_seed(0)
    weights = torch.randint(2**62, pieces[0].shape, generator=drawn).to(tensor.device)
    return torch.stack([(piece * weights[: piece.numel()]).sum() for piece in pieces])


def _plain(model: Model) -> dict[str, torch.Tensor]:
    """Return the dense tensors of a model by name, those that are no parameter or buffer by path."""
    of_model = ((path, part) for path, part in parts(model) if isinstance(part, torch.Tensor))
    tensors = {path: tensor for path, tensor in of_model if layout_of(tensor) and not tensor.is_quantized}
    named = [*model.named_parameters(), *model.named_buffers()] if isinstance(model, torch.nn.Module) else []
    names = {id(tensor): name for name, tensor in named}
    return {names.get(id(tensor), path): tensor for path, tensor in tensors.items()}


# ---- the study

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Mode = Literal["fwd", "fwd_bwd", "train"]
Optimizer = torch.optim.Optimizer

SEED = generators.SEED
FRESH = (1, 2)  # seeds of the inputs before and after timing


class Subject(NamedTuple):
    """The callable, the model whose state a call changes, that state, and the optimizer of its parameters."""

    call: Model
    model: Model
    state: trial.State = trial.State()
    optimizer: Optimizer | None = None


@dataclass
class Study:
    """A model in a mode: "fwd", "fwd_bwd" with cotangents, or "train", a step of the optimizer made by `optimizer`.

    Every call, checked or timed, starts from the state that the model and its inputs had: `changes` puts back what a
    call changes, and `changed` names those tensors. `tolerance` is passed to `trial.check`; None is its default.
    `max_error` accepts results beyond it, by the relative error to the reference.
    """

    model: Model
    inputs: Inputs
    mode: Mode
    device: torch.device
    dtype: torch.dtype | None = None
    optimizer: Callable[[Iterator[torch.nn.Parameter]], Optimizer] | None = None
    tolerance: float | None = None
    max_error: float | None = None
    cotangents: list[torch.Tensor] = field(default_factory=list)
    changes: trial.Changes = field(default_factory=trial.Changes)
    changed: frozenset[str] = frozenset()
    expected: list[tuple[Inputs, Expected]] = field(default_factory=list)  # of each check
    _pristine: trial.State = field(default_factory=trial.State)
    _read_only: ReadOnly = field(init=False)

    def prepare(self) -> None:
        """Run eager once, on a copy, to find which outputs require grad and what a call changes."""
        pristine, outputs = _state(self.model, self.inputs), list[torch.Tensor]()
        changed = set(dict(self._parameters)) if self.mode == "train" else set[str]()

        def run(tree: tuple[Model, Inputs]) -> None:
            outputs.extend(_differentiable(self.bound(*tree)()))
            for name, tensor in _state(*tree).items():
                if name not in pristine or not trial.same_bits(tensor, pristine[name]):
                    changed.add(name)

        self.changes = trial.Changes.of(run, (self.model, self.inputs))
        self.changed = frozenset(changed)
        self._pristine = self.changes.on((self.model, self.inputs))
        tensors = dict(parts((self.model, self.inputs))) | _state(self.model)
        written = {id(tensors[name]) for name in self.changes.tensors.keys() | changed if name in tensors}
        self._read_only = ReadOnly(self.model, written, self.device)
        if self.mode != "fwd" and not outputs:
            raise BackendKwargsError("A backward pass needs an output that requires grad, and the model has none.")
        self.cotangents = trial.cotangents(outputs, SEED) if self.mode != "fwd" else []

    def learn(self) -> Accuracy:
        """Compute eager's and the reference's results; return whether two runs of eager agree."""
        self.prepare()
        self.expected = [(each, self._expected(each)) for each in (trial.fresh_inputs(self.inputs, s) for s in FRESH)]
        again = [(self.observe(self.subject(), copy.deepcopy(each)), known.eager) for each, known in self.expected]
        how: Options = {"training": self.mode != "fwd", "tol": self.tolerance}
        return trial.worst([trial.same_twice(*pair, **how) for pair in again])

    def _expected(self, inputs: Inputs) -> Expected:
        """Return what is expected for these inputs."""
        subject = self.subject()
        eager = self.observe(subject, copy.deepcopy(inputs))
        again = lambda: self.observe(self.subject(), copy.deepcopy(inputs))  # noqa: E731
        random = generators.drawn()
        self._read_only.forget(subject.model)
        # The upcast copy of the model needs its own optimizer, and the state from before this call.
        model, own_inputs = self.subject().model, copy.deepcopy(inputs)
        run = lambda fn, wide: self.observe(self._of(fn), wide)  # noqa: E731
        return Expected.of(eager, again, model, own_inputs, run, random=random)

    def subject(self) -> Subject:
        """Return the model to run or compile; in "train" a copy, since steps change its parameters."""
        self._read_only.put_back(self.model)  # after a candidate that wrote and failed
        self._pristine.restore()
        return self._of(copy.deepcopy(self.model) if self.mode == "train" else self.model)

    def _of(self, model: Model) -> Subject:
        """Return a model to be run as it is, with what its calls change."""
        state = self.changes.on((model, ((), {})))
        if self.mode != "train" or self.optimizer is None or not isinstance(model, torch.nn.Module):
            return Subject(model, model, state)
        for name, parameter in self._parameters:
            state.add(model.get_parameter(name), parameter)
        return Subject(model, model, state, self.optimizer(model.parameters()))

    @property
    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.model.named_parameters()) if isinstance(self.model, torch.nn.Module) else []

    def bound(self, call: Model, inputs: Inputs) -> Callable[[], object]:
        """Return `call` bound to `inputs`."""
        return partial(call, *inputs[0], **inputs[1])

    def observe(self, subject: Subject, inputs: Inputs) -> Results:
        """Run once from the same seed and state; return copies of outputs, gradients and changed state."""
        call, model, state, optimizer = subject
        state.restore()
        if optimizer is not None:
            optimizer.state.clear()
        generators.seed()
        output = self.bound(call, inputs)()
        seen = {"output": output}
        if self.mode != "fwd":
            leaves = self._leaves(model, inputs)
            gradients = map_tensors(detached_copy, self.gradients(output, list(leaves.values())))
            seen["gradients"] = dict(zip(leaves, gradients, strict=True))
            if self.mode == "train":
                _update(optimizer, leaves.values())
        seen["state"] = {name: tensor for name, tensor in _state(model, inputs).items() if name in self.changed}
        # Copies, since a CUDA graph writes its next result to the same memory.
        return {what: map_tensors(detached_copy, tree) for what, tree in seen.items()}

    def gradients(self, output: object, leaves: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Return the gradients of `leaves`, in "train" also in their `.grad`; raise if too few outputs require any."""
        outputs = _differentiable(output)
        if len(outputs) != len(self.cotangents):
            raise RuntimeError(f"{len(outputs)} outputs require grad, in eager {len(self.cotangents)}")
        cotangents = [c.to(o.dtype) for c, o in zip(self.cotangents, outputs, strict=True)]
        if self.mode == "fwd_bwd":
            return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        torch.autograd.backward(outputs, cotangents)
        return [leaf.grad for leaf in leaves]

    def _leaves(self, model: Model, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Return the tensors whose gradients a backward pass computes, by name: in "train" no inputs."""
        found = _state(model, inputs if self.mode == "fwd_bwd" else None)
        return {name: tensor for name, tensor in found.items() if tensor.requires_grad}

    def step(self, subject: Subject) -> trial.RestoringCall:
        """Return the call to time; its result keeps the output alive, as a variable in a user's loop does.

        All share its inputs, also those that calls change, since a copy for each would fill a GPU. What an optimizer
        changes drifts, as in a loop; no check uses it.
        """
        self._pristine.restore()
        state = self.changes.on((subject.model, self.inputs), timed=True)
        bound = self.bound(subject.call, self.inputs)
        if self.mode == "fwd":
            return trial.RestoringCall(bound, state)
        leaves = list(self._leaves(subject.model, self.inputs).values())

        def run() -> object:
            output = bound()
            gradients = self.gradients(output, leaves)
            if self.mode == "fwd_bwd":
                return output, gradients
            _update(subject.optimizer, leaves)
            return output

        return trial.RestoringCall(run, state)

    def in_a_loop(self, subject: Subject) -> trial.RestoringCall | None:
        """Return a call that does not put back the model's attributes, on which compiled code may depend, or None."""
        advancing = {path for path in self.changes.containers if path.startswith("[0]")}
        if not advancing:
            return None
        self._pristine.restore()
        changes = replace(self.changes, containers=self.changes.containers - advancing)
        return trial.RestoringCall(self.bound(subject.call, self.inputs), changes.on((subject.model, self.inputs)))

    def verify(self, subject: Subject, at: int) -> Accuracy:
        """Check all that a call returns and changes, on fresh inputs, against eager's and the reference's results."""
        given, expected = self.expected[at]
        inputs = copy.deepcopy(given)
        tensors = tensors_of(inputs)  # before a call adds some
        if at:
            self._read_only.put_back(subject.model)  # other candidates have run since
        seen = self.observe(subject, inputs)
        if names := self._read_only.put_back(subject.model):
            lost = "; the model is too large to put it back, so later rows may be wrong"
            why = f"it changes {names[0]}, which eager only reads{'' if self._read_only.copied else lost}"
            return Accuracy("fail_accuracy", why)
        pairs = enumerate(zip(tensors, tensors_of(given), strict=True))
        written = [f"input {i}" for i, pair in pairs if not trial.same_bits(*pair)]
        if odd := next((name for name in written if name not in self.changed), ""):
            return Accuracy("fail_accuracy", f"{odd}: it is written, and eager only reads it")
        how: Options = {"dtype": self.dtype, "training": self.mode != "fwd", "tol": self.tolerance}
        return expected.check(seen, self.max_error, **how)


def device_of(model: Model, inputs: Inputs) -> torch.device:
    """Return the device of a model's first parameter, else of the first input."""
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    return next((tensor.device for tensor in [*parameters, *tensors_of(inputs)]), torch.device("cpu"))


def move(model: Model, device: torch.device, *, training: bool) -> bool:
    """Move a module to `device` and set its mode, in training without dropout; return whether it had dropout."""
    if not isinstance(model, torch.nn.Module):
        return False
    model.to(device).train(training)
    # Inductor's random masks differ from eager's and cannot be compared.
    dropouts = [m for m in model.modules() if isinstance(m, Dropout) and m.training and m.p]
    for dropout in dropouts:
        dropout.p = 0.0
    return bool(dropouts)


def _update(optimizer: Optimizer | None, parameters: Iterable[torch.Tensor]) -> None:
    """Make the optimizer's step, and drop the gradients."""
    if optimizer is not None:
        optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def _differentiable(output: object) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(output) if tensor.requires_grad]


def _state(model: Model, inputs: Inputs | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors that a call may change in place: parameters, buffers, and inputs."""
    own = [*model.named_parameters(), *model.named_buffers()] if isinstance(model, torch.nn.Module) else []
    return dict(own) | {f"input {at}": tensor for at, tensor in enumerate(tensors_of(inputs))}
