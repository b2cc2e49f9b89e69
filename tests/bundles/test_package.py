"""Ahead-of-time packages: which inputs are served, whose weights are read, and which file is whose."""

import dataclasses
import gc
import hashlib
import threading

import msgspec
import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.bundles.packages.compiling import export_module
from backend_kwargs.bundles.running import Built, running
from backend_kwargs.bundles.samples import Sample, cloned, described

BUILD = "Build with a sample of this kind, or with unmatched='eager'."
AHEAD = bk.CompileConfig(kind="aoti")


class Sizes(torch.nn.Module):
    """A branch on a size, sizes that depend on each other, and a remainder."""

    def forward(self, x, y):
        torch._check(x.shape[0] % 2 == 0)
        z = x[1:] + y
        return z.sin() if x.shape[0] <= 6 else z.cos()


class Weights(torch.nn.Module):
    """Weights of each kind: large and small, tied, a buffer and a plain attribute; it writes to its second input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("shift", torch.tensor(0.25), persistent=False)
        self.offset = torch.ones(8)

    def forward(self, x, out):
        out.add_(1)
        return torch.tanh(self.second(self.first(x)) * self.scale + self.shift) + self.offset


class Either(torch.nn.Module):
    """What it computes depends on whether its inputs are one object."""

    def forward(self, x, y):
        return x * 2 if x is y else x + y * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The cache_dir of all packages here."""
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="module")
def sized(folder):
    data = [(torch.randn(4, 8), torch.randn(3, 8)), (torch.randn(6, 8), torch.randn(5, 8))]
    return bk.CompiledModule(AHEAD).build(Sizes(), data, cache_dir=folder)


@pytest.fixture(scope="module")
def weighted(folder):
    return bk.CompiledModule(AHEAD).build(Weights().eval(), [(torch.randn(4, 8), torch.zeros(8))], cache_dir=folder)


@pytest.fixture(scope="module")
def either(folder):
    return bk.CompiledModule(AHEAD).build(Either(), [(torch.ones(4), torch.ones(4))], cache_dir=folder)


@pytest.fixture
def module(weighted):
    """The module of a package, as it was when the package was compiled."""
    module = weighted._built.module
    kept = Weights().eval()
    yield module
    for name, value in vars(kept).items():
        setattr(module, name, value)


@pytest.fixture(params=["built", "made ready"])
def call(weighted, module, request):
    """The package for the module: as it was built, and as it is made ready later."""
    return weighted if request.param == "built" else running(weighted._built, module, keep=False).call


def right(call, module, *args):
    """Return whether a package and its module give the same."""
    with torch.no_grad():
        copies = [each.clone() for each in args]
        return torch.allclose(call(*args), module(*copies), atol=1e-5)


# ---- sizes


@pytest.mark.parametrize("rows", [pytest.param(rows, id=f"{rows} rows") for rows in (4, 6)])
def test_sizes_that_meet_all_conditions_are_served(rows, sized):
    x, y = torch.randn(rows, 8), torch.randn(rows - 1, 8)
    torch.testing.assert_close(sized(x, y), Sizes()(x, y))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        pytest.param(
            torch.ones(8, 8),
            torch.ones(7, 8),
            r"Sizes of inputs must meet .*args\[[01]\]\.shape\[0\].* <= 6, got .* = [78]\.",
            id="branch",
        ),
        pytest.param(torch.ones(5, 8), torch.ones(4, 8), r"Sizes of inputs must meet .* % 2.*\.", id="remainder"),
        pytest.param(
            torch.ones(6, 8),
            torch.ones(1, 8),
            r"(Input args\[0\] must have shape|Sizes of inputs must meet) .*\.",
            id="broadcast",
        ),
        pytest.param(
            torch.ones(64, 8), torch.ones(3, 8), r"(Input args\[0\] must have shape|Sizes) .*\.", id="past the end"
        ),
        pytest.param(
            torch.ones(8, 4).t(),
            torch.ones(3, 8),
            r"Input args\[0\] must have strides \(8, 1\), got \(1, 4\)\.",
            id="transposed",
        ),
        pytest.param(
            torch.ones(4, 16)[:, :8],
            torch.ones(3, 8),
            r"Input args\[0\] must have strides \(8, 1\), got \(16, 1\)\.",
            id="sliced",
        ),
    ],
)
def test_other_sizes_and_strides_are_refused_by_name(x, y, message, sized):
    """What torch.export assumed of sizes and strides is compared at each call."""
    with pytest.raises(bk.BackendKwargsError, match=f"^{message} {BUILD}$"):
        sized(x, y)


