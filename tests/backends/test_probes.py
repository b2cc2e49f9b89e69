"""Every operator that an engine or TVM takes, on numbers that random samples lack; and the strides of results."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch._prims_common import check_significant_strides
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import backend_kwargs as bk
from tests.backends.probed import Compiler, differences, groups, overloads
from tests.backends.probes import INF, NAN, Call, Values, calls, difference, names_of, probes_of

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]
PACKAGES = {"onnxruntime": "onnxruntime", "openvino-native": "openvino", "tvm": "tvm"}
NAMES = [pytest.param(n, marks=pytest.mark.skipif(not find_spec(p), reason=f"no {p}")) for n, p in PACKAGES.items()]
every = pytest.mark.parametrize("name", NAMES)
# Calls of an operator in a test; `python -m tests.backends.probed` runs all.
MOST = {torch.float32: 3, torch.int64: 1, torch.bool: 1}


def backend(name: str) -> Any:
    return bk.make_backend(name, {} if name == "tvm" else {"min_block_size": 1})


@every
def test_every_operator_has_probes(name):
    """An operator that a new release of a compiler takes needs probes, or a reason why it is left to eager."""
    compiler = Compiler(name)
    without = [op for op in compiler.operators() if not any(probes_of(op, dtype) for dtype in compiler.dtypes)]
    assert without == []


@every
@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_results_are_eagers(name, dtype):
    """Nan, infinities, zeros' signs and bools are the same, and numbers within rounding, each by its own size."""
    compiler = Compiler(name)
    if dtype not in compiler.dtypes or (name == "onnxruntime" and dtype != torch.float32):
        pytest.skip("left to eager, or takes minutes: many operators are refused at compile time")
    found: dict[str, str] = {}
    for group in groups(compiler.taken(dtype, MOST[dtype])):
        found |= differences(compiler, group)
    assert found == {}


