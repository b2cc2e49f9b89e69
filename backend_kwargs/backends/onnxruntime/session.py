"""A part of a graph as a session of ONNX Runtime, which reads and writes torch's memory."""

import ctypes
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.utils.dlpack import from_dlpack

from backend_kwargs.backends import Inputs
from backend_kwargs.backends.partitioned import (
    MEMORY,
    CompiledPart,
    Engine,
    argument,
    dense,
    fixed_sizes,
    uses_more_than_first,
)
from backend_kwargs.graphs.parts import Decompositions, op_name, returned_by
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.onnx import REGISTRATION_LOGGER, translated, translated_operators
from backend_kwargs.torch_internals.replacing import undone
from backend_kwargs.torch_internals.tensors import core_aten_decompositions, schema_of

if TYPE_CHECKING:
    import onnxruntime

LEVELS = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
FATAL_ONLY = 4  # errors are raised too
TYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}
CANCELS = "the exporter's formula cancels near zero or in its tails"
ZERO_SIGN = "the exporter's formula loses the sign of zeros, and quotients that are tiny"
WEIGHTS = "infinities and nan times a weight of zero are nan"
# The exporter writes exp(x*x) * erfc(x), which overflows, and adds pi to atan2 by the sign of its first argument.
DENIED: Mapping[str, str] = MappingProxyType(
    {
        **MEMORY,
        "special_erfcx": "the exporter's formula overflows",
        "atan2": "the exporter's formula has the other sign at zero",
        "topk": "ONNX Runtime orders equal values differently",
        "hardtanh_backward": "the exporter's formula differs at the bounds",
        "_linalg_det": "ONNX Runtime has one result of three",
        "histc": "the exporter's formula counts a value at a border in the other bin",
    }
    | dict.fromkeys(
        ("_embedding_bag", "_embedding_bag_forward_only"), "ONNX Runtime 1.32 crashes on the exporter's loop"
    )
    | dict.fromkeys(("blackman_window", "hamming_window", "hann_window"), "the exporter's window has other values")
)
# Each fails at some number: tests/backends/probes.py has them.
DENIED_FLOATS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("celu", "elu", "erfc", "expm1", "log1p", "logaddexp", "logaddexp2", "logcumsumexp"), CANCELS)
    | dict.fromkeys(
        ("div.Scalar_mode", "div.Tensor_mode", "floor_divide", "fmod", "frac", "remainder", "trunc"), ZERO_SIGN
    )
    | dict.fromkeys(
        ("amax", "amin", "argmax", "argmin", "logsumexp", "max.default", "max.dim", "min.default", "min.dim"),
        "ONNX Runtime's maxima and minima skip nan",
    )
    | dict.fromkeys(("angle", "heaviside", "sign", "xlogy"), "ONNX Runtime gives another value for nan")
    | dict.fromkeys(("diagonal", "diagonal_copy"), WEIGHTS)
    | dict.fromkeys(
        ("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "upsample_bicubic2d", "upsample_bilinear2d"), WEIGHTS
    )
    | dict.fromkeys(("upsample_linear1d", "upsample_trilinear3d"), WEIGHTS)
    | dict.fromkeys(
        ("max_pool2d_with_indices", "max_pool3d_with_indices"), "ONNX Runtime's maximum of -inf is the lowest number"
    )
    | {"lerp": "the exporter's formula gives infinity for nan", "signbit": "the exporter's formula asks x < 0"}
)
# Only its first result is eager's, not the sum of the weights.
ONLY_FIRST = frozenset({"nll_loss_forward"})
# In float64 the exporter rounds the numbers of its formulas, or what it asks about, to float32; the last one loses nan.
ROUNDED = frozenset(
    {"deg2rad", "rad2deg", "gelu", "isinf", "isneginf", "isposinf", "log2", "log10", "sinc", "_log_softmax"}
)
# The results are rounded or saturated where floating-point numbers cannot represent them.
IN_FLOATING_POINT = frozenset({"sum", "prod", "div", "pow", "addbmm"})
# Arguments that the exporter drops without a word or translates wrongly, by the operator's name or "", and the values.
UNTRANSLATED: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    ("", "training", bool, "ONNX Runtime's norm has the statistics of inference"),
    ("", "divisor_override", bool, "ONNX has no divisor_override"),
    ("", "reduce", lambda value: value == "mean", "the exporter writes the last value instead of the mean"),
    ("addbmm", "beta", lambda value: value == 0, "the exporter multiplies nan by a beta of zero"),
    ("baddbmm", "beta", lambda value: value == 0, "the exporter multiplies nan by a beta of zero"),
    ("leaky_relu", "negative_slope", lambda value: value < 0, "ONNX Runtime loses the sign of zeros"),
    ("linalg_vector_norm", "ord", lambda value: abs(value) == math.inf, "ONNX Runtime's maxima and minima skip nan"),
    ("logit", "eps", lambda value: value is not None, "the exporter's formula gives a number for nan"),
)
# Warnings that the exporter logs at each export, by logger: torchvision's operators, if it lacks them, and a constant
# without elements, such as one of `index_put`'s.
LINES: Mapping[str, str] = MappingProxyType(
    {
        REGISTRATION_LOGGER: "torchvision is not installed",
        "onnx_ir._convenience": "Attribute type is ambiguous because it is an empty sequence",
    }
)