def exported(module, *args):
    """Export a module without compiling it."""
    sample = Sample(args, {})
    built = Built(AHEAD, module, torch.device("cpu"), [described(tuple(sample))], ())
    with torch.no_grad():
        return export_module(built, module, sample)


class Subclass(torch.Tensor):
    """A tensor of another class."""


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.ones(4, 8).as_subclass(Subclass), id="subclass"),
        pytest.param(torch._neg_view(torch.ones(4, 8)), id="negative bit"),
        pytest.param(torch.ones(4, 8).to_sparse(), id="sparse"),
        pytest.param(torch.ones(4, 8, device="meta"), id="meta"),
    ],
)
def test_tensors_with_a_meaning_of_their_own_are_refused(x, sized):
    """A package reads memory, and sees neither a class nor a bit that changes what the memory means."""
    sized(torch.ones(4, 8), torch.ones(3, 8))
    with pytest.raises(bk.BackendKwargsError, match=r"^Input args\[0\] must be float32\[any, 8\]"):
        sized(x, torch.ones(3, 8))


def test_inputs_that_do_not_match_may_run_in_eager(sized):
    """With unmatched='eager' the module itself runs where the package cannot."""
    built = dataclasses.replace(sized._built, config=bk.CompileConfig(kind="aoti", unmatched="eager"))
    call = running(built, built.module, keep=False).call
    for x, y in (
        (torch.randn(8, 8), torch.randn(7, 8)),
        (torch.randn(8, 4).t(), torch.randn(1, 8)),
        (torch.randn(4, 8).double(), torch.randn(3, 8).double()),
    ):
        torch.testing.assert_close(call(x, y), Sizes()(x, y))
    assert not call(torch.randn(8, 8, requires_grad=True), torch.randn(7, 8)).requires_grad


def test_a_call_without_arguments_is_refused_like_others(sized):
    with pytest.raises(bk.BackendKwargsError, match=r"^The arguments must have the structure of a sample, \(_, _\)"):
        sized()


# ---- one object twice


def with_one_input_twice(either):
    """Return a package as if both inputs of its sample were one tensor."""
    package = either._built.package
    first, second = package.guards.tensors
    tensors = (first, msgspec.structs.replace(second, same_as=0))
    guards = msgspec.structs.replace(package.guards, tensors=tensors)
    return dataclasses.replace(either._built, package=dataclasses.replace(package, guards=guards))


def test_inputs_are_one_object_only_if_those_of_the_sample_were(either):
    x, y = torch.randn(4), torch.randn(4)
    assert right(either, Either(), x, y)
    with pytest.raises(bk.BackendKwargsError) as raised:
        either(x, x)
    assert str(raised.value) == f"Input args[1] must not be the same tensor as args[0]. {BUILD}"
    built = with_one_input_twice(either)
    call = running(built, built.module, keep=False).call
    call(x, x)
    with pytest.raises(bk.BackendKwargsError) as raised:
        call(x, y)
    assert str(raised.value) == f"Input args[1] must be the same tensor as args[0]. {BUILD}"


def test_one_object_twice_may_run_in_eager(either):
    built = dataclasses.replace(either._built, config=bk.CompileConfig(kind="aoti", unmatched="eager"))
    x = torch.randn(4)
    torch.testing.assert_close(running(built, built.module, keep=False).call(x, x), x * 2)


def test_one_object_twice_in_a_sample_is_exported_as_one():
    x = torch.ones(4)
    copied = cloned(Sample((x, x), {}))
    assert copied.args[0] is copied.args[1] is not x
    assert exported(Either(), x, x).same_as == [None, 0]


