"""A small module for the tests of compiled modules."""

import torch


class Scaled(torch.nn.Module):
    """A linear layer followed by operations to fuse."""

    def __init__(self, size=8):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        self.register_buffer("scale", torch.full((size,), 0.5))

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(x)) * self.scale


def scaled(seed=0, size=8):
    torch.manual_seed(seed)
    return Scaled(size).eval()
