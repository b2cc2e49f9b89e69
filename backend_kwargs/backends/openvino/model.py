"""A part of a graph as a compiled model of OpenVINO, which reads and writes torch's memory."""

import threading
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import fx

from backend_kwargs.backends import Inputs
from backend_kwargs.backends.partitioned import (
    MEMORY,
    CompiledPart,
    Engine,
    argument,
    dense,
    fixed_sizes,
    has_floats,
    uses_more_than_first,
)
from backend_kwargs.graphs.parts import Decompositions, calls_of, op_name, returned_by
from backend_kwargs.torch_internals.tensors import core_aten_decompositions

if TYPE_CHECKING:
    import openvino

# No integers: on a CPU OpenVINO computes int64 in 32 bits, and saturates or rounds int32, without an error.
TYPES = {torch.float32: "f32", torch.bool: "boolean"}
HINT = "INFERENCE_PRECISION_HINT"
OUT_OF_BOUNDS = "eager raises if an index is out of bounds"
DENIED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("_embedding_bag", "embedding", "gather", "index", "index_select", "index_put", "scatter", "take"),
        OUT_OF_BOUNDS,
    )
    | dict.fromkeys(("topk", "sort", "kthvalue", "median", "mode"), "OpenVINO orders equal values differently")
    | dict.fromkeys(("var", "var_mean", "std", "std_mean"), "OpenVINO ignores the correction")
    | {
        **MEMORY,
        "_scaled_dot_product_flash_attention_for_cpu": "ATen's kernel is faster than the parts that OpenVINO takes",
        "log_sigmoid_forward": "OpenVINO's frontend has one result of two",
        "_native_batch_norm_legit.no_stats": "OpenVINO's frontend has one result of three",
    }
)
NAN_IS_A_NUMBER = "OpenVINO takes nan for a number"
# Each fails at some number: tests/backends/probes.py has them. How nan compares depends on the processor.
DENIED_FLOATS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("elu", "erf", "log1p"), "OpenVINO's formula cancels near zero")
    | {"exp": "OpenVINO's is infinite from 88.4 on, and for nan"}
    | dict.fromkeys(("div.Tensor_mode", "fmod", "remainder"), "OpenVINO divides in 32-bit integers, or by infinity")
    | dict.fromkeys(
        ("all", "any", "eq", "ge", "gt", "le", "logical_and", "logical_not", "logical_or", "lt", "ne"), NAN_IS_A_NUMBER
    )
    | dict.fromkeys(
        ("amax", "amin", "argmax", "argmin", "logsumexp", "max.default", "max.dim", "maximum"), NAN_IS_A_NUMBER
    )
    | dict.fromkeys(("min.default", "min.dim", "minimum", "sign"), NAN_IS_A_NUMBER)
    | dict.fromkeys(
        ("adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"),
        NAN_IS_A_NUMBER,
    )
    | {"upsample_bilinear2d": "infinities and nan times a weight of zero are nan"}
)
NO_BOOLS = frozenset(
    {"add", "amax", "amin", "div", "isinf", "isnan", "logsumexp", "max", "maximum", "min", "minimum", "mul", "sign"}
)
# Decomposed, its comparison of all scores runs in eager: a ViT took 12 % longer on an EPYC.
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
NORMS = frozenset({"native_group_norm", "native_layer_norm"})
# OpenVINO packs a constant for these.
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution"})
PERMUTING = frozenset({"permute", "t", "transpose"})
MOVING = PERMUTING | {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "slice", "select", "expand", "clone"}


