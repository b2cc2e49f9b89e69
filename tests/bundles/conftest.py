"""Small modules, and compiled ones that the tests of a process share, since compiling takes seconds."""

import copy

import pytest
import torch

import backend_kwargs as bk
from tests.bundles.small_module import scaled


@pytest.fixture
def module():
    return scaled()


@pytest.fixture
def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def bundle_of_eager(tmp_path_factory):
    """A bundle with the backend eager: built quickly, with weights, samples and a manifest, without code."""
    path = tmp_path_factory.mktemp("eager") / "bundle"
    built = bk.CompiledModule(bk.CompileConfig(backend="eager")).build(scaled(), [torch.randn(4, 8)])
    built.save(path)
    return path


@pytest.fixture(scope="session")
def bundle_with_code(tmp_path_factory):
    """A bundle with compiled code."""
    path = tmp_path_factory.mktemp("code") / "bundle"
    bk.CompiledModule().build(scaled(), [torch.randn(4, 8)]).save(path)
    return path


@pytest.fixture
def loaded(bundle_of_eager):
    return bk.CompiledModule.load(bundle_of_eager, scaled(seed=5))


@pytest.fixture
def state_of():
    """Return a copy of a module's state dict, for a later comparison."""
    return lambda module: copy.deepcopy(module.state_dict())