class ONNXRuntime(Engine):
    """ONNX Runtime on a CPU."""

    name: ClassVar[str] = "ONNX Runtime"
    dtypes: ClassVar[Mapping[torch.dtype, str]] = MappingProxyType(TYPES)
    denied: ClassVar[Mapping[str, str]] = DENIED
    denied_floats: ClassVar[Mapping[str, str]] = DENIED_FLOATS

    def lacks(self, node: fx.Node) -> str:
        if not _registry().is_registered(node.target):
            return "ONNX Runtime does not have it"
        value = node.meta["val"]
        if op_name(node) in IN_FLOATING_POINT and not value.is_floating_point():
            return "ONNX Runtime computes it in floating point for integers"
        if op_name(node) in ONLY_FIRST and uses_more_than_first(node):
            return "only its first result is eager's on ONNX Runtime"
        if str(node.target) == "aten.squeeze.dim" and node.args[0].meta["val"].shape[node.args[1]] != 1:  # type: ignore[union-attr]
            return "ONNX Runtime squeezes only a size of one"
        if _differs_in_double(node):
            return "in float64 ONNX Runtime's result differs from eager's"
        return next((why for op, name, holds, why in UNTRANSLATED if _has(node, op, name, holds)), "")

    def decompositions(self, trains: bool = False) -> Decompositions:
        core = dict(core_aten_decompositions())
        return {op: rule for op, rule in core.items() if not _registry().is_registered(op)} | {**FORMULAS}

    def compile(self, part: fx.GraphModule) -> CompiledPart:
        import onnxruntime

        onnxruntime.disable_telemetry_events()
        model = _model(exported(part))
        session = onnxruntime.InferenceSession(model, _options(self.settings), providers=["CPUExecutionProvider"])
        return CompiledPart(_Session(session, part))


def _has(node: fx.Node, op: str, name: str, holds: Callable[[Any], bool]) -> bool:
    """Return whether a node, of the operator `op` if that is given, has an argument of a value."""
    declared = any(each.name == name for each in schema_of(node.target).arguments)
    return declared and op in ("", op_name(node)) and holds(argument(node, name))


def _differs_in_double(node: fx.Node) -> bool:
    """Return whether a node in float64 has a number that float32 does not represent: the exporter rounds it."""
    values = (each.meta["val"] for each in (node, *node.all_input_nodes))
    if not any(isinstance(each, torch.Tensor) and each.dtype == torch.float64 for each in values):
        return False
    given = [argument(node, each.name) for each in schema_of(node.target).arguments]
    numbers = [each for each in pytree.tree_leaves(given) if isinstance(each, float) and not math.isnan(each)]
    roots = op_name(node) == "linalg_vector_norm" and argument(node, "ord") not in (0, 1, 2)  # 1 / ord is rounded
    return roots or op_name(node) in ROUNDED or any(ctypes.c_float(each).value != each for each in numbers)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """ONNX Runtime's own is exactly 0 from -18 on."""
    return (1 + torch.exp(-x)).reciprocal()


