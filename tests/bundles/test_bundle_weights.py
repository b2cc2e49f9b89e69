"""Weights are loaded as a whole, or an error is raised and the module is as before."""

import copy
import warnings

import pytest
import torch
from torch.utils._pytree import tree_map

import backend_kwargs as bk
from backend_kwargs import BackendKwargsError, CompiledModule
from backend_kwargs.bundles.config import floating_dtype
from backend_kwargs.bundles.disk.contents import checked_size, checked_weights
from tests.bundles.small_module import Scaled, scaled

EAGER = bk.CompileConfig(backend="eager", check_numbers="off")


def load(module, weights):
    checked_weights(module, weights)()


def values(module):
    return {name: value.detach().clone() for name, value in [*module.named_parameters(), *module.named_buffers()]}


def other_state():
    return {name: value + 1 for name, value in scaled(1).state_dict().items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def with_weight(weight):
    module = scaled()
    module.linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def expanded():
    return with_weight(torch.randn(1, 8).expand(8, 8))


def overlapping():
    """Return a module whose weight's rows are windows of one vector."""
    return with_weight(torch.randn(15).unfold(0, 8, 1))


def lazy():
    module = scaled()
    module.linear = torch.nn.LazyLinear(8)
    return module


def sparse():
    module = scaled()
    module.scale = module.scale.to_sparse()
    return module


class Wrapped(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        inner = tree_map(lambda each: each.inner if isinstance(each, Wrapped) else each, args)
        result = function(*inner, **(kwargs or {}))
        return tree_map(lambda each: Wrapped(each) if isinstance(each, torch.Tensor) else each, result)


def subclass():
    module = scaled()
    module.scale = Wrapped(module.scale)
    return module


def tied():
    """Return a module whose buffer is a row of its weight."""
    module = scaled()
    module.scale = module.linear.weight.detach()[3]
    return module


SHARE = "its elements share memory, as expand() makes them; give the module a contiguous copy."


@pytest.mark.parametrize(
    ("made", "message"),
    [
        pytest.param(expanded, f"The module's 'linear.weight' cannot be loaded: {SHARE}", id="expanded"),
        pytest.param(
            overlapping,
            "The module's 'linear.weight' shares memory with itself, and their saved weights differ: load them into a "
            "module of the same kind.",
            id="overlapping",
        ),
        pytest.param(
            lambda: with_weight(torch.empty(8, 8, device="meta")),
            "The module's 'linear.weight' cannot be loaded: it is on the device meta, without values.",
            id="meta",
        ),
        pytest.param(
            lazy,
            "The module's 'linear.weight' cannot be loaded: it has no size before the module is called.",
            id="lazy",
        ),
        pytest.param(sparse, "The module's 'scale' cannot be loaded: it is torch.sparse_coo, not dense.", id="sparse"),
        pytest.param(
            subclass, "The module's 'scale' cannot be loaded: it is a Wrapped, no plain tensor.", id="subclass"
        ),
        pytest.param(
            tied,
            "The module's 'scale' shares memory with 'linear.weight', and their saved weights differ: load them into a "
            "module of the same kind.",
            id="tied",
        ),
    ],
)
def test_a_tensor_that_cannot_have_the_saved_values_is_refused(made, message):
    """The check comes before the first copy, so also the tensors before it keep their values."""
    module = made()
    held = {name: id(value) for name, value in module.named_parameters()}
    bias = module.linear.bias.detach().clone() if made is not lazy else None
    with pytest.raises(BackendKwargsError) as raised:
        load(module, other_state())
    assert str(raised.value) == message
    assert {name: id(value) for name, value in module.named_parameters()} == held
    assert bias is None or torch.equal(module.linear.bias, bias)


def test_tensors_that_share_memory_get_weights_that_agree():
    """A tied module takes the weights of another tied one, and stays tied."""
    module, saved = tied(), other_state()
    saved["scale"] = saved["linear.weight"][3].clone()
    load(module, saved)
    assert equal(dict(module.state_dict()), saved)
    assert module.scale.data_ptr() == module.linear.weight[3].data_ptr()


def test_nan_and_the_sign_of_zero_agree_only_with_themselves():
    """Weights of tied tensors are compared by their bits."""
    module, saved = tied(), other_state()
    saved["linear.weight"][3] = torch.tensor([float("nan"), 0.0] * 4)
    saved["scale"] = saved["linear.weight"][3].clone()
    load(module, saved)
    saved["scale"] = torch.tensor([float("nan"), -0.0] * 4)
    with pytest.raises(BackendKwargsError, match="their saved weights differ"):
        load(module, saved)


def test_inference_tensors_are_loaded():
    """A module that was made under torch.inference_mode() can be loaded outside of it."""
    with torch.inference_mode():
        module = scaled()
    load(module, other_state())
    assert equal(dict(module.state_dict()), other_state())
    assert module.linear.weight.is_inference()


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_strides_of_the_module_are_kept(memory_format):
    module = torch.nn.Conv2d(4, 4, 3).to(memory_format=memory_format)
    saved = torch.nn.Conv2d(4, 4, 3).state_dict()
    load(module, saved)
    assert equal(dict(module.state_dict()), saved)
    assert module.weight.is_contiguous(memory_format=memory_format)


def test_weights_that_are_the_modules_own_may_be_exchanged():
    module = torch.nn.Linear(8, 8)
    module.other = torch.nn.Parameter(torch.randn(8))
    bias, other = module.bias.detach().clone(), module.other.detach().clone()
    state = module.state_dict()
    load(module, state | {"bias": state["other"], "other": state["bias"]})
    assert torch.equal(module.bias, other)
    assert torch.equal(module.other, bias)


# ---- modules that read their state themselves


class Fails(Scaled):
    """A module that fails after it has loaded a part of its state."""

    version = 1

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.version, self.extra = 2, "new"
        self.scale = state_dict[f"{prefix}scale"].clone()
        with torch.no_grad():
            self.linear.weight.copy_(state_dict["linear.weight"])
        raise RuntimeError("half-way")


def with_hook(hook):
    module = scaled()
    getattr(module, f"register_load_state_dict_{hook}_hook")(lambda *_: warnings.warn("it warns", stacklevel=1))
    return module


@pytest.mark.parametrize(
    ("made", "words"),
    [
        pytest.param(lambda: Fails().eval(), "RuntimeError: half-way", id="own method"),
        pytest.param(lambda: with_hook("pre"), "UserWarning: it warns", id="hook before"),
        pytest.param(lambda: with_hook("post"), "UserWarning: it warns", id="hook after"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_a_modules_own_loading_changed_is_put_back(made, words):
    """If the module's own code fails, or warns while warnings are errors, all values and attributes are as before."""
    module = made()
    before, buffer = values(module), module.scale
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    with pytest.raises(BackendKwargsError) as raised:
        load(module, other_state())
    assert str(raised.value) == f"The module cannot load the saved weights: {words}."
    assert equal(values(module), before)
    assert module.scale is buffer
    assert {name: value for name, value in vars(module).items() if not name.startswith("_")} == attributes


def test_a_hook_that_succeeds_runs():
    module = scaled()
    seen = []
    module.register_load_state_dict_post_hook(lambda *_: seen.append(1))
    load(module, other_state())
    assert seen == [1]
    assert equal(dict(module.state_dict()), other_state())


# ---- whole bundles


def test_a_warning_that_is_an_error_comes_before_the_weights(bundle_with_code, state_of):
    """An untrusted bundle warns that it is compiled again: if that raises, the module is unchanged."""
    module = scaled(seed=5)
    before = state_of(module)
    with pytest.raises(UserWarning, match="is not trusted"):
        CompiledModule.load(bundle_with_code, module)
    assert equal(module.state_dict(), before)


def test_a_weight_that_is_no_tensor_is_an_error():
    """A module's own code may read other values; nothing has changed then."""
    module = scaled(seed=5)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(BackendKwargsError) as raised:
        checked_weights(module, {**scaled().state_dict(), "scale": [1.0]})
    assert str(raised.value).startswith("Saved weight 'scale' is [1.0], the module's is tensor(")
    assert equal(module.state_dict(), before)


def test_what_is_no_dtype_of_an_output_is_an_error():
    """A manifest names the floating dtypes of outputs as torch does."""
    with pytest.raises(BackendKwargsError) as raised:
        floating_dtype("An output dtype", "float33")
    message = "An output dtype must be a floating torch.dtype, or the name of one, got 'float33' (str)."
    assert str(raised.value) == message


def test_weights_that_are_larger_than_the_module_are_not_read(bundle_of_eager, tmp_path):
    """The size is compared with the module's before the file is opened."""
    import json
    import shutil

    bundle = shutil.copytree(bundle_of_eager, tmp_path / "bundle")
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["weights"]["size"] = 35 << 40
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BackendKwargsError) as raised:
        CompiledModule.load(bundle, scaled())
    assert str(raised.value) == (
        "The saved weights take 38482906972160 bytes, the module's 320: load them into a module of the same kind."
    )


# ---- what cannot be saved


def with_buffer(value):
    module = scaled()
    module.register_buffer("extra", value)
    return module


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param(
            lambda: torch.ones(2, dtype=torch.complex128),
            "it is torch.complex128, which safetensors files cannot contain",
            id="complex",
        ),
        pytest.param(lambda: torch.ones(2, 2).to_sparse(), "it is torch.sparse_coo, not dense", id="sparse"),
        pytest.param(lambda: torch.ones(2, 2).to_sparse_csr(), "it is torch.sparse_csr, not dense", id="rows"),
        pytest.param(
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "it is quantized, not dense",
            id="quantized",
        ),
        pytest.param(lambda: torch.ones(2, device="meta"), "it is on the device meta, without values", id="meta"),
        pytest.param(lambda: Wrapped(torch.ones(2)), "it is a Wrapped, no plain tensor", id="subclass"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:.*is deprecated")
def test_a_state_that_a_file_cannot_contain_is_an_error(value, words, tmp_path):
    from backend_kwargs.bundles.disk.contents import check_state

    with pytest.raises(BackendKwargsError) as raised:
        check_state(with_buffer(value()))
    assert str(raised.value) == f"The module's 'extra' cannot be saved: {words}."


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_other_dtypes_come_back(dtype, tmp_path):
    value = torch.tensor([1.0, 0.0, 1.0]).to(dtype)
    CompiledModule(EAGER).build(with_buffer(value), [torch.randn(4, 8)]).save(tmp_path / "bundle")
    module = with_buffer(torch.zeros(3).to(dtype))
    CompiledModule.load(tmp_path / "bundle", module)
    assert torch.equal(module.extra, value)


# ---- complex tensors, which may be conjugated or negated without being copied


class Views(torch.nn.Module):
    """A module with four views of one complex tensor, each with values of its own."""

    def __init__(self, seed):
        super().__init__()
        z = torch.randn(4, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))
        for name, value in {"z": z, "conj": z.conj(), "imag": z.imag, "minus": z.conj().imag}.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return x + self.z.real


class Alone(Views):
    """The same names and shapes, each with memory of its own, without such marks."""

    def __init__(self):
        super().__init__(0)
        for name, value in [*self.named_buffers()]:
            setattr(self, name, torch.zeros_like(value.resolve_conj().resolve_neg()))


@pytest.mark.parametrize("make", [Alone, lambda: Views(1)], ids=["plain", "views"])
def test_views_with_marks_are_saved_and_loaded(make, tmp_path):
    saved = Views(0)
    CompiledModule(EAGER).build(saved, [torch.randn(4)]).save(tmp_path / "bundle")
    module = make()
    CompiledModule.load(tmp_path / "bundle", module)
    assert equal(values(module), values(saved))


class Transposed(torch.nn.Module):
    """A weight, its transpose, and its diagonal, of one memory; the first two have the same shape."""

    def __init__(self, seed):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("transposed", self.weight.detach().T)
        self.register_buffer("diagonal", self.weight.detach().diagonal())
        self.register_buffer("column", self.weight.detach()[:, 0])
        self.register_buffer("row", self.weight.detach()[0])

    def forward(self, x):
        return x @ self.weight + self.transposed


@pytest.mark.parametrize("tied", [True, False], ids=["one memory", "a memory for each"])
def test_views_that_differ_in_strides_alone_are_saved_and_loaded(tied, tmp_path):
    """A weight that is the transpose of another one comes back as that, as do a row, a column and the diagonal."""
    saved, module = Transposed(0), Transposed(1)
    if not tied:
        for name, value in [*module.named_buffers()]:
            setattr(module, name, value.clone())
    CompiledModule(EAGER).build(saved, [torch.randn(4, 4)]).save(tmp_path / "bundle")
    CompiledModule.load(tmp_path / "bundle", module)
    assert equal(values(module), values(saved))


@pytest.mark.parametrize("mark", [torch.conj, lambda z: z.conj().imag], ids=["conj", "minus"])
def test_a_parameter_with_a_mark_is_loaded(mark):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(mark(torch.randn(4, dtype=torch.complex64)))
    weights = {"weight": torch.randn_like(module.weight.detach()).resolve_conj().resolve_neg()}
    load(module, weights)
    assert torch.equal(module.weight, weights["weight"])


@pytest.mark.parametrize(
    ("shape", "stride", "numbers"),
    [
        pytest.param([2, 3], [3, 1], 6, id="contiguous"),
        pytest.param([2, 3], [10, 1], 13, id="with gaps"),
        pytest.param([4, 3], [0, 1], 12, id="expanded"),
        pytest.param([2, 3], None, 6, id="no strides"),
        pytest.param([], [], 1, id="a scalar"),
    ],
)
@pytest.mark.parametrize(("dtype", "size"), [("torch.float32", 4), ("torch.float64", 8), ("torch.bool", 1)])
def test_how_many_bytes_a_manifest_describes(shape, stride, numbers, dtype, size):
    """Those of all elements, and of the gaps between them."""
    assert checked_size(shape, stride, dtype, "cpu", "torch.strided") == numbers * size
