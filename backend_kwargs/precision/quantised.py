"""Linear layers quantised by torchao: each becomes a submodule of the graph, changed by torchao's `quantize_`.

Their weights are converted once from each parameter, and again after it has changed. Each call looks at the parameters,
and converts those that changed into the same memory: a guard would compile again after each step of an optimizer, and
dynamo stops after eight. Frozen weights are constants, so they have guards.
"""

import ctypes
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from backend_kwargs.graphs.freezing import CopyOfParameters, unused_name
from backend_kwargs.options.precisions import UnfitPrecisionError
from backend_kwargs.torch_internals import dynamo
from backend_kwargs.torch_internals.dynamo import AttrSource, Source, sources_of_attributes
from backend_kwargs.torch_internals.replacing import restored_by, undone
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
                made = _of(parameter, self.make)
                with torch.inference_mode(mode=False), torch.no_grad():
                    for into, part in zip(_parts(self.tensor), _parts(made), strict=True):
                        into.copy_(part)
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


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors of which a tensor consists: a quantised one has values and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


def source_of(placeholder: Node, precision: str) -> Source:
    """Return a source for a converted parameter: AOTAutograd needs a different one for each attribute."""
    source = dynamo.source_of(placeholder)
    assert source is not None  # it is a parameter's
    return AttrSource(source, f"in_{precision.replace('-', '_')}")


def unused_placeholders(gm: GraphModule, positions: Sequence[int]) -> list[int]:
    """Erase the unused placeholders at `positions`; return the positions that remain."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    gone = {at for at in positions if not placeholders[at].users}
    for at in gone:
        gm.graph.erase_node(placeholders[at])
    return [at for at in range(len(placeholders)) if at not in gone]


# ---- what is quantised, and how

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# On a CPU with VNNI, torch's `_int_mm` gives oneDNN the strides as they are. Inductor gives a dimension of size 1, in a
# view, the stride 0; oneDNN refuses a row's stride below its size, and the result is memory that nobody wrote (2.13).
LEAST_SIZE = 2
FP8_BLOCK = 16  # both sizes of the weight of a float8 product must be multiples of it


def config_of(precision: str) -> Any:
    """Return torchao's configuration of a precision."""
    quantization = _torchao()
    # Inductor's options are the caller's; torchao would set them for the whole process.
    configs: Mapping[str, Callable[..., Any]] = {
        "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "int8-weight": quantization.Int8WeightOnlyConfig,
        "fp8-dynamic": partial(
            quantization.Float8DynamicActivationFloat8WeightConfig, granularity=quantization.PerRow()
        ),
    }
    return configs[precision](set_inductor_config=False)


def quantise_linears(
    gm: GraphModule, lifted: Mapping[int, torch.Tensor], precision: str
) -> tuple[int, dict[int, Weight]]:
    """Replace the linear layers of `gm` whose weight is one of the `lifted` inputs, in place.

    Return their number, and the weights that `gm` now has, by the position of the input that each follows. All inputs
    of `gm` remain, used or not. A bias also remains an input, so no copy of it is made. Raise UnfitPrecisionError if
    there is no such layer, with the reason of the first.
    """
    layers = gm.graph.find_nodes(op="call_function", target=functional.linear)
    positions = {node: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder")) if at in lifted}
    modules: dict[int, str] = {}
    weights: dict[int, Weight] = {}
    reasons: list[str] = []
    for node in layers:
        x, weight, bias = _arguments(node)
        at: Any = positions.get(weight)
        if why := why_not_quantised(node, lifted.get(at), precision):
            reasons.append(why)
            continue
        if at not in modules:
            weights[at] = weight_of(lifted[at], precision, partial(_quantised, precision=precision))
            name = unused_name(gm, f"{weight.name}_{precision.replace('-', '_')}")
            gm.add_submodule(name, _linear(weights[at].tensor))
            sources_of_attributes(gm)[f"{name}.weight"] = source_of(weight, precision)
            modules[at] = name
        _replace(gm, node, modules[at], x, bias, precision)
    if len(reasons) == len(layers):
        which = "its linear layer" if len(layers) == 1 else f"the first of its {len(layers)} linear layers"
        raise UnfitPrecisionError(f"the weight of {which} {reasons[0]}" if layers else "it has no linear layer")
    gm.recompile()
    return len(layers) - len(reasons), weights


def why_not_quantised(node: Node, value: torch.Tensor | None, precision: str) -> str:
    """Return why the weight of a linear layer keeps its precision, "" if torchao converts it."""
    if value is None:
        return "is not a parameter, or the graph writes it"
    if value.dtype not in FLOATS:
        return f"is of {value.dtype}"
    if value.dim() != 2:
        return f"has {value.dim()} dimensions, not 2"
    if precision == "fp8-dynamic" and any(size % FP8_BLOCK for size in value.shape):
        return f"has the sizes {tuple(value.shape)}, which are not multiples of {FP8_BLOCK}"
    if precision != "int8-dynamic" or value.is_cuda:
        return ""
    if min(value.shape) < LEAST_SIZE:
        return f"has the sizes {tuple(value.shape)}, and torch's int8 product on a CPU is wrong for a size of 1"
    several = statically_known_true(math.prod(node.meta["example_value"].shape[:-1]) >= LEAST_SIZE)
    return "" if several else "multiplies one row, or may, for which torch's int8 product on a CPU is wrong"


def _arguments(node: Node) -> tuple[Any, Any, Any]:
    by_name = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return by_name["input"], by_name["weight"], by_name.get("bias")


def _quantised(weight: torch.Tensor, precision: str) -> torch.Tensor:
    """Return the weight of a linear layer after torchao's `quantize_`."""
    if precision == "fp8-dynamic":
        weight = weight.to(torch.bfloat16)  # row-wise scales require it
    layer = _linear(weight)
    _torchao().quantize_(layer, config_of(precision))
    return layer.weight.detach()


def _linear(weight: torch.Tensor) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _replace(gm: GraphModule, node: Node, module: str, x: Node, bias: Node | None, precision: str) -> None:
    captured = node.meta["example_value"].dtype
    with gm.graph.inserting_before(node):
        if precision == "fp8-dynamic" and captured != torch.bfloat16:
            x = gm.graph.call_method("to", (x, torch.bfloat16))
        product = gm.graph.call_module(module, (x,))
        if precision == "fp8-dynamic" and captured != torch.bfloat16:
            product = gm.graph.call_method("to", (product, captured))
        if bias is not None:
            product = gm.graph.call_function(torch.add, (product, bias))
    product.meta = dict(node.meta)
    node.replace_all_uses_with(product)
    gm.graph.erase_node(node)


@cache
def _torchao() -> Any:
    """Import torchao without its log lines and warnings, which are about other machines and its own enums."""
    with undone() as stack, warnings.catch_warnings():
        restored_by(stack, partial(logging.disable, logging.root.manager.disable))
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        return import_module("torchao.quantization")


@contextmanager
def unhashed() -> Iterator[None]:
    """Silence AOTAutograd's warning that torchao's tensors define no hash for its cache."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not implement _stable_hash_for_caching", UserWarning)
        yield