def test_a_deployed_module_may_run_other_inputs_in_eager(tmp_path):
    """unmatched='eager' holds for code of any kind that compares its inputs with the samples."""
    config = bk.CompileConfig(backend="eager", unmatched="eager")
    bk.CompiledModule(config).build(torch.nn.Linear(8, 8), [torch.randn(4, 8)]).save(tmp_path / "bundle")
    served = bk.CompiledModule.load(tmp_path / "bundle", module := torch.nn.Linear(8, 8))
    served.deploy()
    x = torch.randn(3, 8)
    torch.testing.assert_close(served(x), module(x).detach())


# ---- memory


def test_memory_that_is_written_to_is_not_that_of_another_input(call):
    """A package computes from the memory that it writes to as if nothing else were there."""
    x = torch.randn(4, 8)
    for out, shared in ((x[0], "args[0]"), (x.view(-1)[3:11], "args[0]")):
        with pytest.raises(bk.BackendKwargsError) as raised:
            call(x, out)
        assert str(raised.value) == (
            f"Input args[1], which is written to, must not share memory with {shared}. {BUILD}"
        )


def test_memory_that_is_written_to_is_not_that_of_a_weight(call, module):
    with pytest.raises(bk.BackendKwargsError, match="must not share memory with a weight"):
        call(torch.randn(4, 8), module.scale)


def test_an_input_is_written_to(call):
    out = torch.zeros(8)
    call(torch.randn(4, 8), out)
    call(torch.randn(4, 8), out)
    torch.testing.assert_close(out, torch.full((8,), 2.0))


# ---- weights


def assigned(module):
    module.first.bias = torch.nn.Parameter(torch.randn(8))


def replaced(module):
    module.first = torch.nn.Linear(8, 8)
    module.second.weight = module.first.weight


def stepped(module):
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=0.5).step()


def through_data(module):
    module.first.weight.data = torch.randn(8, 8)


def state_loaded(module):
    module.load_state_dict({name: torch.randn_like(each) for name, each in module.state_dict().items()})


CHANGES = {
    "in place": lambda module: module.first.weight.data.mul_(3),
    "a small one": lambda module: module.first.bias.data.add_(3),
    "a scalar": lambda module: module.shift.add_(3),
    "buffer": lambda module: module.scale.mul_(3),
    "attribute": lambda module: module.offset.mul_(3),
    "attribute assigned": lambda module: setattr(module, "offset", torch.randn(8)),
    "buffer assigned": lambda module: setattr(module, "scale", torch.randn(8)),
    "data": through_data,
    "parameter assigned": assigned,
    "submodule": replaced,
    "optimizer": stepped,
    "load_state_dict": state_loaded,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_weights_are_used(change, call, module):
    """A package reads the module's own weights, whatever changed them."""
    x, out = torch.randn(4, 8), torch.zeros(8)
    before = call(x, out)
    with torch.no_grad():
        change(module)
    assert not torch.allclose(before, call(x, out))
    assert right(call, module, x, out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda module: setattr(module.second, "weight", torch.nn.Parameter(torch.randn(8, 8))),
            "Weights 'first.weight' and 'second.weight' must be the same tensor.",
            id="untied",
        ),
        pytest.param(
            lambda module: setattr(module, "scale", torch.ones(1)),
            "Weight 'scale' must be torch.float32[8] with strides (1,) on cpu, got torch.float32[1] with strides (1,) "
            "on cpu.",
            id="shape",
        ),
        pytest.param(
            lambda module: module.first.double(),
            "Weight 'first.bias' must be torch.float32[8] with strides (1,) on cpu, got torch.float64[8] with strides "
            "(1,) on cpu.",
            id="dtype",
        ),
        pytest.param(
            lambda module: module.first.weight.t_(),
            "Weight 'first.weight' must be torch.float32[8, 8] with strides (8, 1) on cpu, got torch.float32[8, 8] "
            "with strides (1, 8) on cpu.",
            id="strides",
        ),
        pytest.param(
            lambda module: setattr(module.scale, "data", module.scale.view(torch.int32)),
            "Weight 'scale' must be torch.float32[8] with strides (1,) on cpu, got torch.int32[8] with strides (1,) "
            "on cpu.",
            id="dtype in the same memory",
        ),
        pytest.param(
            lambda module: setattr(module.first.weight, "data", module.first.weight.as_strided((1, 64), (8, 1))),
            "Weight 'first.weight' must be torch.float32[8, 8] with strides (8, 1) on cpu, got torch.float32[1, 64] "
            "with strides (8, 1) on cpu.",
            id="shape in the same memory",
        ),
        pytest.param(
            lambda module: setattr(module.scale, "data", torch._neg_view(module.scale)),
            "Weight 'scale' must be torch.float32[8] with strides (1,) on cpu, got a Tensor of another kind.",
            id="negative bit in the same memory",
        ),
        pytest.param(
            lambda module: delattr(module, "offset"), "The module lacks 'offset', which was compiled.", id="gone"
        ),
    ],
)
def test_weights_of_another_kind_are_an_error(change, message, call, module):
    x, out = torch.randn(4, 8), torch.zeros(8)
    call(x, out)
    with torch.no_grad():
        change(module)
    with pytest.raises(bk.BackendKwargsError) as raised:
        call(x, out)
    assert str(raised.value) == message


