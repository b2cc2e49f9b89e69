"""The guards of an exported module: what torch.export and Inductor assumed of its inputs, read from their records."""

import copy
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backend_kwargs.compiled.operators import TORCH_NAMESPACES
from backend_kwargs.compiled.package import content_hash
from backend_kwargs.compiled.package_guards import (
    OPERATIONS,
    Operation,
    PackageGuards,
    Symbol,
    TensorGuard,
    Term,
    Weight,
)
from backend_kwargs.errors import BackendKwargsError

INSIDE = "module."  # the exported module contains the user's
# Calls besides those of operators: their graphs are compared too.
KNOWN = ("wrap_with_set_grad_enabled", "wrap_with_autocast", "<built-in function getitem>")
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

    def __init__(self, program: Any, module: torch.nn.Module, identity: str) -> None:
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
        _refuse_hidden(program, module)
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
                TensorGuard(tuple(map(_term, shape)), tuple(map(_term, stride)), offset, written)
                for shape, stride, offset, written in tensors
            ),
            symbols=symbols,
            conditions=tuple(self._conditions(symbols)),
            weights=tuple(self._weights(constants)),
        )

    def _expression(self, size: Any) -> Any:
        return self.sizes.replace(size.node.expr) if isinstance(size, torch.SymInt) else size

    def _conditions(self, symbols: dict[str, Symbol]) -> Iterable[Operation]:
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
            for tables in (owner._parameters, owner._buffers, vars(owner)):
                for name, value in tables.items():
                    if isinstance(value, torch.Tensor):
                        names.setdefault(id(value), []).append(f"{owner_name}.{name}".lstrip("."))
        for target, used in self.weights:
            if not used and target not in constants:
                continue
            value = self.sources[target]
            found = names.get(id(value), [target.removeprefix(INSIDE)])
            yield Weight(
                names=tuple(found),
                constant=target,
                dtype=str(value.dtype),
                shape=tuple(value.shape),
                stride=value.stride(),
                sha256="" if target in constants else content_hash(value),
            )


def _digest(program: Any) -> str:
    """Return a hash of what the program computes, without the weights' values; "" if a call in it is not known."""
    graphs = [each for each in program.graph_module.modules() if isinstance(each, torch.fx.GraphModule)]
    lines = [str(program.graph_signature.input_specs), str(program.graph_signature.output_specs)]
    for graph in graphs:
        lines.append(graph.code)
        for node in graph.graph.nodes:
            known = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in TORCH_NAMESPACES
            if node.op == "call_function" and not known and str(node.target) not in KNOWN:
                return ""
            lines.append(f"{node.name} {node.op} {node.target} {pytree.tree_map(_kind, node.meta.get('val'))}")
    constants = [spec.target for spec in program.graph_signature.input_specs if spec.kind.name == "CONSTANT_TENSOR"]
    lines += [f"{name} {content_hash(program.constants[name])}" for name in constants]
    lines += [str(program.call_spec), str(program.range_constraints), str(torch.get_default_dtype())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    stride = value.stride() if value.layout is torch.strided else None
    return f"{value.dtype}{tuple(value.shape)}{stride}{value.device}{value.layout}"


def _refuse_hidden(program: Any, module: torch.nn.Module) -> None:
    """Raise if a tensor in a list or dict of the module's is a constant, since its changes would go unseen."""
    hidden = {id(value): name for name, value in program.constants.items()}
    for owner_name, owner in module.named_modules():
        for name, value in vars(owner).items():
            if name in vars(torch.nn.Module()) or isinstance(value, torch.Tensor):
                continue
            if any(id(leaf) in hidden for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)):
                raise BackendKwargsError(
                    f"kind='aoti' must have a module whose tensors are parameters, buffers or attributes, got some in "
                    f"{f'{owner_name}.{name}'.lstrip('.')!r}: register them as buffers."
                )


def _term(expression: Any) -> Term:
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
