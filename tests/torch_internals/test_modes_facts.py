"""Facts about torch's modes, and about tensors without memory."""

import torch
from torch.autograd.graph import saved_tensors_hooks

from backend_kwargs.torch_internals import tensors


class Counting(tensors.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count = getattr(self, "count", 0) + 1
        return func(*args, **(kwargs or {}))


def test_without_modes_nothing_is_counted():
    """What runs without modes does not reach the mode."""
    with Counting() as counting:
        torch.ones(2)
        with tensors.without_modes():
            torch.ones(2)
    assert counting.count == 1


def test_hooks_of_saved_tensors_show():
    """The hooks are seen within their context alone."""
    found = [tensors.saves_by_hooks()]
    with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        found.append(tensors.saves_by_hooks())
    assert found == [False, True]


def test_the_grad_mode_is_switched_by_a_function():
    """The function that graphs call switches it until it is called again."""
    tensors.set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        tensors.set_grad_enabled(True)


def test_graphs_enter_autocast_by_a_function():
    """dynamo's graphs call this pair of functions."""
    entered = tensors.enter_autocast("cpu", torch.bfloat16, True, False)
    inside = torch.is_autocast_enabled("cpu")
    tensors.exit_autocast(entered)
    assert (inside, torch.is_autocast_enabled("cpu")) == (True, False)


def test_fake_tensors_share_versions_with_their_views():
    """A fake of a tensor has no memory, and counts what is written into it."""
    with tensors.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(4))
        fake[:2].add_(1)
    assert isinstance(fake, tensors.FakeTensor)
    assert fake._version == 1


def test_a_fake_mode_can_be_left_for_a_while():
    """Real tensors are made within."""
    with tensors.FakeTensorMode(), tensors.unset_fake_temporarily():
        assert type(torch.zeros(2)) is torch.Tensor
