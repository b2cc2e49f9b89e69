"""The guards of an exported module: what torch.export and Inductor assumed of its inputs, read from their records."""

import copy
import hashlib
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from backend_kwargs.bundles.identity.operators import TORCH_NAMESPACES
from backend_kwargs.bundles.packages.guards import (
    OPERATIONS,
    Operation,
    PackageGuards,
    Symbol,
    TensorGuard,
    Term,
    Weight,
)
from backend_kwargs.bundles.packages.package import first_uses
from backend_kwargs.bundles.samples import Args, Kwargs, content_hash
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.measure.served import parts
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.fake_tensors import is_fake
from backend_kwargs.torch_internals.modules import buffers_of, parameters_of
from backend_kwargs.torch_internals.operators import OpOverload
from backend_kwargs.torch_internals.tensors import memory_id

Expr: TypeAlias = Any  # sympy has no annotations
INSIDE = "module."  # the exported module contains the user's
# Calls besides those of operators: their graphs are compared too.
KNOWN = ("wrap_with_set_grad_enabled", "wrap_with_autocast", "<built-in function getitem>")
# From a path in Python's dicts to the attribute as it is read.
PATHS = ((r"\['_(parameters|buffers|modules)'\]", ""), (r"\['(\w+)'\]", r".\1"))
READ_OFFSET = ("as_strided", "as_strided_copy", "as_strided_scatter")


def with_buffers(module: torch.nn.Module) -> torch.nn.Module:
    """Return `module` with the tensors among its attributes as buffers: torch.export makes others constants."""
    tensors = [*module.parameters(), *module.buffers()]
    plain = [
        (owner, name, value)
        for owner in module.modules()
        for name, value in vars(owner).items()
        if isinstance(value, torch.Tensor)
    ]
    if not plain:
        return module
    memo = {id(tensor): tensor for tensor in (*tensors, *(value for *_, value in plain))}
    twin = copy.deepcopy(module, memo)
    for owner in twin.modules():
        for name in [name for name, value in vars(owner).items() if isinstance(value, torch.Tensor)]:
            value = vars(owner).pop(name)
            owner.register_buffer(name, value, persistent=False)
    return twin


