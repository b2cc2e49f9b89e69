"""Keys, fingerprints and identities besides those of `auto`: each field is varied alone."""

import platform
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.attention import SDPBackend, sdpa_kernel

import backend_kwargs as bk
from backend_kwargs import CompileConfig, keys, make_backend
from backend_kwargs.backends.inductor import cutlass
from backend_kwargs.bundles import config as compile_config
from backend_kwargs.bundles.disk import place as environment
from backend_kwargs.bundles.disk.contents import place_of
from backend_kwargs.bundles.graphs import key_of
from backend_kwargs.options import machine as described
from backend_kwargs.precision.quantised import weight_of
from backend_kwargs.rewrites import Rewrite
from backend_kwargs.rewrites import table as rewrites
from backend_kwargs.rewrites.packed import Pack
from backend_kwargs.rewrites.traced import RewritePass

# ---- the hash of all keys

KINDS = {
    "decision": "3733fed7ae9e4bcabdf96add92b3fc96eb7ee03c6456a34e36a75c5a9847fe2a",
    "computation": "2ec7ae622fc03cdd",
    "kept": "6798d2fd07846a654207991ed71b5d985db9cc7360064f17c7862ca4959b3977",
    "verdict": "b186745f",
    "kernel": "7c44190f90578ae9",
}


@pytest.mark.parametrize(("kind", "expected"), KINDS.items(), ids=KINDS)
def test_keys_stay_what_they_are(kind, expected):
    """What was stored under a key is found by a later release: its fields, their order and its length are fixed."""
    names = [name for name, (kinds, _) in keys.FIELDS.items() if kind in kinds.split()]
    assert keys.key(kind, **{name: [name, 1, None] for name in names}) == expected


@pytest.mark.parametrize("names", ["inputs output", "inputs output kernels device"], ids=["less", "more"])
def test_a_key_has_the_fields_of_the_table(names):
    """A field that is left out, or that the table does not have, is an error."""
    with pytest.raises(AssertionError) as raised:
        keys.key("kernel", **dict.fromkeys(names.split()))
    assert str(raised.value) == "A key of kind 'kernel' has ['inputs', 'output', 'kernels']."


# ---- backends


def target(gm, example_inputs, *, level=0):
    return gm.forward


def other(gm, example_inputs, *, level=0):
    return gm.forward


BACKENDS = {
    "name": (("tmpl-inductor",), ("inductor",)),
    "name of another compiler": (("tvm",), ("tmpl-tvm",)),
    "templates": (("tmpl-inductor:aten",), ("tmpl-inductor:freezing",)),
    "order of templates": (("tmpl-inductor:aten+freezing",), ("tmpl-inductor:freezing+aten",)),
    "an option": (("tmpl-inductor",), ("tmpl-inductor", {"debug": True})),
    "name of an option": (("tmpl-inductor", {"debug": True}), ("tmpl-inductor", {"max_autotune": True})),
    "value of an option": (("tmpl-inductor", {"debug": True}), ("tmpl-inductor", {"debug": False})),
    "function": ((target,), (other,)),
    "option of a function": ((target, {"level": 1}), (target, {"level": 2})),
}


@pytest.mark.parametrize(("one", "another"), BACKENDS.values(), ids=BACKENDS)
@pytest.mark.filterwarnings("ignore:template")  # the two contradict each other
def test_backends(one, another):
    """Backends that differ in one part are unequal, and have other keys."""
    one, another = make_backend(*one), make_backend(*another)
    assert one != another
    assert one.key() != another.key()


# ---- configs of compiled modules

