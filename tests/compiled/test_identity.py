"""Whether two modules are the same for a compiler: what is not known to be equal is different."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from unlike_modules import COMPARED, NOT_COMPARED, Environment, Monkeypatched, Scale, patched

from backend_kwargs.compiled.identity import identity_of, state_of


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in COMPARED.items()])
def test_a_module_is_like_one_built_alike_and_like_no_other(make):
    two = make(2.0)
    result, known = two(torch.ones(4)), identity_of(two)
    other = make(3.0)
    assert not torch.equal(other(torch.ones(4)), result)
    assert known is not None
    assert identity_of(other) != known
    assert identity_of(make(2.0)) == known


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in NOT_COMPARED.items()])
def test_a_module_that_cannot_be_compared_is_like_none(make):
    assert identity_of(make(2.0)) is None


