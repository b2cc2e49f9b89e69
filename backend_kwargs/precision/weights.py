"""Quantised weights: converted once from each parameter, and again after the parameter has changed.

Each call looks at the parameters, and converts those that changed into the same memory: a guard would compile again
after each step of an optimizer, and dynamo stops after eight. Frozen weights are constants, so they have guards.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.fx import GraphModule, Node

from backend_kwargs.backends import Inputs
from backend_kwargs.graphs.fused_steps import CopyOfParameters
from backend_kwargs.torch_internals import fx
from backend_kwargs.torch_internals.guards import AttrSource, Source
from backend_kwargs.torch_internals.tensors import version_of

SAMPLES = 64
_NONE = ctypes.c_uint64()
Make = Callable[[torch.Tensor], torch.Tensor]

# By parameter, its memory and precision: graphs of other shapes and the candidates of a race share a converted weight,
# which lives as long as a graph that uses it. By the parameter's id, since torch swaps none that has a weak reference.
_made: "WeakValueDictionary[tuple[int, int, str], Weight]" = WeakValueDictionary()
_lock = threading.Lock()


class Seen(NamedTuple):
    """A parameter at its conversion: `state` is its address and version.

    A write through `.data` changes neither. On a CPU `words` are some of the parameter's values, where they are in
    memory, and `sample` is what they were. On a GPU a look at values would wait for it.
    """

    state: tuple[int, int]
    storage: object  # kept alive: `words` are in it, and new memory could get the old address
    words: memoryview
    sample: bytes


@dataclass(eq=False)
class Weight(CopyOfParameters):
    """A parameter in another precision, and what was seen of it at the conversion."""

    tensor: torch.Tensor
    make: Make
    seen: Seen  # replaced as a whole, since other threads read it

    def follow(self, parameter: torch.Tensor) -> None:
        """Convert the parameter again, into the same memory, if it has changed."""
        if self._is_current(parameter):
            return
        with _lock:
            if not self._is_current(parameter):
                self.watch([parameter])
                seen = _seen(parameter)
                _copy(self.tensor, _of(parameter, self.make))
                self.seen = seen

    def _is_current(self, parameter: torch.Tensor) -> bool:
        state, seen = (parameter.data_ptr(), version_of(parameter)), self.seen
        return state == seen.state and not self.stale and seen.words.tobytes() == seen.sample

    @property
    def nbytes(self) -> int:
        """The bytes used in addition to the parameter's."""
        return sum(part.nbytes for part in _parts(self.tensor))


def weight_of(parameter: torch.Tensor, precision: str, make: Make) -> Weight:
    """Return the parameter's current values in `precision`, in an existing `Weight` if one is alive."""
    key = id(parameter), parameter.data_ptr(), precision
    found = _made.get(key)
    if found is None:
        seen = _seen(parameter)
        found = Weight(_of(parameter, make), make, seen)
        found.watch([parameter])
        _made[key] = found
    found.follow(parameter)
    return found


def _seen(parameter: torch.Tensor) -> Seen:
    """Return what shows whether a parameter has changed. Call it before a conversion: a write meanwhile is noticed."""
    words = _words(parameter)
    return Seen((parameter.data_ptr(), version_of(parameter)), parameter.untyped_storage(), words, words.tobytes())


def _words(parameter: torch.Tensor) -> memoryview:
    """Return about SAMPLES 64-bit words of a parameter on a CPU, evenly spaced in its memory; none on a GPU."""
    count = parameter.untyped_storage().nbytes() - parameter.storage_offset() * parameter.itemsize
    count = min(count, parameter.nbytes) // 8 if parameter.device.type == "cpu" else 0
    # ctypes, since reading a few values through torch takes ten times as long. The step is odd: not one column only.
    memory = (ctypes.c_uint64 * count).from_address(parameter.data_ptr() if count else ctypes.addressof(_NONE))
    return memoryview(memory).cast("B").cast("Q")[:: count // SAMPLES | 1]


def _of(parameter: torch.Tensor, make: Make) -> torch.Tensor:
    # The result must not be an inference tensor, which could not be changed in place later.
    with torch.inference_mode(mode=False), torch.no_grad():
        return make(parameter.detach())


def _copy(old: torch.Tensor, new: torch.Tensor) -> None:
    with torch.inference_mode(mode=False), torch.no_grad():
        for into, part in zip(_parts(old), _parts(new), strict=True):
            into.copy_(part)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors of which a tensor consists: a quantised one has values and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


@dataclass
class Held:
    """The weights that a graph has instead of parameters, by the position of the input that each follows."""

    positions: dict[int, list[Weight]] = field(default_factory=dict)

    def add(self, position: int, weight: Weight) -> None:
        """Make `weight` follow the input at `position`."""
        known = self.positions.setdefault(position, [])
        if weight not in known:
            known.append(weight)

    def follow(self, inputs: Inputs) -> None:
        """Convert the parameters that have changed."""
        for position, weights in self.positions.items():
            parameter = inputs[position]
            for weight in weights:
                weight.follow(parameter)

    @property
    def nbytes(self) -> int:
        """The bytes of all weights."""
        return sum(weight.nbytes for weights in self.positions.values() for weight in weights)


def source_of(placeholder: Node, precision: str) -> Source:
    """Return a source for a converted parameter: AOTAutograd needs a different one for each attribute."""
    source = fx.source_of(placeholder)
    assert source is not None  # it is a parameter's
    return AttrSource(source, f"in_{precision.replace('-', '_')}")


def unused_placeholders(gm: GraphModule, positions: Sequence[int]) -> list[int]:
    """Erase the unused placeholders at `positions`; return the positions that remain."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    gone = {at for at in positions if not placeholders[at].users}
    for at in gone:
        gm.graph.erase_node(placeholders[at])
    return [at for at in range(len(placeholders)) if at not in gone]
