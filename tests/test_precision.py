"""Lower precision by consent: casts in the graph, torchao's linear layers, and the measured error."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import backend_kwargs as bk
from backend_kwargs import BackendKwargsError, BackendKwargsWarning
from backend_kwargs.compilers.precision import table
from backend_kwargs.requirements import CannotWorkError, Machine, installed_version

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*cannot act fully here"),
]
torchao = pytest.mark.skipif(installed_version("torchao") is None, reason="torchao is not installed")
INT8 = [pytest.param(name, marks=torchao) for name in ("int8-dynamic", "int8-weight")]
CASTS = ["bf16", "fp16"]
BOUND = 0.05


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).eval()


def rows(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(1))


def in_precision(model, precision: str, max_error: float = BOUND, spec: str = "tmpl-inductor", **options):
    backend = bk.make_backend(spec, precision=precision, max_error=max_error, **options)
    return torch.compile(model, backend=backend)


def error(result: torch.Tensor, model: nn.Module, *inputs: torch.Tensor) -> float:
    with torch.no_grad():
        precise = copy.deepcopy(model).double()(*(each.double() for each in inputs))
    return ((result.double() - precise).square().mean() / precise.square().mean()).sqrt().item()


def used(compiled):
    return bk.report(compiled).graphs[0].precision


def code(compiled) -> str:
    return "".join(each.source for graph in bk.report(compiled).graphs for each in graph.codes)


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"precision": "bf17"}, "Unknown precision 'bf17'. Did you mean 'bf16'?", id="unknown"),
        pytest.param(
            {"precision": "exact"},
            "Unknown precision 'exact'. It is one of tf32, bf16, fp16, int8-dynamic, int8-weight, fp8-dynamic.",
            id="nothing near",
        ),
        pytest.param(
            {"precision": "bf16"},
            "Option 'precision' needs 'max_error', the largest relative error of an output that you accept: for "
            "example, pass max_error=1e-2.",
            id="no bound",
        ),
        pytest.param(
            {"precision": "bf16", "max_error": 0},
            "Option 'max_error' must be float above 0 and below 1 | None, got 0 (int).",
            id="bound of 0",
        ),
        pytest.param(
            {"precision": ("bf16", "fp16"), "max_error": 0.01},
            "Option 'precision' names 2 (bf16, fp16), but only `auto` can choose between them: name one, or pass "
            "auto=True.",
            id="two without a race",
        ),
        pytest.param(
            {"precision": "bf16", "max_error": 0.01, "use_aoti": True},
            "Options 'use_aoti' and 'precision' cannot be combined; leave one out.",
            id="ahead of time",
        ),
        pytest.param(
            {"precision": "tf32", "max_error": 0.01},
            "Precision 'tf32' is refused: in torch it is a setting of the whole process, so products of other threads "
            "would use it too; call torch.set_float32_matmul_precision('high') yourself, or consent to "
            "'bf16'.",
            id="tf32",
        ),
    ],
)
def test_wrong_options(options, message):
    """Options that make no sense raise when the backend is created."""
    with pytest.raises(BackendKwargsError) as caught:
        bk.make_backend("tmpl-inductor", options)
    assert str(caught.value) == message


@pytest.mark.parametrize("given", ["bf16", ("bf16",), ["bf16"], " bf16 ,bf16"], ids=repr)
def test_one_value_for_all_spellings(given):
    """A name, a list and a string of names are the same option, also in a config."""
    backend = bk.make_backend("tmpl-inductor", precision=given, max_error=0.01)
    assert backend == bk.make_backend("tmpl-inductor", precision=("bf16",), max_error=0.01)
    assert type(backend).from_config(backend.to_config()) == backend


@pytest.mark.parametrize(
    ("name", "here", "expected"),
    [
        pytest.param("bf16", Machine(cpu_dtypes=frozenset({"bf16"})), "", id="a CPU with bf16"),
        pytest.param("bf16", Machine(capability=(8, 0), gpu="A100"), "", id="a GPU with bf16"),
        pytest.param(
            "bf16",
            Machine(),
            "Precision 'bf16' cannot act fully here: neither the GPU nor the CPU has instructions for bfloat16 "
            "products; torch emulates it, which is slow.",
            id="no bf16",
        ),
        pytest.param(
            "int8-dynamic",
            Machine(),
            "Precision 'int8-dynamic' cannot work here: torchao is not importable; "
            'pip install "backend-kwargs[torchao]".',
            id="no torchao",
        ),
        pytest.param(
            "fp8-dynamic",
            Machine(packages=frozenset({"torchao"}), capability=(8, 0), gpu="A100"),
            "Precision 'fp8-dynamic' cannot work here: no GPU has instructions for float8 products (compute capability "
            "8.9 and up); run on an Ada or Hopper GPU or a later one.",
            id="no float8",
        ),
    ],
)
def test_requirements(name, here, expected):
    """A missing requirement raises if the precision cannot work, and warns if it is slow."""
    limits = []
    try:
        table.verify({"precision": (name,), "max_error": 0.01}, here, limits.append)
    except CannotWorkError as lacking:
        limits = [str(lacking)]
    assert "".join(map(str, limits)) == expected


def test_a_race_leaves_out_what_cannot_work():
    """In a race a precision that this machine lacks is only a warning, since others may win."""
    limits = []
    asked = {"precision": ("bf16", "int8-dynamic"), "max_error": 0.01, "auto": True}
    table.verify(asked, Machine(cpu_dtypes=frozenset({"bf16"})), limits.append)
    assert [str(limit) for limit in limits] == [
        "Precision 'int8-dynamic' cannot act fully here: torchao is not importable; `auto` does not try it."
    ]


def test_bound_without_precision_is_inert():
    """`explain` says that a bound without a precision has no effect."""
    (effect,) = bk.explain("tmpl-inductor", max_error=0.01).effects
    assert effect.status == "inert because it is read only with precision"


# ---- casts


@pytest.mark.parametrize("precision", CASTS)
@pytest.mark.parametrize("freezing", [False, True], ids=["", "freezing"])
def test_products_are_cast(precision, freezing):
    """Products are computed in the requested precision; the output has the model's dtype."""
    model, x = net(), rows()
    compiled = in_precision(model, precision, freezing=freezing)
    with torch.no_grad():
        result = compiled(x)
    assert result.dtype == torch.float32
    assert 1e-4 < error(result, model, x) < 1e-2
    found = used(compiled)
    assert (found.precision, found.products, found.reason) == (precision, 2, "")
    assert found.error == pytest.approx(error(result, model, x), rel=0.5)