def _glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Half of x times the sigmoid of the other half."""
    value, gate = x.chunk(2, dim)
    return value * _sigmoid(gate)


def _clamp(x: torch.Tensor, low: Any = None, high: Any = None) -> Any:
    """With one bound, the exporter makes the largest number of infinity."""
    if (low is None) == (high is None) or not x.is_floating_point():
        return NotImplemented
    bound = low if high is None else high
    bound = bound if isinstance(bound, torch.Tensor) else torch.full((), bound, dtype=x.dtype)
    return torch.maximum(x, bound) if high is None else torch.minimum(x, bound)


def _power(x: torch.Tensor, exponent: float) -> Any:
    """Eager has the square root, of which infinities and zeros have other signs than of the power."""
    if not x.is_floating_point() or exponent not in (0.5, -0.5):
        return NotImplemented
    return x.sqrt() if exponent == 0.5 else x.rsqrt()


aten = torch.ops.aten
# Right where the exporter's or ONNX Runtime's own are not.
FORMULAS: Decompositions = MappingProxyType(
    {
        aten.sigmoid.default: _sigmoid,
        aten.silu.default: lambda x: x / (1 + torch.exp(-x)),
        aten.glu.default: _glu,
        aten.clamp.default: _clamp,
        aten.clamp_min.default: _clamp,
        aten.clamp_max.default: lambda x, high: _clamp(x, high=high),
        aten.pow.Tensor_Scalar: _power,
    }
)


def exported(part: fx.GraphModule) -> ExportedProgram:
    """Return a part as an exported program: its attributes become buffers, and symbolic sizes stay symbolic."""
    graph, copies = fx.Graph(), {}
    attributes = part.graph.find_nodes(op="get_attr")
    users = part.graph.find_nodes(op="placeholder")
    for node in (*attributes, *users):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in part.graph.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [copies[node] for node in returned_by(part)]
    graph.output(tuple(outputs))
    buffers = {node: str(node.target) for node in attributes}
    inputs = [
        *(
            InputSpec(InputKind.BUFFER, TensorArgument(copies[n].name), name, persistent=True)
            for n, name in buffers.items()
        ),
        *(InputSpec(InputKind.USER_INPUT, _argument(copies[node]), None) for node in users),
    ]
    signature = ExportGraphSignature(
        inputs, [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in outputs]
    )
    _, takes = pytree.tree_flatten((tuple(range(len(users))), {}))
    _, gives = pytree.tree_flatten(tuple(range(len(outputs))))
    call = ModuleCallEntry("", ModuleCallSignature([], [], takes, gives))
    state = {name: part.get_buffer(name) for name in buffers.values()}
    return ExportedProgram(torch.nn.Module(), graph, signature, state, {}, [call])


def _argument(node: fx.Node) -> TensorArgument | SymIntArgument:
    """Return a placeholder as an argument of torch.export's signature."""
    kind = TensorArgument if isinstance(node.meta["val"], torch.Tensor) else SymIntArgument
    return kind(node.name)


def _model(program: ExportedProgram) -> bytes:
    """Return a program as the bytes of an ONNX model."""
    import onnx_ir
    from onnx_ir.passes.common import OutputFixPass

    with warnings.catch_warnings(), _without_lines_of_the_exporter():
        warnings.simplefilter("ignore")  # about the exporter's own code
        # Without the exporter's optimizer, which drops the addition of 1e-8 and less, and factors within 1e-5 of one.
        # This one of its steps is needed: ONNX Runtime does not write a result that is an input, such as `repeat` of a
        # scalar.
        model = translated(program, _registry())
        OutputFixPass()(model)
    return onnx_ir.to_proto(model).SerializeToString()  # type: ignore[no-any-return]


