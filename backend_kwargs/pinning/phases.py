"""The phases in which a lock is written: a copy of the model is called in each."""

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from backend_kwargs.auto.lock import read_lock, write_lock
from backend_kwargs.auto.pinned import note_configurations
from backend_kwargs.backend import Backend
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.bundles.samples import Sample, sample_of
from backend_kwargs.errors import BackendKwargsError, error_text, warn_once
from backend_kwargs.facts import Call, Pins
from backend_kwargs.harness.trial import isolated
from backend_kwargs.sealing.calls import called
from backend_kwargs.torch_internals.caches import forget_loaded, fresh_cache
from backend_kwargs.torch_internals.sealing import compiling_ahead
from backend_kwargs.torch_internals.tensors import version_of
from backend_kwargs.trial import Changes, CopyError, generators, map_tensors, parts, same_bits, tensors_of


def write(
    path: Path,
    model: Callable[..., Any],
    example_inputs: object,
    served: Backend,
    dynamic: bool | None,
    tell: Callable[[str, float], None],
    *,
    add: bool,
) -> None:
    """Write the lock; raise if two compiles by it do not give the same bits."""
    pins = read_lock(path) if add and path.exists() else Pins(str(path))
    run = partial(_called, _Example.of(model, example_inputs), served, pins, dynamic)
    if served.options.get("auto"):
        pins.phase = "deciding"
        tell("1 of 3, racing", 0.0)
        run()
    # In an empty cache, whose libraries the second compile finds: what earlier compiles timed is not taken over.
    with tempfile.TemporaryDirectory() as folder, fresh_cache(folder):
        pins.phase = "timing"
        tell("2 of 3, compiling with what timing chooses", 0.4)
        timed = run()
        if uncalled := note_configurations(pins):
            warn_once(f"Lock {str(path)!r} lacks {', '.join(uncalled)}, which this call did not run.")
        pins.phase, pins.strict = "serving", not uncalled
        forget_loaded()
        tell("3 of 3, compiling by the lock", 0.7)
        for at, pair in enumerate(zip(timed, run(), strict=True)):
            if not same_bits(*pair):
                raise BackendKwargsError(
                    f"Result {at} has other bits when the same kernels compute it again, so that nothing is pinned: "
                    "see which operators torch.use_deterministic_algorithms(True) names."
                )
    if add and path.exists():  # what another process has added meanwhile
        pins = pins.with_others(read_lock(path))
    write_lock(pins, path)


@dataclass(frozen=True)
class _Example:
    """A model and the arguments of a call, copied for each run; `changes` has what a function's calls change."""

    model: Callable[..., Any]
    sample: Sample
    changes: Changes

    @classmethod
    def of(cls, model: Callable[..., Any], example_inputs: object) -> "_Example":
        """Return an example; a function is called once in eager, since what it holds is not copied with it."""
        # A result of other operations cannot be copied; one that is given twice stays one.
        args, kwargs = sample_of(example_inputs)
        sample = Sample(*map_tensors(cache(_leaf), (args, kwargs)))
        if isinstance(model, torch.nn.Module):
            return cls(model, sample, Changes())
        try:
            with _seeded():
                changes = Changes.of(lambda own: own[0](*own[1].args, **own[1].kwargs), (model, sample))
                return cls(model, sample, changes)
        except CopyError as error:
            raise _uncopied(str(error)) from error

    @contextmanager
    def copied(self) -> Iterator[tuple[Callable[..., Any], Sample]]:
        """Yield a copy of both, the function's code included, in which dynamo keeps what it compiles."""
        try:
            with torch.inference_mode(False):  # else the copies would be inference tensors, which the originals are not
                model, sample = own = copy.deepcopy((self.model, self.sample))
        except Exception as error:  # of any kind
            raise _uncopied(error_text(error)) from error
        state = self.changes.on(own)
        if isinstance(model, FunctionType):
            twin = FunctionType(
                model.__code__.replace(), model.__globals__, None, model.__defaults__, model.__closure__
            )
            twin.__kwdefaults__ = model.__kwdefaults__
            twin.__dict__.update(vars(model))
            model = twin
        try:
            yield model, sample
        finally:
            state.restore()


def _uncopied(why: str) -> BackendKwargsError:
    return BackendKwargsError(f"The model and its inputs must be ones that copy.deepcopy() can copy, got {why}.")


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_()


@contextmanager
def _seeded() -> Iterator[None]:
    """Draw the same random numbers in each run, and none of the caller's."""
    with generators.kept():
        generators.seed()
        yield


def _called(example: _Example, backend: Backend, pins: Pins, dynamic: bool | None) -> list[torch.Tensor]:
    """Call a copy under `backend`; return its results, gradients, and what else the call has written."""
    graphs = []

    def compile_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Call:  # another function for each run
        graphs.append(gm)
        return backend.compile(CapturedGraph(gm, inputs, pins=pins)).call

    # Sizes of other calls in this process make none of these vary, nor these any of later ones.
    with example.copied() as own, _seeded(), compiling_ahead(dynamic=False):
        tensors = [part for _, part in parts(own) if isinstance(part, torch.Tensor) and not part.is_inference()]
        held = [(part, version_of(part)) for part in tensors]
        output, gradients = called(isolated(own[0], backend=compile_graph, dynamic=dynamic), own[1])
        if not graphs:
            raise BackendKwargsError(
                "Nothing is pinned: the call compiled no graph. Pass the model itself, not what torch.compile returned."
            )
        written = [part for part, version in held if version_of(part) != version]
        return [each.detach().clone() for each in (*tensors_of(output), *gradients.values(), *written)]