def test_a_package_keeps_no_weights_alive(weighted):
    """torch never frees a tensor that a package was given; its memory is freed with the package."""
    module = Weights().eval()
    call = running(weighted._built, module, keep=False).call
    call(torch.randn(4, 8), torch.zeros(8))
    aliases = call._weights._aliases[:]
    assert all(alias.untyped_storage().nbytes() for alias in aliases)
    del call
    gc.collect()
    assert not any(alias.untyped_storage().nbytes() for alias in aliases)


# ---- tensors that are not weights


GLOBAL = torch.ones(8)


class Holder:
    """An object that is no module."""

    def __init__(self):
        self.tensor = torch.ones(8)


class Hiding(torch.nn.Module):
    """A module with tensors where torch.export does not look for weights."""

    of_class = torch.ones(8)

    def __init__(self, computed):
        super().__init__()
        held = torch.ones(8)
        self.linear, self.buffers_, self.plain = torch.nn.Linear(8, 8), {"a": torch.ones(8)}, torch.ones(8)
        self.modules_, self.object, self.closure = [torch.nn.Linear(8, 8)], Holder(), lambda: held
        self.twice, self.computed, self.numbers = [self.linear.bias], computed, [1.0] * 8

    def forward(self, x):
        return self.computed(self, x)


@pytest.mark.parametrize(
    ("computed", "what"),
    [
        pytest.param(lambda self, x: self.modules_[0](x), "'modules_[0].weight'", id="module in a list"),
        pytest.param(lambda self, x: x + self.object.tensor, "'object.tensor'", id="object"),
        pytest.param(lambda self, x: x + self.buffers_["a"], "'buffers_.a'", id="dict"),
        pytest.param(lambda self, x: x + self.closure(), "'closure[0]'", id="closure"),
        pytest.param(lambda self, x: x + self.twice[0], "'linear.bias'", id="parameter in a list"),
        pytest.param(lambda self, x: x + self.of_class, "a torch.float32[8] from elsewhere", id="class attribute"),
        pytest.param(lambda self, x: x + GLOBAL, "'computed.GLOBAL'", id="global"),
        pytest.param(lambda self, x: x * self.object.tensor[0].item(), "'object.tensor'", id="number"),
        pytest.param(
            lambda self, x: torch.cond(x.sum() > 0, lambda a: a * self.object.tensor, lambda a: a * 2, (x,)),
            "'object.tensor'",
            id="branch",
        ),
    ],
)
def test_a_tensor_that_would_become_a_constant_is_refused(computed, what):
    """A write to it would not be seen."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        exported(Hiding(computed), torch.ones(4, 8))
    assert str(raised.value) == (
        "kind='aoti' must have a module whose tensors are parameters, buffers or attributes, got one that reads "
        f"{what}: register it as a buffer."
    )


@pytest.mark.parametrize(
    "computed",
    [
        pytest.param(lambda self, x: x + self.plain, id="attribute"),
        pytest.param(lambda self, x: x + torch.tensor(self.numbers), id="made in the call"),
        pytest.param(lambda self, x: x * self.object.tensor.shape[0], id="shape"),
        pytest.param(
            lambda self, x: torch.cond(x.sum() > 0, lambda a: self.linear(a) + 1, lambda a: a * 2, (x,)),
            id="branch",
        ),
    ],
)
def test_weights_and_tensors_made_in_the_call_are_no_constants_from_elsewhere(computed):
    assert exported(Hiding(computed), torch.ones(4, 8)).program


# ---- the module


class Activated(torch.nn.Module):
    """A linear layer and an activation."""

    def __init__(self, activation):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.activation = torch.nn.Linear(8, 8), activation

    def forward(self, x):
        return self.activation(self.linear(x))


def test_a_bundle_is_compiled_again_for_another_module(tmp_path):
    """A bundle's package serves only the module that it was compiled from, whose code is compared."""
    x = torch.randn(4, 8)
    data = [x.repeat(1, 2)[:, :8]]  # with gaps in its memory
    compiled = bk.CompiledModule(AHEAD).build(Activated(torch.nn.GELU()).eval(), data)
    assert right(compiled, Activated(torch.nn.GELU()), data[0])
    compiled.save(tmp_path / "bundle")
    other = Activated(torch.nn.ReLU()).eval()
    loaded = bk.CompiledModule.load(tmp_path / "bundle", other, trust=True)
    with pytest.warns(bk.BackendKwargsWarning, match="^The package was compiled again in "):
        loaded.deploy()
    assert right(loaded, other, data[0])
    assert "the module is not known to be the one that was compiled" in loaded.describe()


