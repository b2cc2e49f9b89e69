"""Tensors without memory, with which dynamo and AOTAutograd trace, and those that make a graph functional."""

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