@cache
def _registry() -> Any:
    """Return the exporter's table of operators."""
    with _without_lines_of_the_exporter():
        return translated_operators()


@contextmanager
def _without_lines_of_the_exporter() -> Iterator[None]:
    """Drop this thread's lines in LINES; other threads' lines, and all others of this one, are logged as before."""
    thread = threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        return record.thread != thread or not str(record.msg).startswith(LINES[record.name])

    with undone() as stack:
        for logger in map(logging.getLogger, LINES):
            stack.callback(logger.removeFilter, keep)
            logger.addFilter(keep)
        yield


def _options(settings: Any) -> "onnxruntime.SessionOptions":
    """Return ONNX Runtime's options of a session."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    attributes = {
        "graph_optimization_level": getattr(ort.GraphOptimizationLevel, LEVELS[settings.graph_optimization_level]),
        "intra_op_num_threads": settings.intra_op_num_threads or torch.get_num_threads(),
        "inter_op_num_threads": settings.inter_op_num_threads,
        "execution_mode": getattr(ort.ExecutionMode, f"ORT_{settings.execution_mode.upper()}"),
        "enable_mem_pattern": settings.enable_mem_pattern,
        "enable_cpu_mem_arena": settings.enable_cpu_mem_arena,
        "log_severity_level": FATAL_ONLY,
    }
    for name, value in attributes.items():
        setattr(options, name, value)
    spins = "1" if settings.allow_spinning else "0"
    entries = {"session.intra_op.allow_spinning": spins, "session.inter_op.allow_spinning": spins}
    for name, value in {**entries, **(settings.session_config or {})}.items():
        options.add_session_config_entry(name, value)
    return options


class _Session:
    """Runs a session on torch's memory: inputs in place, outputs allocated by torch if their sizes are fixed."""

    def __init__(self, session: "onnxruntime.InferenceSession", part: fx.GraphModule) -> None:
        import numpy as np

        self.session = session
        self.kinds = {dtype: np.dtype(name).type for dtype, name in TYPES.items()}
        self.inputs = [each.name for each in session.get_inputs()]
        results = returned_by(part)
        names = [each.name for each in session.get_outputs()]
        self.outputs = [
            (name, fixed_sizes(node), node.meta["val"].dtype) for name, node in zip(names, results, strict=True)
        ]
        self.bindings = threading.local()

    def __call__(self, args: Inputs) -> list[torch.Tensor]:
        if (binding := getattr(self.bindings, "own", None)) is None:
            binding = self.bindings.own = self.session.io_binding()._iobinding
        alive = [*map(dense, args)]
        for value, name in zip(alive, self.inputs, strict=True):
            binding.bind_input(name, _CPU(), self.kinds[value.dtype], value.shape, value.data_ptr())
        outputs = [None if sizes is None else torch.empty(sizes, dtype=dtype) for _, sizes, dtype in self.outputs]
        for output, (name, _, dtype) in zip(outputs, self.outputs, strict=True):
            memory = () if output is None else (self.kinds[dtype], output.shape, output.data_ptr())
            binding.bind_output(name, _CPU(), *memory)
        self.session._sess.run_with_iobinding(binding, None)
        if all(each is not None for each in outputs):
            return outputs  # type: ignore[return-value]
        values = binding.get_outputs()
        return [
            _taken(value, dtype) if output is None else output
            for output, value, (_, _, dtype) in zip(outputs, values, self.outputs, strict=True)
        ]


@cache
def _CPU() -> Any:  # noqa: N802
    from onnxruntime.capi import _pybind_state

    return _pybind_state.OrtDevice(_pybind_state.OrtDevice.cpu(), _pybind_state.OrtDevice.default_memory(), 0)


def _taken(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return an output that ONNX Runtime allocated, as a tensor that owns it; DLPack passes booleans as bytes."""
    output: torch.Tensor = from_dlpack(value.to_dlpack())
    return output.view(dtype) if output.dtype != dtype else output
