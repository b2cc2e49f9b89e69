"""Arithmetic on data as intrinsics that TVM's passes do not know until code is generated.

TVM simplifies floats as if they were real numbers, and integers as if they never overflowed: right for indices, wrong
for data. TVM's last pass, `LowerIntrin`, turns each intrinsic back into an operator, on every path to code.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Op, TensorLoad, Type, register_op_attr
from tvm.tirx import BufferStore, CallEffectKind, Expr
from tvm_ffi import register_global_func
from tvm_ffi.structural import StructuralMutator

PREFIX = "backend_kwargs."
COMPUTES = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)
COMPARES = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
NAMES: Mapping[type, str] = {operator: f"{PREFIX}{operator.__name__.lower()}" for operator in (*COMPUTES, *COMPARES)}
NUMBER, ISNAN = f"{PREFIX}number", f"{PREFIX}isnan"
WRAPPING = (tirx.Add, tirx.Sub, tirx.Mul)


def is_opaque(expr: Expr) -> bool:
    """Return whether an expression is arithmetic on data, which costs as much as an operator and less than a call."""
    return isinstance(expr, Call) and isinstance(expr.op, Op) and expr.op.name.startswith(PREFIX)


def number(value: float, dtype: str) -> Expr:
    """Return a constant; floats are opaque, since TVM folds them at construction: 0 * x becomes 0, also for nan."""
    constant = tirx.const(value, dtype)
    return _call(NUMBER, dtype, constant) if isinstance(constant, tirx.FloatImm) else constant


def value_of(expr: Expr) -> Any:
    """Return the number of a constant expression, None for any other."""
    while is_opaque(expr) and expr.op.name == NUMBER:
        (expr,) = expr.args
    return expr.value if isinstance(expr, tirx.FloatImm | tirx.IntImm) else None


def isnan(x: Expr) -> Expr:
    """Return whether a float is nan: TVM does not vectorize a loop that calls its own isnan."""
    return _call(ISNAN, "bool", x)


def hide(mod: tvm.IRModule, *, totals: bool = False) -> tvm.IRModule:
    """Make all arithmetic on data opaque in the values that a module's functions store.

    The operator that accumulates a sum stays, since schedules recognize sums by it; `totals` hides that of integers
    too, after scheduling.
    """
    hidden = {
        var: func.with_body(tvm_ffi.structural_mutate(func.body, (tirx.BufferStore, partial(_store, totals))))
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }
    mod.update(tvm.IRModule(hidden))
    return mod


def _store(totals: bool, store: BufferStore, _: object) -> BufferStore:
    """Return a store whose value is opaque; an accumulated total stays a plain sum."""
    value = store.value
    if not _is_total(store) or (totals and "float" not in str(value.ty.dtype)):
        value = opaque(value)
    else:
        value = tirx.Add(value.a, opaque(value.b))
    return tirx.BufferStore(store.buffer, value, store.indices)


def _is_total(store: BufferStore) -> bool:
    """Return whether a store adds to what it overwrites."""
    load = store.value.a if isinstance(store.value, tirx.Add) else None
    return (
        isinstance(load, TensorLoad)
        and load.source.same_as(store.buffer)
        and tvm_ffi.structural_equal(load.indices, store.indices)
    )


def opaque(expr: Expr, *variables: Expr) -> Expr:
    """Return an expression with all arithmetic on data opaque: on floats, on loaded values, on data's `variables`."""

    def operator(node: Expr, mutator: StructuralMutator) -> Expr:
        node = mutator.default_mutate(node)
        if not ("float" in str(node.a.ty.dtype) or _of_data(node, variables)):
            return node
        return _call(NAMES[type(node)], node.ty, node.a, node.b)

    def call(node: Expr, mutator: StructuralMutator) -> Expr:
        if isinstance(node.op, Op) and node.op.name == NUMBER:
            return node.args[0]
        return mutator.default_mutate(node)

    # A loaded value is data; its index is not.
    callbacks = [(TensorLoad, lambda node, _: node), (tuple(NAMES), operator), (Call, call)]
    return tvm_ffi.structural_mutate(expr, callbacks)


