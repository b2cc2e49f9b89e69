"""Facts about what torch keeps of a tensor and of a module."""

import pytest
import torch

from backend_kwargs.torch_internals import tensors


def test_a_version_counts_changes_in_place():
    """It counts through views too, and not through `.data`."""
    x = torch.zeros(4)
    x.add_(1)
    x[:2].mul_(2)
    x.data.add_(1)
    assert tensors.version_of(x) == 2


def test_inference_tensors_have_no_version():
    """They count nothing, and raise."""
    with torch.inference_mode():
        x = torch.zeros(4)
    with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
        tensors.version_of(x)


def test_views_have_their_memory_in_common():
    """A view, and an alias by `.data`, have the number of the tensor; a copy has another."""
    x = torch.zeros(4)
    assert tensors.memory_id(x) == tensors.memory_id(x[2:]) == tensors.memory_id(x.data) != tensors.memory_id(x.clone())


def test_a_view_knows_its_base():
    """`base_of` is the tensor itself, None for one that is no view."""
    x = torch.zeros(4)
    assert (tensors.base_of(x[:2]) is x, tensors.is_view(x[:2])) == (True, True)
    assert (tensors.base_of(x), tensors.is_view(x)) == (None, False)


def test_a_negative_view_flips_the_bit():
    """It shares memory, and its values are the negative ones."""
    x = torch.ones(2)
    view = tensors.negative_view(x)
    assert (view.is_neg(), view.tolist(), tensors.memory_id(view)) == (True, [-1.0, -1.0], tensors.memory_id(x))


def test_several_copies_are_one_call():
    """Each target gets its source's values."""
    targets = [torch.zeros(2), torch.zeros(3)]
    tensors.copy_each(targets, [torch.ones(2), torch.ones(3)])
    assert [target.sum().item() for target in targets] == [2, 3]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(torch.zeros(2, 3, dtype=torch.int32), id="dtype"),
        pytest.param(torch.zeros(3, 2), id="sizes"),
        pytest.param(torch.zeros(3, 2).T, id="strides"),
        pytest.param(torch.zeros(2, 3).requires_grad_(), id="requires-grad"),
    ],
)
def test_dynamos_check_of_layouts(other):
    """It holds for a tensor of the same kind, and for no other."""
    check = tensors.same_layouts([torch.zeros(2, 3)]).check
    assert (check(torch.ones(2, 3)), check(other)) == (True, False)


def test_a_static_address_shows():
    """dynamo's mark for CUDA graphs is read, and is not there before."""
    x = torch.zeros(2)
    before = tensors.has_static_address(x)
    torch._dynamo.mark_static_address(x)
    assert (before, tensors.has_static_address(x)) == (False, True)


def test_a_subclass_by_functions_alone_has_plain_dispatch():
    """Only `__torch_dispatch__` makes another dispatch."""

    class Named(torch.Tensor):
        pass

    class Dispatched(torch.Tensor):
        __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: NotImplemented)

    x = torch.zeros(2)
    kinds = (x, torch.nn.Parameter(x), x.as_subclass(Named), torch.Tensor._make_subclass(Dispatched, x))
    assert [*map(tensors.has_plain_dispatch, kinds)] == [True, True, True, False]


def test_transforms_wrap_tensors():
    """Within vmap a tensor is wrapped twice in two levels, and unwrapping returns what has the memory."""
    x, seen = torch.zeros(2, 3), []

    def look(row):
        seen.append((tensors.is_wrapped(row), tensors.memory_id(tensors.unwrapped(row))))
        return row

    torch.vmap(torch.vmap(look))(x)
    assert (seen[0], tensors.is_wrapped(x)) == ((True, tensors.memory_id(x)), False)


def test_the_order_of_attention_kernels():
    """Each kernel is named once, by a number, after what is allowed."""
    order = tensors.allowed_attention().rpartition("[")[2].rstrip("]").split(", ")
    assert all(each.lstrip("-").isdecimal() for each in order)
    assert len(set(order)) == len(order) > 3


def test_complex_parameters_stay_complex():
    """`replace_tensors` hands each tensor over as it is."""
    net = torch.nn.Module()
    net.w = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    tensors.replace_tensors(net, lambda tensor: tensor.to(torch.complex128))
    assert net.w.dtype == torch.complex128


class Counted(torch.nn.Module):
    """Has a tensor that is no buffer, which it converts itself."""

    total = torch.zeros(2)

    def _apply(self, fn, recurse=True):
        self.total = fn(self.total)
        return super()._apply(fn, recurse)


def test_a_module_replaces_its_tensors_itself():
    """As an LSTM does, which lists its weights once more."""
    net = Counted()
    tensors.replace_tensors(net, lambda tensor: tensor.double())
    assert net.total.dtype == torch.float64


def test_dropouts_have_a_class_in_common():
    """Each has the attribute `p`."""
    assert issubclass(torch.nn.Dropout2d, tensors.Dropout)
    assert torch.nn.Dropout().p == 0.5
