"""Options for a region of a graph, shown by the generated code; options for whole graphs by number."""

import os
import subprocess
import sys

import pytest
import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

import backend_kwargs as bk

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
SCALAR = {"cpp.simdlen": 1}
REGIONS = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 has no options for each region")


def _region(number, options):
    def step(x):
        return (x + number).cos() * number

    return bk.region_options("tmpl-inductor", options)(step)


def _codes(fn, *args):
    with fresh_cache():
        out, codes = run_and_get_code(torch.compile(fn, backend=bk.make_backend(bk.compile_regions)), *args)
    torch.testing.assert_close(out, fn(*args))
    return codes


@REGIONS
@pytest.mark.parametrize(
    ("first", "second", "vectorized"),
    [
        pytest.param(SCALAR, {}, [False, True], id="first_scalar"),
        pytest.param({}, SCALAR, [True, False], id="second_scalar"),
    ],
)
def test_each_region_has_its_own_options(first, second, vectorized):
    """Of two neighbouring regions only one has no vector instructions, unlike with torch alone."""
    one, two = _region(2, first), _region(3, second)
    codes = _codes(lambda x: two(one(x)), torch.ones(64, 64))
    assert ["Vectorized" in code for code in codes] == vectorized


@REGIONS
def test_what_no_region_holds_is_not_compiled():
    """The rest of the graph runs in eager."""
    region = _region(4, {})
    (code,) = _codes(lambda x: region(x).exp().tan(), torch.ones(64, 64))
    assert "cos" in code
    assert "tan" not in code


@REGIONS
def test_gradients_flow_through_a_region():
    """The gradients of a region are right."""
    region = _region(5, SCALAR)

    def loss(x):
        return region(x.sin()).sum()

    x, y = (torch.full((8,), 0.5, requires_grad=True) for _ in range(2))
    torch.compile(loss, backend=bk.make_backend(bk.compile_regions))(x).backward()
    loss(y).backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        pytest.param("eager", {}, "A region is compiled by Inductor, got 'eager'.", id="other_backend"),
        pytest.param(
            "tmpl-inductor:freezing", {}, "Option 'freezing' is for whole graphs, not for a region.", id="whole_graphs"
        ),
        pytest.param(
            "tmpl-inductor",
            {"rewrites": ("patches",)},
            "Option 'rewrites' is for whole graphs, not for a region.",
            id="rewrites",
        ),
        pytest.param("tmpl-inductor:auto", {}, "Option 'auto' is for whole graphs, not for a region.", id="auto"),
        pytest.param(
            "tmpl-inductor",
            {"epilog_fusion": True},
            "Unknown Inductor option 'epilog_fusion'. Did you mean 'epilogue_fusion'?",
            id="unknown_option",
        ),
    ],
)
def test_what_a_region_cannot_have_is_an_error(spec, options, message):
    """An option that a region cannot have raises where the region is written."""
    with pytest.raises(bk.BackendKwargsError) as error:
        bk.region_options(spec, options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("rules", "kernels"),
    [
        pytest.param(">=0:tmpl-inductor:aten", [True, True], id="all"),
        pytest.param("0:eager;>0:tmpl-inductor:aten", [False, True], id="from_the_second"),
    ],
)
def test_template_for_some_graphs_by_environment(rules, kernels):
    """torch splits a rule at its first colon, so a template's name can contain one."""
    script = (
        "import torch, backend_kwargs as bk\n"
        "from backend_kwargs import compile_records\n"
        "first = torch.compile(lambda x: x + 1, backend='aot_eager'); first(torch.ones(3))\n"
        "second = torch.compile(lambda x: x - 1, backend='aot_eager'); second(torch.ones(3))\n"
        "print(*sorted((r.compile_id, r.spec) for r in compile_records.records()))"
    )
    env = {**os.environ, "TORCH_COMPILE_OVERRIDE_BACKENDS": rules}
    ran = subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True)
    expected = [(f"{at}/0", "tmpl-inductor:aten") for at, ours in enumerate(kernels) if ours]
    assert ran.stdout.strip() == " ".join(map(str, expected))
