"""On a GPU: the effect of template dicts in AOTInductor, and Inductor's compile processes."""

import subprocess
import sys
from zipfile import ZipFile

import pytest
import torch

import backend_kwargs as bk
from tests.backends.inductor.ahead_of_time import Calls, result_of

ACTS = {
    "triton": "triton_tem_fused",
    "tma": "tensor_descriptor",
    "max_autotune_no_cudagraphs": "'coordinate_descent_tuning': True",
    "coordinate_descent": "'coordinate_descent_check_all_directions': True",
}


def relu_of_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) * 2


@pytest.fixture(scope="module")
def inputs():
    return tuple(torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))


def sources(inputs, config, folder):
    """Return the result of a package compiled with `config`, and its C++, with the Triton kernels as comments."""
    result = result_of(Calls(relu_of_mm), inputs, config, folder)
    with ZipFile(folder / "model.pt2") as file:
        return result, "\n".join(file.read(name).decode() for name in file.namelist() if name.endswith(".cpp"))


@pytest.fixture(scope="module")
def plain(ahead_of_time, inputs, tmp_path_factory):
    return sources(inputs, {}, tmp_path_factory.mktemp("plain"))[1]


@pytest.mark.parametrize("name", ACTS)
def test_dict_acts_in_aotinductor(inputs, plain, tmp_path, name):
    """The package shows the template's effect, which AOTInductor's default does not have."""
    result, code = sources(inputs, bk.make_backend(f"tmpl-inductor:{name}").inductor_config(), tmp_path)
    assert ACTS[name] in code
    assert ACTS[name] not in plain
    torch.testing.assert_close(result, relu_of_mm(*inputs), atol=1.0, rtol=0.05)


def test_compile_processes_start_with_the_first_compile():
    """Inductor's processes are started before a kernel needs them, as by torch's own backend: here none does."""
    code = """
import torch
from torch._inductor.async_compile import AsyncCompile

torch.compile(torch.mm, backend="tmpl-inductor")(*torch.ones(2, 8, 8, device="cuda"))
print(AsyncCompile.process_pool.cache_info().currsize)
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split()[-1] == "1"