@pytest.mark.parametrize("precision", CASTS)
def test_training(precision):
    """In training gradients are float32, like parameters, and close to those of float32."""
    model, x = net().train(), rows()
    in_precision(model, precision)(x).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for grad, parameter in zip(found, model.parameters(), strict=True):
        assert grad.dtype == torch.float32
        assert (grad - parameter.grad).norm() < 0.02 * parameter.grad.norm()
        assert not torch.equal(grad, parameter.grad)


def test_a_break_sees_the_captured_dtype():
    """Code after a graph break that checks a dtype takes the branch of the original model."""
    seen = []

    def branching(x, w):
        y = x @ w
        torch._dynamo.graph_break()
        seen.append(y.dtype)
        return (y * 2 if y.dtype == torch.float32 else y * 100) @ w

    x, w = rows(64), torch.randn(64, 64)
    with torch.no_grad():
        result = in_precision(branching, "bf16")(x, w)
    assert seen == [torch.float32]
    assert (result - (x @ w) * 2 @ w).norm() < 0.02 * result.norm()


def test_branches_on_dtype_within_a_graph():
    """Within a graph the captured branch is kept, and the result is computed from float32 values."""

    def branching(x, w):
        y = x @ w
        return y + 1e-3 if y.dtype == torch.float32 else y - 1

    x, w = rows(64), torch.randn(64, 64)
    with torch.no_grad():
        result = in_precision(branching, "bf16")(x, w)
    assert (result - branching(x, w)).norm() < 0.02 * result.norm()