class OpenVINO(Engine):
    """OpenVINO on a CPU."""

    name: ClassVar[str] = "OpenVINO"
    dtypes: ClassVar[Mapping[torch.dtype, str]] = MappingProxyType(TYPES)
    denied: ClassVar[Mapping[str, str]] = DENIED
    denied_floats: ClassVar[Mapping[str, str]] = DENIED_FLOATS

    def lacks(self, node: fx.Node) -> str:
        if str(node.target) not in _translated():
            return "OpenVINO does not have it"
        reads, value = has_floats(node.all_input_nodes), node.meta["val"]
        if not reads and op_name(node) in NO_BOOLS:
            return "OpenVINO does not compute with bools"
        if reads and op_name(node) == "_to_copy" and value.dtype == torch.bool:
            return NAN_IS_A_NUMBER
        if op_name(node) in NORMS and uses_more_than_first(node):
            return "OpenVINO's frontend has one result of three"
        if op_name(node) in ("addmm", "baddbmm") and argument(node, "beta") == 0:
            return "OpenVINO multiplies nan by a beta of zero"
        if op_name(node) == "linalg_vector_norm" and argument(node, "ord") not in (1, 2):
            return NAN_IS_A_NUMBER
        empty = any(isinstance(each, list | tuple) and not each for each in node.args)
        return "OpenVINO has no type for an empty list" if empty else ""

    def decompositions(self, trains: bool = False) -> Decompositions:
        from openvino.frontend.pytorch.torchdynamo.export_decompositions import ops_to_not_decompose

        whole = {*ops_to_not_decompose(), *([ATTENTION] if self.settings.inference_precision == "f32" else [])}
        return {op: rule for op, rule in dict(core_aten_decompositions()).items() if op not in whole}

    def compile(self, part: fx.GraphModule) -> CompiledPart:
        _separate_constants(part)
        model = _converted(part)
        # Results that are copies of inputs, with the input's position, are removed: OpenVINO uses the memory of such a
        # result for the input as well, and so would overwrite torch's tensor.
        results = list(model.results)
        sources = [result.input_value(0).get_node() for result in results]
        copies = {
            i: model.get_parameter_index(source)
            for i, source in enumerate(sources)
            if source.get_type_name() == "Parameter"
        }
        for i in copies:
            model.remove_result(results[i])
        if not model.outputs or not calls_of(part):
            raise ValueError("nothing to compute")
        own = {
            HINT: self.settings.inference_precision,
            "INFERENCE_NUM_THREADS": self.settings.inference_num_threads or torch.get_num_threads(),
            "PERFORMANCE_HINT": self.settings.performance_hint,
            "ENABLE_CPU_PINNING": False,
        }
        # The part must live as long as the model, which shares its constants.
        compiled = _core().compile_model(model, "CPU", {**own, **(self.settings.config or {})})
        asked, computed_in = self.settings.inference_precision, compiled.get_property(HINT).to_string()
        other = HINT not in (self.settings.config or {}) and computed_in != asked
        notes = (f"OpenVINO computes in {computed_in}, not in {asked}",) if other else ()
        return CompiledPart(_Model(compiled, part, copies), notes=notes)


@cache
def _core() -> "openvino.Core":
    """Return the one OpenVINO runtime of this process."""
    import openvino

    return openvino.Core()


@cache
def _translated() -> frozenset[str]:
    """Return the operators that OpenVINO's own backend passes to its frontend, by their names in a graph."""
    from openvino.frontend.pytorch.torchdynamo.op_support import OperatorSupport

    named = OperatorSupport({})._support_dict
    return frozenset(name.removeprefix("torch.ops.") for name in named)


def _separate_constants(part: fx.GraphModule) -> None:
    """Give each constant memory of its own for each way in which products read it.

    OpenVINO keeps packed constants by address and sizes. So of `x @ w.T` and `y @ w` with a square `w`, or of a
    convolution and a transposed one, it would compute the second with the constant as packed for the first.
    """
    by_address: dict[int, dict[str, fx.Node | None]] = {}  # None: the memory that there is
    for constant in part.graph.find_nodes(op="get_attr"):
        value = part.get_buffer(str(constant.target))
        ways = by_address.setdefault(value.data_ptr(), {})
        for product, moves in list(_products_of(constant, ())):
            operand = moves[-1] if moves else constant
            permuting = [move for move in moves if op_name(move) in PERMUTING]
            read = [(node.target, [a for a in node.args if not isinstance(a, fx.Node)]) for node in permuting]
            others = [each for each in product.args if not isinstance(each, fx.Node)]
            way = str((value.shape, product.target, product.args.index(operand), others, read))
            if ways and way not in ways:
                name = f"{constant.target}_{len(ways)}"
                part.register_buffer(name, value.clone(), persistent=False)
                with part.graph.inserting_after(constant):
                    other = ways[way] = part.graph.get_attr(name)
                other.meta = dict(constant.meta)
            if (source := ways.setdefault(way, None)) is None:
                continue
            copied = {node: node for node in part.graph.nodes} | {constant: source}
            with part.graph.inserting_before(product):
                for move in moves:
                    copied[move] = part.graph.node_copy(move, copied.__getitem__)
            product.replace_input_with(operand, copied[operand])
    part.graph.eliminate_dead_code()
    part.recompile()