def _of_data(expr: Expr, variables: Sequence[Expr]) -> bool:
    """Return whether an expression reads data: loaded values, floats, or `variables`."""
    nodes: list[Expr] = []
    # A lambda, since TVM uses the return value of a visitor, and inspects its signature.
    kinds = TensorLoad, tirx.FloatImm, tirx.Var
    tvm_ffi.structural_walk(expr, (kinds, lambda node: nodes.append(node)))  # noqa: PLW0108
    return any(not isinstance(node, tirx.Var) or any(node.same_as(each) for each in variables) for node in nodes)


def _call(name: str, ty: Type | str, *args: Expr) -> Expr:
    """Return a call of an intrinsic; tensors become their loads."""
    return Call(Op.get(name), [getattr(x, "asobject", lambda x=x: x)() for x in args], ret_ty=ty)


# ---- turning them back into operators


def _operator(operator: type, call: Call) -> Expr:
    """Return an intrinsic as the operator that it hides."""
    # TVM narrows an index to 32 bits even if it is an operand of data.
    return operator(*_in(max((x.ty.dtype for x in call.args), key=lambda dtype: dtype.bits), call.args))


def _llvm(operator: type, call: Call) -> Expr:
    """Wrap integers in twice the bits: LLVM assumes no overflow, and TVM takes 0 - x for 0 if x is unsigned."""
    dtype = call.ty.dtype
    if operator not in WRAPPING or "int" not in str(dtype):
        return _operator(operator, call)
    return tirx.Cast(str(dtype), operator(*_in(_typed("int", 2 * dtype.bits, dtype), call.args)))


def _cuda(operator: type, call: Call) -> Expr:
    """Wrap integers as unsigned ones: signed overflow is undefined."""
    dtype = call.ty.dtype
    if operator not in WRAPPING or "int" not in str(dtype):
        return _operator(operator, call)
    bits = max(dtype.bits, 32)
    wrapped = operator(*_in(_typed("uint", bits, dtype), call.args))
    if "uint" not in str(dtype):
        # Not a cast, after which TVM takes the number for one that is never negative: x // 7 would be truncated.
        wrapped = tirx.reinterpret(str(_typed("int", bits, dtype)), wrapped)
    return wrapped if dtype.bits == bits else tirx.Cast(str(dtype), wrapped)


def _in(dtype: tvm_ffi.dtype, args: Sequence[Expr]) -> list[Expr]:
    """Return the arguments in one dtype."""
    return [x if x.ty.dtype == dtype else tirx.Cast(str(dtype), x) for x in args]


def _typed(code: str, bits: int, like: tvm_ffi.dtype) -> tvm_ffi.dtype:
    """Return a dtype with as many lanes as `like`."""
    return tvm_ffi.dtype(f"{code}{bits}").with_lanes(like.lanes)


def _isnan(unequal: Callable[[Expr, Expr], Expr], call: Call) -> Expr:
    """Return whether a value differs from itself."""
    (x,) = call.args
    value = tirx.Var("value", str(x.ty.dtype))
    return tirx.Let(value, x, unequal(value, value))


RULES: Mapping[str, Mapping[str, Callable[[Call], Expr]]] = {
    **{
        name: {
            "default": partial(_operator, operator),
            "llvm": partial(_llvm, operator),
            "cuda": partial(_cuda, operator),
        }
        for operator, name in NAMES.items()
    },
    # LLVM's NE is false for nan, and CUDA's vectors have no Not.
    ISNAN: {"default": partial(_isnan, lambda x, y: tirx.Not(tirx.EQ(x, y))), "cuda": partial(_isnan, tirx.NE)},
    NUMBER: {},
}


# Each intrinsic, and how it becomes an operator, is known to TVM from here on.
for _name, _rules in RULES.items():
    register_op_attr(_name, "TCallEffectKind", CallEffectKind.Pure.value)
    register_op_attr(_name, "TVectorizable", True)
    register_op_attr(_name, "TScriptPrinterName", _name)
    for _target, _rule in _rules.items():
        # Global, since TVM keeps what has a name; other objects are freed after Python has ended, which crashes.
        _lowers = register_global_func(f"{_name}.{_target}", _rule, override=True)
        tirx.register_intrin_lowering(_name, _target, f=_lowers)
