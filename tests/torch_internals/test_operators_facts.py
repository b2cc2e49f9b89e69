"""Facts about operators, their decompositions, and expressions of sizes."""

import pytest
import torch

from backend_kwargs.torch_internals import symbols, tensors

aten = torch.ops.aten


def test_overloads_of_a_packet():
    """A packet has its overloads, and an overload is its own."""
    assert aten.add.Tensor in tensors.overloads_of(aten.add)
    assert tensors.overloads_of(aten.add.Tensor) == [aten.add.Tensor]


def test_names_have_no_overload():
    """An overload and its packet have one name, with the namespace."""
    assert tensors.name_of(aten.add.Tensor) == tensors.name_of(aten.add) == "aten::add"


def test_schemas_tell_what_is_written():
    """An argument that an operator writes is marked in its schema."""
    written = [each.name for each in tensors.arguments_of(aten.add_.Tensor) if each.is_write]
    assert (written, tensors.schema_of(aten.add_.Tensor).is_mutable) == (["self"], True)
    assert tensors.schema_of(len) is None


def test_some_overloads_have_no_kernel():
    """TorchScript's overloads of numbers have none."""
    kinds = {each: tensors.has_kernel(each) for each in tensors.overloads_of(aten.add)}
    assert kinds[aten.add.Tensor]
    assert not kinds[aten.add.int]


def test_kernels_by_key():
    """An operator has a kernel for a device, and none for a key that is not its."""
    assert tensors.has_kernel(aten.mm.default, "CPU")
    assert not tensors.has_kernel(aten.mm.default, "CompositeImplicitAutograd")


def test_composite_operators():
    """`matmul` is taken apart before any backend sees it, `mm` is not."""
    assert (tensors.is_composite(aten.matmul.default), tensors.is_composite(aten.mm.default)) == (True, False)


def test_effects():
    """Printing has an effect, adding none."""
    assert tensors.has_effects(aten._print)
    assert not tensors.has_effects(aten.add)


def test_custom_operators():
    """`custom_op` is known by its name, and rules for a dispatch mode as well."""

    @torch.library.custom_op("backend_kwargs_facts::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    op = torch.ops.backend_kwargs_facts.double.default
    assert (tensors.is_custom(op), tensors.is_custom(aten.mm.default)) == (True, False)
    assert not tensors.has_dispatch_rules(op)
    double.register_torch_dispatch(type("Mode", (torch.utils._python_dispatch.TorchDispatchMode,), {}), lambda *_: 0)
    assert tensors.has_dispatch_rules(op)


def test_inductor_lowers_atens_operators():
    """A product has a lowering, an operator of one's own has none."""
    assert tensors.is_lowered_by_inductor(aten.mm.default)
    assert not tensors.is_lowered_by_inductor(aten._print.default)


def test_names_of_aten():
    """They have neither namespace nor overload."""
    names = tensors.aten_names()
    assert {"add", "mm", "_softmax"} <= names
    assert not [name for name in names if "." in name or ":" in name]


def test_core_aten_has_rules_by_overload():
    """The table is by overload: it takes a norm's gradient apart, and no product."""
    table = dict(tensors.core_aten_decompositions())
    assert aten.native_layer_norm_backward.default in table
    assert aten.mm.default not in table


def test_tables_of_inductors_decompositions():
    """Both tables have a rule that is added."""
    from torch._inductor import decomposition

    op, tables = object(), (decomposition.decompositions, decomposition.select_decomp_table())
    try:
        tensors.decompose_in_inductor(op, abs)
        assert [table[op] for table in tables] == [abs, abs]
    finally:
        for table in tables:
            table.pop(op, None)


def test_channels_last_is_suggested():
    """The format of a tensor that lies in channels last is that."""
    x = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert tensors.suggest_memory_format(x) == torch.channels_last


def test_promotion_of_integers():
    """Integers become floating point where an operator is in floating point."""
    kind = tensors.ELEMENTWISE_TYPE_PROMOTION_KIND.INT_TO_FLOAT
    _, dtype = tensors.elementwise_dtypes(torch.zeros(2, dtype=torch.int64), type_promotion_kind=kind)
    assert dtype == torch.float32


def test_a_condition_on_sizes_raises():
    """One that does not hold raises RuntimeError with its text."""
    symbols.check(True, lambda: "no")
    with pytest.raises(RuntimeError, match="no"):
        symbols.check(False, lambda: "no")