TAILS = torch.tensor(
    [-100.0, -88, -50, -30, -20, -16, -14, -8, -2, -0.5, -1e-3, -1e-6, -1e-12, 0.0, 1e-12, 1e-6, 1e-3] * 2
)
ALL = torch.cat([TAILS, torch.tensor([0.5, 2, 8, 14, 16, 20, 30, 50, 80])])
SPECIAL = torch.tensor([NAN, 0.0, -0.0, INF, -INF, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5] * 2)
ROWS = torch.tensor([[NAN, 0.0], [0.0, 0.0], [1.0, NAN], [-0.0, 1e-40]])
LARGE_MEAN = torch.arange(40.0).reshape(2, 20) % 7 + 1e4
WHOLE = torch.tensor([0, 1, -1, 7, -7, 2**31, -(2**53) - 1, 2**63 - 1, -(2**63)])
CHAINS = {
    "log(sigmoid)": (lambda x: x.sigmoid().log(), TAILS[1:].clamp(min=-80)),
    "log(erfc)": (lambda x: torch.erfc(x).log(), torch.linspace(-3, 8, 45)),
    "logit(sigmoid)": (lambda x: x.sigmoid().logit(), TAILS.clamp(min=-80)[:10]),
    "p / (1 - p)": (lambda x: x.sigmoid() / (1 - x.sigmoid()), TAILS.clamp(min=-80)),
    "log(1 + exp)": (lambda x: torch.log1p(x.exp()), ALL),
    "softplus": (F.softplus, ALL),
    "log(softplus)": (lambda x: F.softplus(x).log(), TAILS.clamp(min=-80)),
    "logsigmoid": (lambda x: F.logsigmoid(x * 3), TAILS),
    "bce with logits": (lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).float(), reduction="none"), ALL),
    "log_softmax": (lambda x: x.reshape(2, -1).log_softmax(-1), TAILS),
    "mish": (F.mish, ALL.clamp(min=-80)),
    "silu": (F.silu, ALL.clamp(min=-80)),
    "glu": (lambda x: F.glu(torch.cat([x + 2, x], 0), 0), ALL.clamp(min=-80)),
    "elu": (F.elu, ALL),
    "expm1": (torch.expm1, ALL),
    "log1p": (lambda x: torch.log1p(x * 1e-6), ALL),
    "softsign": (F.softsign, ALL),
    "tanhshrink": (lambda x: x.tanh().log1p(), TAILS[-7:]),
    "any of nan": (lambda x: x.any(0), ROWS),
    "bool of nan": (lambda x: x.bool().float() * 2, ROWS),
    "not nan": (lambda x: x.logical_not().float() + 1, ROWS),
    "nan > 0": (lambda x: (x > 0).float() + 1, ROWS),
    "not (nan < 1)": (lambda x: ~(x < 1), SPECIAL),
    "max of nan": (lambda x: (x.amax(0) * 2, x.max(1)[0], x.argmax(1)), ROWS),
    "maximum of nan": (lambda x: torch.maximum(x * 2, x.flip(0)), SPECIAL),
    "one bound": (lambda x: (x.clamp(min=0) * 2, x.clamp(max=0) * 2), SPECIAL[3:11]),
    "round": (lambda x: (x * 1).round(), SPECIAL),
    "roots by pow": (lambda x: (x**0.5, x**-0.5), SPECIAL),
    "converted": (lambda x: (x * 2).to(torch.int64), torch.tensor([-2.7, -0.4, 0.4, 2.7, 1e9])),
    "integers divided": (lambda x: (x // -3, x % -3, torch.div(x, -3, rounding_mode="trunc"), x / 7), WHOLE),
    "true division in a mode": (lambda x: torch.div(x, 7, rounding_mode=None), WHOLE),
    "remainder": (lambda x: (x % -3, x.fmod(3), x // -3), SPECIAL),
    "shifts": (lambda x: (x << 1, x >> 2), WHOLE),
    "std of a large mean": (lambda x: x.std(1), LARGE_MEAN),
    "norm of a large mean": (lambda x: F.layer_norm(x, (20,)).abs().amax(), LARGE_MEAN - 9900),
    "cumsum": (lambda x: (x + 1).cumsum(0), SPECIAL[1:3].repeat(3)),
    "pooling": (lambda x: F.max_pool2d(x.reshape(1, 1, 2, 4), 2, padding=1), torch.full((8,), -INF)),
}  # fmt: skip


@every
def test_chains_are_eagers(name):
    """Pairs that engines fuse or compute by other formulas, compiled together, each on an input of its own."""

    def run(*xs: torch.Tensor) -> list[Any]:
        return [fn(x) for (fn, _), x in zip(CHAINS.values(), xs, strict=True)]

    inputs = [x.clone() for _, x in CHAINS.values()]
    with torch.no_grad():
        given, wanted = torch.compile(run, backend=backend(name))(*inputs), run(*inputs)
    found = {}
    for chain, one, other, x in zip(CHAINS, given, wanted, inputs, strict=True):
        for result, eager in zip(tree_leaves(one), tree_leaves(other), strict=True):
            if why := difference(result, eager, Call(None, (x,), {})):
                found[chain] = why
    assert found == {}


@every
def test_float64_keeps_its_numbers(name):
    """In float64 no number is rounded to float32, in the graph or in a formula, and nothing cancels near zero."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        formulas = [torch.log2(x), F.gelu(x, approximate="tanh"), x.norm(3), x.tanh(), F.celu(x - 1e-12, 2**20)]
        return [x + 1 / 3, x * 0.1, x.clamp(max=0.1), x.nan_to_num(), (x * INF).isinf(), *formulas]

    x = torch.tensor([1e-12, 0.3, 2.5, 7.0, INF, 1e160], dtype=torch.float64)
    with torch.no_grad():
        given = torch.compile(run, backend=backend(name))(x)
    torch.testing.assert_close(given, run(x), rtol=1e-12, atol=0)


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=CHANNELS_LAST[x.dim()]),
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded": lambda x: x[:1].expand(x.shape),
}  # fmt: skip


# The first one has strides by request, the second one has TVM's own rule.
SKIPPED = {"aten::resize_as", "aten::_scaled_dot_product_flash_attention_for_cpu"}


def shaped(op: Any) -> list[Call]:
    """Return a few calls of an operator with images, or else with matrices."""
    values = Values(torch.float32)
    required = [str(each.type) for each in op._schema.arguments if not each.has_default_value()]
    made = [
        call for call in calls(op, torch.float32) if any(isinstance(x, torch.Tensor) and x.dim() > 1 for x in call.args)
    ]
    if set(required) <= {"Tensor", "number"}:
        made = [Call(op, tuple(values.positive(2, 3, 4, 5) if each == "Tensor" else 1 for each in required), {})]
    if names_of(op)[1] in ("roll", "flip"):
        made = [Call(op, (values.plain(2, 3, 4, 5), *([[1]] if names_of(op)[1] == "roll" else []), [2]), {})]
    return made[:2]


def test_strides_of_fake_tensors_are_eagers():
    """Of each operator, whole or decomposed: a part's results get the strides of the fake tensors."""
    from torch._decomp import core_aten_decompositions

    from backend_kwargs.graphs.parts import with_eagers_layouts

    table, found = with_eagers_layouts(dict(core_aten_decompositions())), set()
    present = [Compiler(name) for name, package in PACKAGES.items() if find_spec(package)]
    for op in overloads():
        random = torch.Tag.nondeterministic_seeded in op.tags
        if random or op._schema.name in SKIPPED or not (op in table or any(compiler.has(op) for compiler in present)):
            continue
        for call in shaped(op):
            for layout, lay in LAYOUTS.items():

                def laid(x, lay=lay):
                    return lay(x) if x.dim() > 3 or (x.dim() > 1 and lay is not LAYOUTS["channels last"]) else x

                args, mode = tree_map_only(torch.Tensor, laid, call.args), FakeTensorMode(allow_non_fake_inputs=True)
                fakes = tree_map_only(torch.Tensor, lambda x, mode=mode: mode.from_tensor(x, static_shapes=True), args)
                try:
                    real = op(*args, **call.kwargs)
                    with mode:
                        fake = table[op](*fakes, **call.kwargs) if op in table else NotImplemented
                        fake = op(*fakes, **call.kwargs) if fake is NotImplemented else fake
                except (RuntimeError, TypeError, NotImplementedError, AssertionError):
                    continue
                for one, other in zip(tree_leaves(real), tree_leaves(fake), strict=True):
                    same = not isinstance(one, torch.Tensor) or one.shape != other.shape or one.layout != torch.strided
                    if not (same or check_significant_strides(one, other, only_cuda=False)[0]):
                        found.add((str(op), layout))
    assert found == set()


LAID_OUT = {
    "roll": lambda x: torch.roll(x, (1, 1), (2, 3)).relu() + 1,
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)) * 2,
    "pow": lambda x: 2.0**x + 1,
    "logsigmoid": lambda x: F.logsigmoid(x) * 2,
    "silu": lambda x: F.silu(x) * 2,
    "glu": lambda x: F.glu(x, 2) * 2,
}


@every
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_results_have_eagers_strides(name, layout):
    """Also where torch's fake tensors have others."""

    def run(x):
        return [fn(x) for fn in LAID_OUT.values()]

    x = layout(torch.randn(2, 3, 4, 5))
    with torch.no_grad():
        given, wanted = torch.compile(run, backend=backend(name))(x), run(x)
    assert [each.stride() for each in given] == [each.stride() for each in wanted]
    torch.testing.assert_close(given, wanted)