@pytest.mark.parametrize("fused", [False, True], ids=["written out", "sdpa"])
def test_masks_of_the_least_float(fused):
    """A mask of finfo(float32).min, which bfloat16 cannot represent, masks; a fully masked row stays finite."""

    def attend(q, k, v, keep):
        mask = torch.where(keep, 0.0, torch.finfo(q.dtype).min)
        if fused:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (q @ k.transpose(-1, -2) / 4 + mask).softmax(-1) @ v

    q, k, v = (torch.randn(2, 8, 16) for _ in range(3))
    keep = torch.ones(8, 8, dtype=torch.bool).tril()
    keep[3] = False
    with torch.no_grad():
        compiled = in_precision(attend, "bf16")
        result = compiled(q, k, v, keep)
    assert used(compiled).reason == ""
    assert (result - attend(q, k, v, keep)).norm() < 0.02 * result.norm()


def test_outputs_that_alias_and_integers():
    """Outputs that share memory, integers and booleans equal eager's."""

    def several(x, w):
        y = x @ w
        return y, y.view(-1), (x > 0).sum(1), torch.arange(3), y.shape[0]

    x, w = rows(), torch.randn(64, 16)
    with torch.no_grad():
        y, flat, counts, three, size = in_precision(several, "bf16")(x, w)
    assert flat.untyped_storage()._cdata == y.untyped_storage()._cdata
    assert torch.equal(counts, (x > 0).sum(1))
    assert torch.equal(three, torch.arange(3))
    assert size == 8


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_convolutions(inplace):
    """A convolution's result stays narrow through batch norm, ReLU and pooling, also if these are in place."""
    torch.manual_seed(0)
    block = (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=inplace), nn.MaxPool2d(2))
    model, x = nn.Sequential(*block, nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)).eval(), torch.randn(2, 8, 12, 12)
    compiled = in_precision(model, "bf16", freezing=True)
    with torch.no_grad():
        assert error(compiled(x), model, x) < 0.02
    assert used(compiled).products == 2


def test_what_is_overwritten_stays_wide():
    """A view of a product that is overwritten later is not replaced by the narrow product."""

    def overwriting(x, w):
        y = x @ w
        first = y[:2]
        y.mul_(3)
        return first @ w.T, y

    x, w = rows(), torch.randn(64, 16)
    with torch.no_grad():
        first, y = in_precision(overwriting, "bf16")(x, w)
        wanted, whole = overwriting(x, w)
    assert (first - wanted).norm() < 0.02 * wanted.norm()
    assert (y - whole).norm() < 0.02 * whole.norm()


def test_dynamic_shapes():
    """One graph serves several sizes, and the error is measured for each size that is compiled."""
    model = net()
    compiled = torch.compile(
        model, backend=bk.make_backend("tmpl-inductor", precision="bf16", max_error=BOUND), dynamic=True
    )
    with torch.no_grad():
        for count in (4, 7, 13):
            assert error(compiled(rows(count)), model, rows(count)) < BOUND
    assert len(bk.report(compiled).graphs) == 1


def test_a_model_in_bfloat16_has_nothing_to_cast():
    """If nothing is computed in float32 the option says so, and the graph is compiled unchanged."""
    model, x = net().bfloat16(), rows().bfloat16()
    compiled = in_precision(model, "fp16")
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        compiled(x)
    assert str(warned[-1].message) == (
        "A graph is compiled without precision 'fp16': no product or convolution computes in float32."
    )
    assert used(compiled).reason == "no product or convolution computes in float32"


def test_the_users_autocast_is_left_alone():
    """Products that the user's autocast has cast are not cast again."""
    model, x = net(), rows()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.warns(BackendKwargsWarning):
        assert in_precision(model, "fp16")(x).dtype == torch.bfloat16


def test_checkpointed_parts_are_cast():
    """A checkpointed part is computed in the precision too, forward and backward."""
    model, x = net().train(), rows()

    def checkpointed(x):
        return checkpoint(model, x, use_reentrant=False)

    compiled = in_precision(checkpointed, "bf16")
    compiled(x).sum().backward()
    assert (used(compiled).products, used(compiled).reason) == (2, "")
    found = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    assert 0 < (found - model[0].weight.grad).norm() < 0.02 * found.norm()


# ---- weights