class Exported:
    """An exported program, and the module that was exported."""

    def __init__(self, program: torch.export.ExportedProgram, module: torch.nn.Module, identity: str) -> None:
        self.program, self.signature, self.module, self.identity = program, program.graph_signature, module, identity
        self.digest = _digest(program)
        # Only without writes in the graph itself does torch say what is written.
        functional = program.run_decompositions({})
        mutated = functional.graph_signature
        self.written = {*mutated.user_inputs_to_mutate.values()}
        written = [*mutated.buffers_to_mutate.values(), *mutated.parameters_to_mutate.values()]
        if written:
            raise BackendKwargsError(
                f"kind='aoti' must have a module that does not write to its weights, got one that writes to "
                f"{written[0].removeprefix(INSIDE)!r}: use kind='inductor'."
            )
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        self.inputs = [
            nodes[spec.arg.name]
            for spec in self.signature.input_specs
            if spec.kind.name == "USER_INPUT" and isinstance(nodes[spec.arg.name].meta.get("val"), torch.Tensor)
        ]
        self.sources = {**program.state_dict, **program.constants}
        self.weights = [
            (spec.target, bool(nodes[spec.arg.name].users))
            for spec in self.signature.input_specs
            if spec.kind.name in ("PARAMETER", "BUFFER")
        ]
        self.targets = {target for target, _ in self.weights}
        self.contains_constants = any(spec.kind.name == "CONSTANT_TENSOR" for spec in self.signature.input_specs)
        self.reads_offset = any(
            getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in READ_OFFSET
            for node in functional.graph.nodes
        )
        args, kwargs = program.example_inputs
        names = pytree.tree_unflatten(range(len(pytree.tree_leaves((args, kwargs)))), program.call_spec.in_spec)[1]
        leaves = pytree.tree_leaves((args, {name: kwargs[name] for name in names}))
        self.same_as = first_uses([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        modes = (node.meta["val"].fake_mode for node in self.inputs if hasattr(node.meta["val"], "fake_mode"))
        self.sizes: Any = getattr(next(modes, None), "shape_env", None)

    def guards(self, constants: set[str]) -> PackageGuards:
        """Return the guards, with the conditions that have come since; `constants` are those of the package."""
        tensors, symbols = [], dict[str, Symbol]()
        for at, node in enumerate(self.inputs):
            value = node.meta["val"]
            if value.layout is not torch.strided:
                raise BackendKwargsError(
                    f"kind='aoti' must have dense inputs, got one that is {value.layout}: use kind='inductor'."
                )
            shape, stride = (tuple(map(self._expression, each)) for each in (value.shape, value.stride()))
            for of, terms in (("shape", shape), ("stride", stride)):
                for dim, term in enumerate(terms):
                    if getattr(term, "is_Symbol", False):
                        symbols.setdefault(str(term), Symbol(at, of, dim))  # type: ignore[arg-type]
            offset = int(value.storage_offset()) if self.reads_offset else None
            tensors.append((shape, stride, offset, node.name in self.written))
        return PackageGuards(
            module=self.identity,
            graph=self.digest,
            tensors=tuple(
                TensorGuard(tuple(map(_term, shape)), tuple(map(_term, stride)), offset, written, same_as)
                for (shape, stride, offset, written), same_as in zip(tensors, self.same_as, strict=True)
            ),
            symbols=symbols,
            conditions=tuple(self._conditions(symbols)),
            weights=tuple(self._weights(constants)),
        )

    def _expression(self, size: int | torch.SymInt) -> Expr:
        return self.sizes.replace(size.node.expr) if isinstance(size, torch.SymInt) else size

    def _conditions(self, symbols: dict[str, Symbol]) -> Iterable[Operation]:
        """Yield the conditions on sizes that torch assumed, and their ranges."""
        if self.sizes is None:
            return
        import sympy

        guards = dict.fromkeys(self.sizes.replace(guard.expr) for guard in self.sizes.guards)
        for guard in guards:
            if guard is sympy.true:
                continue
            if unknown := [str(each) for each in guard.free_symbols if str(each) not in symbols]:
                raise BackendKwargsError(
                    f"kind='aoti' must have a module whose sizes follow from those of its inputs, got the condition "
                    f"{guard} on {unknown[0]}: use kind='inductor'."
                )
            condition = _term(guard)
            assert isinstance(condition, Operation)
            yield condition
        for symbol, values in self.sizes.var_to_range.items():
            if (name := str(symbol)) in symbols:
                if values.lower.is_Integer and values.lower > 0:
                    yield Operation("GreaterThan", (name, int(values.lower)))
                if values.upper.is_Integer:
                    yield Operation("LessThan", (name, int(values.upper)))

    def _weights(self, constants: set[str]) -> Iterable[Weight]:
        """Yield the tensors of the module that the code reads; of those that it contains, also the hash."""
        names: dict[int, list[str]] = {}
        for owner_name, owner in self.module.named_modules(remove_duplicate=False):
            for tables in (parameters_of(owner), buffers_of(owner), vars(owner)):
                for name, value in tables.items():
                    if isinstance(value, torch.Tensor):
                        names.setdefault(id(value), []).append(f"{owner_name}.{name}".lstrip("."))
        for target, used in self.weights:
            if not used and target not in constants:
                continue
            value = self.sources[target]
            paths = names.get(id(value), [target.removeprefix(INSIDE)])
            yield Weight(
                names=tuple(paths),
                constant=target,
                dtype=str(value.dtype),
                shape=tuple(value.shape),
                stride=value.stride(),
                sha256="" if target in constants else content_hash(value),
            )


def _digest(program: torch.export.ExportedProgram) -> str:
    """Return a hash of what the program computes, without the weights' values; "" if a call in it is not known."""
    graphs = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    lines = [str(program.graph_signature.input_specs), str(program.graph_signature.output_specs)]
    for graph in graphs:
        lines.append(graph.code)
        for node in graph.graph.nodes:
            known = isinstance(node.target, OpOverload) and node.target.namespace in TORCH_NAMESPACES
            if node.op == "call_function" and not known and str(node.target) not in KNOWN:
                return ""
            lines.append(f"{node.name} {node.op} {node.target} {pytree.tree_map(_kind, node.meta.get('val'))}")
    constants = [spec.target for spec in program.graph_signature.input_specs if spec.kind.name == "CONSTANT_TENSOR"]
    lines += [f"{name} {content_hash(program.constants[name])}" for name in constants]
    lines += [str(program.call_spec), str(program.range_constraints), str(torch.get_default_dtype())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _kind(value: object) -> str:
    """Return a tensor's properties, or another value, as text."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    stride = value.stride() if value.layout is torch.strided else None
    return f"{value.dtype}{tuple(value.shape)}{stride}{value.device}{value.layout}"


class HiddenReads(TorchFunctionMode):
    """Collects the tensors that a traced module reads, but which are not its own: their values become constants."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        """Note real tensors among the arguments: while tracing, those of the module and those made then are fake."""
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_dynamo_compiling():  # of the branches of torch.cond, which get tensors as arguments
            return result
        if func.__name__ != "__get__" or isinstance(result, torch.Tensor):  # not of a shape or a dtype
            leaves = pytree.tree_leaves((args, kwargs))
            self._found += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not is_fake(leaf)]
        return result

    def refuse(self, module: torch.nn.Module) -> None:
        """Raise if there is such a tensor, since its changes would go unseen."""
        if not self._found:
            return
        tensor = self._found[0]
        same = (path for path, part in parts(module) if isinstance(part, torch.Tensor) and _one_memory(part, tensor))
        name = next(same, "")
        for before, after in PATHS:
            name = re.sub(before, after, name)
        text = repr(name.removeprefix(".")) if name else f"a {tensor.dtype}{list(tensor.shape)} from elsewhere"
        raise BackendKwargsError(
            f"kind='aoti' must have a module whose tensors are parameters, buffers or attributes, got one that reads "
            f"{text}: register it as a buffer."
        )


def _one_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    return a.layout is b.layout is torch.strided and memory_id(a) == memory_id(b)


def _term(expression: Expr) -> Term:
    """Return sympy's expression as data."""
    if isinstance(expression, int) or getattr(expression, "is_Integer", False):
        return int(expression)
    if getattr(expression, "is_Float", False):
        return float(expression)
    if getattr(expression, "is_Symbol", False):
        return str(expression)
    name = type(expression).__name__
    if name not in OPERATIONS:
        raise BackendKwargsError(
            f"kind='aoti' cannot check the condition {expression} on sizes ({name}) at each call: use kind='inductor'."
        )
    return Operation(name, tuple(map(_term, expression.args)))