def test_a_module_that_cannot_be_compared_is_exported_again(sized, tmp_path):
    """Whether a module is the one that was compiled is seen in what torch.export makes of it."""
    sized.save(tmp_path / "bundle")
    module = Sizes()
    module.lock = threading.Lock()
    loaded = bk.CompiledModule.load(tmp_path / "bundle", module, trust=True)
    loaded.deploy()
    assert "to compare it with the package" in loaded.describe()
    assert loaded._built.package.sha256 == sized._built.package.sha256
    assert right(loaded, module, torch.randn(4, 8), torch.randn(3, 8))


# ---- files


def test_packages_in_one_folder_are_named_by_their_hashes(sized, weighted, folder):
    """Two builds with one cache_dir never touch each other's package."""
    packages = [each._built.package for each in (sized, weighted)]
    assert {package.path for package in packages} <= {*folder.iterdir()}
    for package in packages:
        assert package.path.name == f"{hashlib.sha256(package.path.read_bytes()).hexdigest()}.pt2"
    sized.deactivate()
    sized.activate()
    assert right(sized, Sizes(), torch.randn(4, 8), torch.randn(3, 8))


def test_a_build_leaves_only_packages(sized, weighted, folder):
    assert {each.suffix for each in folder.iterdir()} == {".pt2"}


def test_a_package_that_was_changed_is_neither_saved_nor_loaded(weighted, tmp_path):
    """The file's hash is that noted when it was compiled."""
    package = weighted._built.package
    other = dataclasses.replace(package, path=tmp_path / "other.pt2")
    other.path.write_bytes(package.path.read_bytes() + b"\0")
    built = dataclasses.replace(weighted._built, package=other)
    message = f"The package {str(other.path)!r} was changed since it was compiled: build again."
    with pytest.raises(bk.BackendKwargsError) as raised:
        running(built, built.module, keep=False)
    assert str(raised.value) == message
    changed = bk.CompiledModule(AHEAD)
    changed._built, changed._state = built, weighted.state
    with pytest.raises(bk.BackendKwargsError) as raised:
        changed.save(tmp_path / "bundle")
    assert str(raised.value) == message