@pytest.mark.parametrize("precision", ["bf16", *INT8])
def test_weights_follow_their_parameter(precision):
    """A parameter changed in place, replaced or given other memory takes effect, if possible without a compile."""
    model, x = net(), rows()
    compiled = in_precision(model, precision)
    with torch.no_grad():
        for change in (
            lambda: model[0].weight.mul_(-3),
            lambda: model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()}),
            lambda: setattr(model[2].weight, "data", torch.randn(32, 96)),
            lambda: setattr(model[0], "weight", nn.Parameter(torch.randn(96, 64))),
        ):
            assert error(compiled(x), model, x) < BOUND
            change()
        assert error(compiled(x), model, x) < BOUND
    assert bk.report(compiled).graphs[-1].compile_id == "0/1"  # for the parameter replaced, and no other


@pytest.mark.parametrize("precision", INT8)
def test_frozen_quantised_weights_follow(precision):
    """With freezing a changed weight is compiled again, since it is a constant."""
    model, x = net(), rows()
    compiled = in_precision(model, precision, freezing=True)
    with torch.no_grad():
        compiled(x)
        model[0].weight.mul_(-3)
        assert error(compiled(x), model, x) < BOUND


@torchao
def test_data_writes_are_unseen():
    """A write through `.data` goes unnoticed, as documented, until another write changes the version."""
    model, x = net(), rows()
    compiled = in_precision(model, "int8-dynamic")
    with torch.no_grad():
        before = compiled(x)
        model[0].weight.data.mul_(2)
        assert torch.equal(compiled(x), before)
        model[0].weight.mul_(1)
        assert error(compiled(x), model, x) < BOUND


@pytest.mark.parametrize("precision", ["bf16", *INT8])
def test_the_module_stays_as_it_is(precision):
    """Parameters keep identity, type, values and hooks; the state dict has the same keys."""
    model, x = net(), rows()
    parameters, state = list(model.parameters()), {name: v.clone() for name, v in model.state_dict().items()}
    with torch.no_grad():
        in_precision(model, precision)(x)
    assert [*map(id, parameters)] == [*map(id, model.parameters())]
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert type(model[0]) is nn.Linear


@torchao
def test_weights_are_made_once():
    """Graphs of one model share converted weights, and a report shows their size."""
    from backend_kwargs.compilers.precision import weights

    model = net()
    compiled = torch.compile(
        model, backend=bk.make_backend("tmpl-inductor", precision="int8-dynamic", max_error=BOUND), dynamic=False
    )
    with torch.no_grad():
        compiled(rows(4))
        (first,) = [made() for made in weights._made[model[0].weight].values()]
        compiled(rows(5))
        (again,) = [made() for made in weights._made[model[0].weight].values()]
    assert first is again
    sizes = [graph.precision.nbytes for graph in bk.report(compiled).graphs]
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]
    assert 64 * 96 + 96 * 32 < sizes[0] < 2 * (64 * 96 + 96 * 32)


@torchao
def test_two_modules_of_one_code_have_their_own_weights():
    """One compiled function called with two modules uses each one's weights."""
    first, second, x = net(), net(), rows()
    second[0].weight.data.mul_(-2)
    compiled = in_precision(lambda model, x: model(x), "int8-weight")
    with torch.no_grad():
        assert error(compiled(first, x), first, x) < BOUND
        assert error(compiled(second, x), second, x) < BOUND
        assert error(compiled(first, x), first, x) < BOUND


# ---- torchao


@torchao
def test_torchaos_kernels_are_in_the_code():
    """Linear layers multiply integers."""
    compiled = in_precision(net(), "int8-dynamic")
    with torch.no_grad():
        compiled(rows())
    assert code(compiled).count("_int_mm") >= 2
    assert used(compiled).products == 2


@torchao
def test_int8_weights_are_read_as_int8():
    """In the generated code weights are int8, and only the bias is float32."""
    compiled = in_precision(net(), "int8-weight")
    with torch.no_grad():
        compiled(rows())
    assert "torch.int8" in code(compiled)


@torchao
def test_int8_does_not_train():
    """With gradients the precision is refused with the reason, and the graph is compiled unchanged."""
    with pytest.warns(BackendKwargsWarning) as warned:
        in_precision(net(), "int8-dynamic")(rows()).sum().backward()
    assert str(warned[0].message) == (
        "A graph is compiled without precision 'int8-dynamic': it is for inference: call the model under "
        "torch.no_grad()."
    )