CONFIGS = {
    "backend": "tmpl-inductor:aten",
    "options": {"debug": True},
    "mode": "max-autotune",
    "fullgraph": True,
    "dynamic": False,
    "autocast_enabled": True,
    "autocast_dtype": torch.float16,
    "output_dtype": torch.float64,
    "check_numbers": "warn",
    "tolerance": 0.5,
    "unmatched": "eager",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_compile_configs(name):
    """Configs that differ in one field are unequal, and have other keys; equal ones have one hash."""
    one, again = (CompileConfig(**{name: CONFIGS[name]}) for _ in range(2))
    assert (one, one.key(), hash(one)) == (again, again.key(), hash(again))
    assert one != CompileConfig()
    assert one.key() != CompileConfig().key()


def test_every_field_of_a_config_is_varied():
    """A new field has a row above."""
    assert {*CONFIGS} == {*compile_config.FIELDS}


# ---- environments of bundles

CPUINFO = "processor : 0\nflags : avx2 fma\n\nprocessor : 1\nflags : other\n"


def text_of_cpuinfo(text):
    def change(patch):
        read = Path.read_text
        patch.setattr(Path, "read_text", lambda path, **kw: text if str(path) == "/proc/cpuinfo" else read(path, **kw))

    return change


def patched(place, name, value):
    return lambda patch: patch.setattr(place, name, value)


ENVIRONMENTS = {
    "torch": ("torch", patched(torch, "__version__", "0")),
    "build of torch": ("git", patched(torch.version, "git_version", "0")),
    "python": ("python", patched(platform, "python_version", lambda: "3.0.1")),
    "system": ("system", patched(sys, "platform", "other")),
    "kind of processor": ("system", patched(platform, "machine", lambda: "other")),
    "instructions for torch": ("cpu", patched(torch.backends.cpu, "get_cpu_capability", lambda: "other")),
    "instructions": ("cpu", text_of_cpuinfo(CPUINFO.replace("fma", "fma avx512f"))),
    "GPU": ("gpu", patched(torch.cuda, "get_device_name", lambda device: "other")),
    "compute capability": ("capability", patched(torch.cuda, "get_device_capability", lambda device: (9, 1))),
    "CUDA": ("cuda", patched(torch.version, "cuda", "0.0")),
    "driver": ("driver", patched(described, "_driver", lambda: "0.0")),
    "triton": ("triton", patched(described, "installed_version", lambda *names: "0")),
}


@pytest.fixture
def found_anew(monkeypatch):
    """Find out about the machine at each call, with the CPU and the GPU of the tests."""
    monkeypatch.setattr(environment, "machine", described.machine.__wrapped__)
    text_of_cpuinfo(CPUINFO)(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("found_anew")
@pytest.mark.parametrize(("name", "change"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_environments(monkeypatch, name, change):
    """Each release and property of the machine is in a bundle's environment under its own name."""
    before = environment.fingerprint(torch.device("cuda"))
    change(monkeypatch)
    after = environment.fingerprint(torch.device("cuda"))
    assert {each for each in before if before[each] != after[each]} == {name}
    (said,) = environment.differences(before, after)
    assert said == f"{environment.WORDS.get(name, name)}: {before[name]} in the bundle, {after[name]} here"


def test_every_part_of_an_environment_is_varied():
    """A new part has a row above; code for a CPU does not depend on the GPU."""
    wanted = ["torch", "git", "python", "system", "cpu"]
    assert [*environment.fingerprint(torch.device("cpu"))] == wanted
    assert {name for name, _ in ENVIRONMENTS.values()} == {*wanted, "gpu", "capability", "cuda", "driver", "triton"}


@pytest.mark.parametrize(
    ("text", "same"),
    [
        pytest.param(CPUINFO.replace("avx2 fma", "fma avx2"), True, id="order"),
        pytest.param(CPUINFO.replace("avx2 fma", " avx2  fma "), True, id="blanks"),
        pytest.param(CPUINFO.replace("other", "avx2"), True, id="another core"),
        pytest.param(CPUINFO.replace("flags", "Features"), True, id="name on ARM"),
        pytest.param(CPUINFO.replace("avx2 fma", "avx2fma"), False, id="joined"),
        pytest.param(CPUINFO.replace("flags", "none"), False, id="none"),
    ],
)
def test_instruction_sets(monkeypatch, text, same):
    """Those of the first core, whatever their order."""
    found = []
    for each in (CPUINFO, text):
        text_of_cpuinfo(each)(monkeypatch)
        found.append(described.machine.__wrapped__().features)
    assert (found[0] == found[1]) is same


# ---- rewrites


def patterns(passes, scale=1.0, *, shift=0.0):
    return None


def also(passes, scale=1.0, *, shift=0.0):
    return passes


def held(value):
    def inner(passes):
        return value

    return inner


def with_defaults(scale=1, shift=0):
    def inner(passes, scale=scale, *, shift=shift):
        return None

    return inner


REWRITES = {
    "version": (Rewrite("mine", patterns=patterns), Rewrite("mine", patterns=patterns, version=2)),
    "function": (Rewrite("mine", patterns=patterns), Rewrite("mine", patterns=also)),
    "closure": (Rewrite("mine", patterns=held(1)), Rewrite("mine", patterns=held(2))),
    "default": (Rewrite("mine", patterns=with_defaults()), Rewrite("mine", patterns=with_defaults(scale=2))),
    "default of a keyword": (
        Rewrite("mine", patterns=with_defaults()),
        Rewrite("mine", patterns=with_defaults(shift=1)),
    ),
    "module": (Rewrite("mine", patterns="json:load"), Rewrite("mine", patterns="json.decoder:load")),
    "module of a traced one": (Rewrite("mine", traced="json:load"), Rewrite("mine", traced="json.decoder:load")),
}


def fingerprint_of(monkeypatch, names, **registered):
    with monkeypatch.context() as patch:
        for name, rewrite in registered.items():
            patch.setitem(rewrites._registered, name, rewrite)
        return rewrites.fingerprint(names)


@pytest.mark.parametrize(("one", "another"), REWRITES.values(), ids=REWRITES)
def test_rewrites(monkeypatch, one, another):
    """Each part of a rewrite on which the code depends is in its fingerprint."""
    found = [fingerprint_of(monkeypatch, ["mine"], mine=each) for each in (one, one, another)]
    assert found[0] == found[1] != found[2]


def test_names_of_rewrites(monkeypatch):
    """Names, their number and their order are in a fingerprint: the first match wins."""
    mine = Rewrite("mine", patterns=patterns)
    given = ([], ["a"], ["b"], ["a", "b"], ["b", "a"], ["a", "a"])
    assert len({fingerprint_of(monkeypatch, names, a=mine, b=mine) for names in given}) == len(given)


def test_sources_of_our_rewrites(monkeypatch):
    """Our rewrites use each other's helpers, so the text of each module of theirs counts; another's only its own."""
    folder = Path(bk.__file__).parent / "rewrites"
    read, changed = Path.read_text, []
    monkeypatch.setattr(rewrites, "_module_text", rewrites._module_text.__wrapped__)
    monkeypatch.setattr(Path, "read_text", lambda path, **kw: read(path, **kw) + ("\n# new" if path in changed else ""))
    before = rewrites.fingerprint(["packed"]), fingerprint_of(monkeypatch, ["a"], a=Rewrite("", patterns="json:load"))
    for path in (folder / "matching.py", folder / "kernels" / "launch.py"):
        changed[:] = [path]
        assert rewrites.fingerprint(["packed"]) != before[0]
        assert fingerprint_of(monkeypatch, ["a"], a=Rewrite("", patterns="json:load")) == before[1]


class Users(CustomGraphPass):
    def __init__(self, identity):
        self.identity = identity

    def __call__(self, graph): ...

    def uuid(self):
        return self.identity


def test_identity_of_the_pass():
    """Names, sources, the user's passes and attention's kernels are in the pass's part of Inductor's cache key."""
    plain = RewritePass(["packed"], [Users("a")])
    found = [
        plain.uuid(),
        RewritePass(["contraction"], [Users("a")]).uuid(),
        RewritePass(["packed"], [Users("b")]).uuid(),
        RewritePass(["packed"], [Users("a"), Users("b")]).uuid(),
        RewritePass(["packed"], [Users("b"), Users("a")]).uuid(),
    ]
    with sdpa_kernel(SDPBackend.MATH):
        found.append(plain.uuid())
    assert len({*found}) == len(found)
    assert plain.uuid() == found[0]
    assert RewritePass(["packed"], [Users("a"), Users(None)]).uuid() is None


# ---- CUTLASS


def test_layouts_of_cutlass(monkeypatch, tmp_path):
    """The release and each place are in the name of a layout of CUTLASS, so that no other install's is used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here, there = (tmp_path / name / "source" for name in "ab")
    for folder in (source / name for source in (here, there) for name in cutlass.SOURCES):
        folder.mkdir(parents=True)
    found = []
    for release, moved in (("1", ""), *(("1", name) for name in cutlass.CUTLASS_PACKAGES), ("2", "")):
        monkeypatch.setattr(cutlass, "installed_version", lambda name, release=release: release)
        monkeypatch.setattr(cutlass, "_location", lambda name, moved=moved: (there if name == moved else here).parent)
        found.append(cutlass.cutlass_dir())
    assert len({*found}) == 2 + len(cutlass.CUTLASS_PACKAGES)


# ---- copies of parameters: by what their changes are noticed


def another_of_its_memory(parameter):
    """Write what no version counts, and return another parameter with that memory."""
    parameter.data.add_(1)
    return torch.nn.Parameter(parameter.data)


def given_other_memory(parameter):
    parameter.data = parameter.data + 1
    return parameter


@torch.no_grad()
def written(parameter):
    """Write one number, which is none of those that a converted weight samples."""
    parameter[0, 3] = 1
    return parameter


CHANGES = {"identity": another_of_its_memory, "address": given_other_memory, "version": written}


@pytest.mark.parametrize("at", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_packed_weights(change, at):
    """Identity, address and version of each weight show that it has changed; the rest is unchanged."""
    weights = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(2)]
    pack = Pack((0, 1), weights)
    weights[at] = change(weights[at])
    pack.refresh(weights)
    torch.testing.assert_close(pack.buffer, torch.cat([each.detach() for each in weights]))


@pytest.mark.parametrize("change", [CHANGES["address"], CHANGES["version"]], ids=["address", "version"])
def test_converted_weights(change):
    """Address and version show that a parameter has changed, also where the words that are kept have not."""
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    weight = weight_of(parameter, "bf16", torch.Tensor.bfloat16)
    change(parameter)
    weight.follow(parameter)
    torch.testing.assert_close(weight.tensor, parameter.detach().bfloat16())


def test_which_weights_are_shared():
    """Graphs share a converted weight of one parameter, memory and precision."""
    parameter, other = (torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(2))
    made = weight_of(parameter, "bf16", torch.Tensor.bfloat16)
    assert weight_of(parameter, "bf16", torch.Tensor.bfloat16) is made
    others = [weight_of(parameter, "fp16", torch.Tensor.half), weight_of(other, "bf16", torch.Tensor.bfloat16)]
    parameter.data = torch.ones(8, 8)
    others.append(weight_of(parameter, "bf16", torch.Tensor.bfloat16))
    assert len({id(each) for each in (made, *others)}) == 4


# ---- graphs and programs of bundles, and places of weights


class Held(torch.nn.Module):
    """A graph with a constant: an operator, and a number."""

    def __init__(self, constant=(1.0, 2.0), function=torch.sin, number=2):
        super().__init__()
        self.held, self.function, self.number = torch.tensor(constant), function, number

    def forward(self, x):
        return self.function(x) * self.number + self.held


ONES = torch.ones(4, 2)
GRAPHS = {
    "operator": {"function": torch.cos},
    "number": {"number": 3},
    "type of a number": {"number": 2.0},
    "a value of a constant": {"constant": (1.0, 3.0)},
    "sign of zero of a constant": {"constant": (-0.0, 2.0)},
    "dtype of a constant": {"constant": (1, 2)},
    "size of a constant": {"constant": (1.0,)},
    "dtype": {"x": ONES.double()},
    "rows": {"x": ONES[:3]},
    "strides": {"x": torch.ones(2, 4).T},
    "gradient": {"x": ONES.clone().requires_grad_()},
    "no tensor": {"x": 3},
    "grad mode": {"under": torch.no_grad},
    "autocast": {"under": lambda: torch.autocast("cpu", torch.bfloat16)},
    "attention": {"under": lambda: sdpa_kernel(SDPBackend.MATH)},
}


def key_of_graph(x=ONES, under=nullcontext, **given):
    with under():
        return key_of(torch.fx.symbolic_trace(Held(**{"constant": (0.0, 2.0), **given})), [x])


@pytest.mark.parametrize("change", GRAPHS.values(), ids=GRAPHS)
def test_graphs_of_bundles(change):
    """The computation, its constants, its inputs and torch's state are in the key of a kept graph."""
    assert key_of_graph() == key_of_graph() != key_of_graph(**change)


SQUARE, COMPLEX = torch.zeros(4, 4), torch.zeros(4, dtype=torch.complex64)
PLACES = {
    "memory": (SQUARE, SQUARE.clone()),
    "begin": (SQUARE[:1], SQUARE[1:2]),
    "dtype": (SQUARE, SQUARE.view(torch.int32)),
    "shape": (SQUARE, SQUARE[:2]),
    "strides": (SQUARE, SQUARE.T),
    "conjugate": (COMPLEX, COMPLEX.conj()),
    "minus": (COMPLEX.imag, COMPLEX.conj().imag),
    "device": (torch.empty(0), torch.empty(0, device="meta")),
}


@pytest.mark.parametrize(("one", "another"), PLACES.values(), ids=PLACES)
def test_places_of_weights(one, another):
    """Weights at one place are saved once, so all by which two tensors differ is in their place."""
    assert place_of(one) == place_of(one.detach()) != place_of(another)