def _products_of(value: fx.Node, moves: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Yield the products that read `value`, each with the nodes that move its elements before."""
    for user in value.users:
        if op_name(user) in PRODUCTS:
            yield user, moves
        elif op_name(user) in MOVING:
            yield from _products_of(user, (*moves, user))


def _converted(part: fx.GraphModule) -> "openvino.Model":
    """Return a part as a model of OpenVINO, with torch's types and sizes."""
    import openvino
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    users = part.graph.find_nodes(op="placeholder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the frontend's own code
        frontend = FrontEndManager().load_by_framework("pytorch")
        decoder = TorchFXPythonDecoder(part)  # must be alive during the conversion
        model = frontend.convert(frontend.load(decoder))
    for parameter, node in zip(model.inputs, users, strict=True):
        value = node.meta["val"]
        tensor = isinstance(value, torch.Tensor)
        sizes = [size if isinstance(size, int) else -1 for size in value.shape] if tensor else []
        kind = TYPES[value.dtype] if tensor else "i64"
        parameter.get_node().set_element_type(getattr(openvino.Type, kind))
        parameter.get_node().set_partial_shape(openvino.PartialShape(sizes))
    model.validate_nodes_and_infer_types()
    for result, node in zip(model.outputs, returned_by(part), strict=True):
        _check(result, node)
    return model


def _check(result: "openvino.Output", node: fx.Node) -> None:
    """Raise if OpenVINO's result has another type, rank or shape than torch's: its translation then differs."""
    value, kind = node.meta["val"], result.get_element_type().get_type_name()
    if kind != TYPES[value.dtype]:
        raise TypeError(f"OpenVINO gives {kind} where torch gives {value.dtype}")
    shape = result.get_partial_shape()
    sizes = fixed_sizes(node)
    if (shape.rank.is_static and len(shape) != value.dim()) or (shape.is_static and sizes and [*shape] != [*sizes]):
        raise TypeError(f"OpenVINO gives the shape {shape} where torch gives {tuple(value.shape)}")


class _Model:
    """Runs a compiled model on torch's memory: inputs in place, outputs allocated by torch if their sizes are fixed."""

    def __init__(self, compiled: "openvino.CompiledModel", part: fx.GraphModule, copies: Mapping[int, int]) -> None:
        self.compiled, self.part, self.copies = compiled, part, copies
        computed = [node for i, node in enumerate(returned_by(part)) if i not in copies]
        # OpenVINO replaces an output buffer of another size by its own memory.
        sure = [output.get_partial_shape().is_static for output in compiled.outputs]
        self.outputs = [
            (fixed_sizes(node) if fixed else None, node.meta["val"].dtype)
            for fixed, node in zip(sure, computed, strict=True)
        ]
        self.requests = threading.local()

    def __call__(self, args: Inputs) -> list[torch.Tensor]:
        from openvino import Tensor

        if (request := getattr(self.requests, "own", None)) is None:
            request = self.requests.own = self.compiled.create_infer_request()
        alive = [*map(dense, args)]
        for i, value in enumerate(alive):
            request.set_input_tensor(i, Tensor(value.numpy(), shared_memory=True))
        outputs = [None if sizes is None else torch.empty(sizes, dtype=dtype) for sizes, dtype in self.outputs]
        for i, output in enumerate(outputs):
            if output is not None:
                request.set_output_tensor(i, Tensor(output.numpy(), shared_memory=True))
        request.infer(share_outputs=True)  # by default it also copies each result into a new array
        computed = [
            torch.from_numpy(request.get_output_tensor(i).data.copy()) if output is None else output
            for i, output in enumerate(outputs)
        ]
        for i, at in self.copies.items():  # in ascending order
            computed.insert(i, alive[at].clone())
        return computed