@torchao
def test_inference_tensors_are_refused():
    """Parameters created in inference mode are refused, since they have no version counter."""
    with torch.inference_mode():
        model = net()
        with pytest.warns(BackendKwargsWarning) as warned:
            in_precision(model, "int8-dynamic")(rows())
    assert str(warned[0].message) == (
        "A graph is compiled without precision 'int8-dynamic': a weight is an inference tensor, which has no version "
        "counter."
    )


@pytest.mark.parametrize("precision", ["bf16", *INT8])
def test_inference_mode(precision):
    """A model created outside inference mode and called in it uses the precision, and its weights are followed."""
    model, x = net(), rows()
    compiled = in_precision(model, precision)
    with torch.inference_mode():
        assert error(compiled(x), model, x) < BOUND
    with torch.no_grad():
        model[0].weight.mul_(-2)
    with torch.inference_mode():
        assert error(compiled(x), model, x) < BOUND
    assert used(compiled).nbytes > 0


@torchao
def test_two_threads():
    """Two threads that call one graph use the current weight after it changes between calls."""
    model, x = net(), rows()
    compiled = in_precision(model, "int8-dynamic")
    errors = []

    def call() -> None:
        with torch.no_grad():
            errors.extend(error(compiled(x), model, x) for _ in range(20))

    with torch.no_grad():
        compiled(x)
        model[0].weight.mul_(-2)
    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 40
    assert max(errors) < BOUND


# ---- the bound


def test_beyond_the_bound_is_not_used():
    """If the error exceeds the bound, the graph is compiled as captured, with a warning and a line in the report."""
    model, x = net(), rows()
    compiled = in_precision(model, "bf16", max_error=1e-5)
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        assert error(compiled(x), model, x) < 1e-6
    assert str(warned[0].message).startswith("A graph is compiled without precision 'bf16': output[0]: error 0.00")
    assert str(warned[0].message).endswith(", above max_error=1e-05.")
    assert str(used(compiled)).startswith("precision bf16 is not used: output[0]: error 0.00")


def test_strict_raises_beyond_the_bound():
    """With strict=True an error beyond the bound raises."""
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Precision 'bf16' is refused"):
        in_precision(net(), "bf16", max_error=1e-5, strict=True)(rows())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        pytest.param(
            lambda x: functional.dropout(x @ x.T, 0.5, training=True),
            "its error cannot be measured: it draws random numbers",
            id="random",
        ),
        pytest.param(
            lambda x: (x @ x.T).to(torch.float32).view(torch.int32),
            "its error cannot be measured: TypeError: it reads the bits of numbers, which differ in float64",
            id="bits",
        ),
    ],
)
def test_no_reference(model, reason):
    """If there is no float64 reference, the precision is refused with the reason."""
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        in_precision(model, "bf16")(rows())
    assert str(warned[0].message) == f"A graph is compiled without precision 'bf16': {reason}."


def test_the_measure_leaves_no_trace():
    """Random states, inputs that the graph writes and gradients are as after one call."""
    buffer, x, w = torch.zeros(8, 16), rows(), torch.randn(64, 16)

    def counting(x, w, buffer):
        return buffer.add_(x @ w)

    compiled = in_precision(counting, "bf16")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.no_grad():
        compiled(x, w, buffer)
    assert torch.equal(torch.get_rng_state(), state)
    assert (buffer - x @ w).norm() < 0.02 * buffer.norm()


def test_the_reference_widens_what_the_model_narrows():
    """The reference of a model that rounds to bfloat16 between its layers does not round."""
    from backend_kwargs.compilers.precision.reference import InFloat64

    graph = torch.fx.symbolic_trace(lambda x: (x.to(torch.bfloat16).float() * 3).half())
    x = torch.randn(100)
    assert torch.equal(InFloat64(graph).run(x), x.double() * 3)


def test_configuration_is_left_alone():
    """Neither Inductor's configuration nor torch's precision settings change."""
    from torch._inductor import config

    before = config.get_config_copy(), torch.get_float32_matmul_precision()
    for name in ("bf16", *(["int8-dynamic"] if installed_version("torchao") else [])):
        with torch.no_grad():
            in_precision(net(), name)(rows())
    assert (config.get_config_copy(), torch.get_float32_matmul_precision()) == before
