"""Bundles: what was saved is loaded, and code runs only if it is trusted and fits the machine."""

import copy
import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs import BackendKwargsError, BackendKwargsWarning, CompiledModule
from backend_kwargs.auto import race
from backend_kwargs.bundles.module import GUARDED
from backend_kwargs.cli.bundles import NO_CODE, inspect
from tests.bundles.small_module import scaled

ROOT = str(Path(__file__).parents[2])
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
NOT_TRUSTED = "its compiled code is not loaded, as it is not trusted, and the module is compiled again"


def manifest_of(bundle):
    return json.loads((bundle / "manifest.json").read_text())


def write_manifest(bundle, **changes):
    (bundle / "manifest.json").write_text(json.dumps({**manifest_of(bundle), **changes}))


def copied(bundle, tmp_path):
    target = tmp_path / "copy"
    subprocess.run(["cp", "-r", bundle, target], check=True)
    return target


def served(bundle, x, **trust):
    module = scaled(seed=9)
    loaded = CompiledModule.load(bundle, module, **trust)
    loaded.activate()
    return loaded, loaded(x), module


def test_weights_and_results_come_back(bundle_of_eager, x):
    """Another module of the class gets the weights and gives the same results."""
    _, result, module = served(bundle_of_eager, x)
    torch.testing.assert_close(module.state_dict(), scaled().state_dict())
    torch.testing.assert_close(result, scaled()(x).detach())


def test_trusted_code_is_loaded(bundle_with_code, x):
    loaded, result, _ = served(bundle_with_code, x, trust=True)
    torch.testing.assert_close(result, scaled()(x).detach())
    assert "graphs loaded in this process: 1, compiled: 0" in loaded.describe()


@pytest.mark.parametrize(
    ("fields", "samples"),
    [
        pytest.param({}, (4, 6), id="sizes that differ"),
        pytest.param({"dynamic": False}, (4, 6), id="two static sizes"),
        pytest.param({"autocast_enabled": True, "autocast_dtype": "bfloat16"}, (4,), id="autocast"),
        pytest.param({"options": {"cpp_wrapper": True}}, (4,), id="C++ wrapper"),
    ],
)
def test_code_of_other_configs_is_loaded(fields, samples, tmp_path):
    """Code with dynamic sizes, several graphs, autocast or C++ wrappers is loaded, in any order of calls."""
    data = [torch.randn(size, 8) for size in samples]
    CompiledModule(bk.CompileConfig(**fields)).build(scaled(), data).save(tmp_path / "bundle")
    loaded = CompiledModule.load(tmp_path / "bundle", scaled(seed=4), trust=True)
    loaded.deploy()
    for x in [*reversed(data), *([torch.randn(9, 8)] if fields == {} else [])]:
        torch.testing.assert_close(loaded(x), scaled()(x).detach(), rtol=0.05, atol=0.05)
    graphs = len(manifest_of(tmp_path / "bundle")["graphs"])
    assert f"graphs loaded in this process: {graphs}, compiled: 0" in loaded.describe()


@pytest.mark.parametrize(
    "read",
    [
        lambda bundle: CompiledModule.load(bundle, scaled(), trust="no"),
        lambda bundle: bk.CompileConfig.from_dict({"backend": "eager"}, trust="no"),
    ],
)
def test_consent_is_no_text(bundle_with_code, read):
    """As a configuration may have it: every text but "" is true."""
    with pytest.raises(BackendKwargsError, match=r"^`trust` must be True or False, got 'no' \(str\)\.$"):
        read(bundle_with_code)


def test_untrusted_code_is_compiled_anew(bundle_with_code, x):
    """Without trust only the config and the weights are used, and the code is compiled again."""
    with pytest.warns(BackendKwargsWarning, match=NOT_TRUSTED):
        loaded, result, _ = served(bundle_with_code, x)
    torch.testing.assert_close(result, scaled()(x).detach())
    assert "graphs loaded in this process: 0, compiled: 1" in loaded.describe()


def test_another_release_is_compiled_anew(bundle_with_code, x, tmp_path):
    """With another torch, `load` warns and the module is compiled again."""
    bundle = copied(bundle_with_code, tmp_path)
    write_manifest(bundle, environment={**manifest_of(bundle)["environment"], "torch": "2.0.0"})
    with pytest.warns(BackendKwargsWarning) as warned:
        loaded, _, _ = served(bundle, x, trust=True)
    assert str(warned[0].message) == (
        f"Bundle {str(bundle)!r}: the module is compiled again, as its code is for another machine: "
        f"torch: 2.0.0 in the bundle, {torch.__version__} here."
    )
    assert "graphs loaded in this process: 0, compiled: 1" in loaded.describe()


def test_shared_weights_are_saved_once_and_stay_shared(tmp_path, x):
    def tied():
        module = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
        module[1].weight = module[0].weight
        return module

    first, second = tied(), tied()
    compiled = CompiledModule(bk.CompileConfig(backend="eager")).build(first, [x])
    compiled.save(tmp_path / "bundle")
    assert manifest_of(tmp_path / "bundle")["shared_weights"] == {"1.weight": "0.weight"}
    CompiledModule.load(tmp_path / "bundle", second)
    assert second[0].weight is second[1].weight
    assert torch.equal(second[0].weight, first[0].weight)


@pytest.mark.parametrize(
    "views",
    [
        pytest.param(lambda weight: [weight.t()], id="strides"),
        pytest.param(lambda weight: [weight[:4]], id="shape"),
        pytest.param(lambda weight: [weight.view(torch.int32)], id="dtype"),
        pytest.param(lambda weight: [weight[:4], weight[4:]], id="address"),
    ],
)
def test_weights_in_the_memory_of_another_come_back(views, tmp_path, x):
    """A weight that views another's memory differently is saved with its own values."""

    class Viewed(torch.nn.Linear):
        def __init__(self, seed):
            torch.manual_seed(seed)
            super().__init__(8, 8)
            for at, view in enumerate(views(self.weight.data)):
                self.register_buffer(f"view_{at}", view)

    CompiledModule(bk.CompileConfig(backend="eager")).build(Viewed(0), [x]).save(tmp_path / "bundle")
    assert manifest_of(tmp_path / "bundle")["shared_weights"] == {}
    loaded = Viewed(1)
    CompiledModule.load(tmp_path / "bundle", loaded)
    torch.testing.assert_close(loaded.state_dict(), Viewed(0).state_dict())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        pytest.param(
            torch.nn.Linear(8, 8),
            "The saved weights lack 'bias', 'weight': load them into a module of the same kind.",
            id="another class",
        ),
        pytest.param(
            scaled(size=4),
            "Saved weight 'scale' is torch.float32 [8], the module's is torch.float32 [4].",
            id="another size",
        ),
        pytest.param(
            scaled().double(),
            "Saved weight 'scale' is torch.float32 [8], the module's is torch.float64 [8].",
            id="another dtype",
        ),
    ],
)
def test_weights_fit_exactly_or_nothing_is_loaded(module, message, bundle_of_eager, state_of):
    before = state_of(module)
    with pytest.raises(BackendKwargsError) as raised:
        CompiledModule.load(bundle_of_eager, module)
    assert str(raised.value) == message
    torch.testing.assert_close(module.state_dict(), before)


def test_a_new_bundle_takes_the_place_of_the_old(tmp_path, x):
    """Saving over a bundle removes parts that only the old one needs."""
    for seed in (0, 1):
        built = CompiledModule(bk.CompileConfig(backend="eager")).build(scaled(seed), [x])
        built.save(tmp_path / "bundle")
    _, result, _ = served(tmp_path / "bundle", x)
    torch.testing.assert_close(result, scaled(1)(x).detach())
    assert len([*(tmp_path / "bundle" / "parts").iterdir()]) == 1


def test_a_folder_of_something_else_is_left_alone(tmp_path, loaded):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(BackendKwargsError) as raised:
        loaded.save(tmp_path)
    assert str(raised.value) == (
        f"Cannot write bundle {str(tmp_path)!r}: the folder contains 'thesis.txt', which is not part of a bundle; "
        "name another."
    )


# ---- signatures


@pytest.fixture
def keys():
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    return [ed25519.Ed25519PrivateKey.generate() for _ in range(2)]


@pytest.fixture
def signed_bundle(bundle_with_code, tmp_path, keys):
    loaded = CompiledModule.load(bundle_with_code, scaled(), trust=True)
    loaded.save(tmp_path / "signed", signing_key=keys[0])
    return tmp_path / "signed"


def test_code_that_a_trusted_key_signed_is_loaded(signed_bundle, keys, x):
    loaded, _, _ = served(signed_bundle, x, trusted_keys=[keys[1].public_key(), keys[0].public_key()])
    assert "graphs loaded in this process: 1, compiled: 0" in loaded.describe()


def test_a_signature_of_an_earlier_release_is_valid(signed_bundle, keys, x):
    """Earlier releases signed the manifest without a domain; now the signature is for bundles alone."""
    from cryptography.exceptions import InvalidSignature

    manifest = (signed_bundle / "manifest.json").read_bytes()
    (signature,) = (signed_bundle / "signatures").iterdir()
    with pytest.raises(InvalidSignature):
        keys[0].public_key().verify(signature.read_bytes(), manifest)
    keys[0].public_key().verify(signature.read_bytes(), b"backend-kwargs bundle 1\n" + manifest)
    signature.write_bytes(keys[0].sign(manifest))
    loaded, _, _ = served(signed_bundle, x, trusted_keys=[keys[0].public_key()])
    assert "graphs loaded in this process: 1, compiled: 0" in loaded.describe()


def test_keys_may_be_pem_files(bundle_with_code, keys, tmp_path, x):
    from cryptography.hazmat.primitives import serialization as s

    private = keys[0].private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    public = keys[0].public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "private.pem").write_bytes(private)
    (tmp_path / "public.pem").write_bytes(public)
    again = CompiledModule.load(bundle_with_code, scaled(), trust=True)
    again.save(tmp_path / "signed", signing_key=tmp_path / "private.pem")
    loaded, _, _ = served(tmp_path / "signed", x, trusted_keys=[tmp_path / "public.pem"])
    assert "graphs loaded in this process: 1, compiled: 0" in loaded.describe()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda bundle: None, "is signed by none of the trusted keys, or was changed since.", id="key"),
        pytest.param(
            lambda bundle: write_manifest(bundle, made="later"),
            "is not signed; pass trust=True, and no keys, if you trust its author.",
            id="changed manifest",
        ),
    ],
)
@pytest.mark.parametrize("trust", [False, True])
def test_what_no_trusted_key_signed_is_refused(spoil, words, trust, signed_bundle, keys):
    """Also with trust=True, which adds nothing that the keys refuse."""
    spoil(signed_bundle)
    with pytest.raises(BackendKwargsError) as raised:
        CompiledModule.load(signed_bundle, scaled(), trust=trust, trusted_keys=[keys[1].public_key()])
    assert str(raised.value) == f"Bundle {str(signed_bundle)!r} {words}"


# ---- deployed


def test_a_deployed_module_serves(bundle_with_code, x):
    loaded = CompiledModule.load(bundle_with_code, scaled(seed=3), trust=True)
    loaded.deploy(None)
    results = [loaded(x) for _ in range(3)]  # after the first, in the caller's grad mode
    for result in results:
        torch.testing.assert_close(result, scaled()(x).detach())
        assert not result.requires_grad
    assert "graphs loaded in this process: 1, compiled: 0" in loaded.describe()


def test_guards_cannot_be_left_out(loaded):
    """The error says what to call instead."""
    with pytest.raises(BackendKwargsError) as raised:
        loaded.deploy(guards=False)
    assert str(raised.value) == f"deploy(guards=False) was removed: {GUARDED}."


def test_dicts_are_bundles():
    """The error says what to call instead."""
    with pytest.raises(BackendKwargsError, match=r"^to_dict.* was removed: save\(path\) and load"):
        CompiledModule.from_dict({})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda x: (x[:2],), "float32[2, 8] on cpu with strides (8, 1)", id="shape"),
        pytest.param(lambda x: (x.double(),), "float64[4, 8] on cpu with strides (8, 1)", id="dtype"),
        pytest.param(lambda x: (x.t().contiguous().t(),), "float32[4, 8] on cpu with strides (1, 4)", id="layout"),
        pytest.param(lambda x: (x.to("meta"),), "float32[4, 8] on meta with strides (8, 1)", id="device"),
        pytest.param(lambda x: (3,), "3", id="no tensor"),
    ],
)
def test_inputs_of_a_deployed_module_are_checked(change, message, loaded, x):
    loaded.deploy(None)
    loaded(x)
    with pytest.raises(BackendKwargsError) as raised:
        loaded(*change(x))
    assert str(raised.value) == (
        f"Input args[0] must be float32[4, 8] on cpu with strides (8, 1), got {message}. Build with a sample of this "
        "kind, or with dynamic=True."
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "came"),
    [
        pytest.param((), {}, "()", id="nothing"),
        pytest.param((1, 2), {}, "(_, _)", id="too many"),
        pytest.param((1,), {"mask": 2}, "(_, mask=_)", id="keyword"),
        pytest.param(([1, {"a": 2}],), {}, "([_, {'a': _}])", id="nested"),
    ],
)
def test_other_arguments_than_a_samples_are_spelled_out(args, kwargs, came, loaded, x):
    """The error shows the arguments of a sample and those of the call."""
    loaded.deploy(None)
    with pytest.raises(BackendKwargsError) as raised:
        loaded(*args, **kwargs)
    assert str(raised.value) == (
        f"The arguments must have the structure of a sample, (_), got {came}. Build with a sample of this kind."
    )


class Keywords(torch.nn.Module):
    """A module with keywords, one of them a dict or another object."""

    def forward(self, a=0.0, tensor=0.0, value=None):
        return (a - tensor) if value is None else a - tensor * value["first"] + value["second"]


class Point(NamedTuple):
    """An argument of a kind that a bundle does not describe."""

    first: torch.Tensor
    second: torch.Tensor

    def __getitem__(self, key):
        return getattr(self, key)


def deployed_keywords(path, kwargs):
    CompiledModule(bk.CompileConfig(backend="eager")).build(Keywords(), [kwargs]).save(path)
    loaded = CompiledModule.load(path, Keywords())
    loaded.deploy(None)
    return loaded


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(None, id="no dict"),
        pytest.param({"first": torch.ones(8), "second": torch.zeros(8)}, id="dict"),
        pytest.param(OrderedDict(first=torch.ones(8), second=torch.zeros(8)), id="other mapping"),
    ],
)
def test_keywords_come_in_any_order(value, tmp_path, x):
    """Keywords may come in another order than the sample's, whatever their names are."""
    loaded = deployed_keywords(tmp_path / "bundle", {"a": x, "tensor": x, "value": value})
    kwargs = {"value": value, "tensor": 2 * x, "a": x}
    torch.testing.assert_close(loaded(**kwargs), Keywords()(**kwargs))


def test_sizes_of_keywords_named_as_in_a_manifest_are_dynamic(tmp_path, x):
    config = bk.CompileConfig(backend="eager")
    data = [{"tensor": x[:size]} for size in (2, 3)]
    CompiledModule(config).build(Keywords(), data).save(tmp_path / "bundle")
    loaded = CompiledModule.load(tmp_path / "bundle", Keywords())
    loaded.deploy(None)
    assert loaded(tensor=x).shape == (4, 8)


def test_objects_are_left_to_dynamos_guards(tmp_path, x):
    """An argument that a bundle does not describe is compared by dynamo."""
    point = Point(x, x)
    loaded = deployed_keywords(tmp_path / "bundle", {"a": x, "tensor": x, "value": point})
    torch.testing.assert_close(loaded(a=x, tensor=x, value=point), Keywords()(x, x, point))


def test_dynamic_sizes_are_open_in_the_check(tmp_path):
    config = bk.CompileConfig(backend="eager")
    CompiledModule(config).build(scaled(), [torch.randn(4, 8), torch.randn(6, 8)]).save(tmp_path / "bundle")
    loaded = CompiledModule.load(tmp_path / "bundle", scaled())
    loaded.deploy(None)
    assert loaded(torch.randn(9, 8)).shape == (9, 8)
    with pytest.raises(BackendKwargsError, match=r"^Input args\[0\] must be float32\[any, 8\] on cpu, got"):
        loaded(torch.randn(9, 4))


# ---- elsewhere

SERVE = """
    import json, sys
    started = []
    STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system")
    HARMLESS = "/sbin/ldconfig"  # CUDA builds of torch 2.15 import cuda.pathfinder, which asks it for libdl
    sys.addaudithook(
        lambda event, args: started.append(str(args[0])) if event in STARTS and args[0] != HARMLESS else None
    )
    import torch
    import backend_kwargs as bk
    from tests.bundles.small_module import scaled

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    module = scaled(seed=5)
    loaded = bk.CompiledModule.load(sys.argv[1], module, trust=True)
    loaded.deploy(None)
    result = loaded(x)
    right = torch.allclose(result, scaled()(x), atol=1e-5)
    print(json.dumps({"right": right, "started": started, "says": loaded.describe()}))
"""


@pytest.fixture
def serve_elsewhere(tmp_path):
    """Return a function that serves a bundle in a fresh process with an empty cache and without a compiler."""

    def serve(bundle, cache):
        programs = tmp_path / "bin"
        programs.mkdir()
        for name in ("g++", "gcc", "c++", "cc", "clang++", "clang"):
            (programs / name).write_text("#!/bin/sh\nexit 1\n")
            (programs / name).chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CXX": str(programs / "g++"),
            "CC": str(programs / "gcc"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "PYTHONPATH": ROOT,
        }
        command = [sys.executable, "-c", textwrap.dedent(SERVE), str(bundle)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    return serve


def test_a_fresh_process_without_compiler_and_cache_starts_nothing(bundle_with_code, serve_elsewhere, tmp_path):
    """The first call from a bundle starts no process, so it compiles nothing."""
    served = serve_elsewhere(bundle_with_code, tmp_path / "cache")
    assert (served["right"], served["started"]) == (True, [])
    assert "graphs loaded in this process: 1, compiled: 0" in served["says"]


def test_a_cache_folder_that_cannot_be_written_is_not_missed(bundle_with_code, serve_elsewhere):
    """A bundle is served with a read-only cache folder."""
    read_only = Path("/proc/sys")  # to everybody: a folder's mode does not stop root
    if not read_only.is_dir():
        pytest.skip("no folder here is read-only to root")
    served = serve_elsewhere(bundle_with_code, read_only)
    assert (served["right"], served["started"]) == (True, [])


def test_the_choice_of_auto_serves_elsewhere_without_a_race(tmp_path, x, monkeypatch):
    """auto's decision is saved with the graph; the store of decisions is not read."""
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "one"))
    config = bk.CompileConfig(backend="tmpl-inductor:auto", options={"candidates": ["aten"], "race": "always"})
    CompiledModule(config).build(scaled(), [x]).save(tmp_path / "bundle")
    (graph,) = manifest_of(tmp_path / "bundle")["graphs"]
    assert graph["winner"] in ("eager", "default", "aten")
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "other"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, result, _ = served(tmp_path / "bundle", x, trust=True)
    torch.testing.assert_close(result, scaled()(x).detach())
    assert not (tmp_path / "other").exists()
    assert "graphs loaded in this process: 1, compiled: 0" in loaded.describe()


class Heads(torch.nn.Module):
    """Two linear layers with one input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.nn.functional.gelu(self.q(x)) + self.k(x)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"freezing": True}, id="freezing"),
        pytest.param({"rewrites": ("packed",)}, id="packed"),
        pytest.param({"precision": "int8-weight", "max_error": 0.1}, id="int8-weight", marks=needs_torchao),
    ],
)
def test_code_with_weights_of_its_own_is_compiled_again(tmp_path, x, options):
    """A graph that contains weights is not saved; the loaded module is right, and `describe()` says why it compiles."""
    config = bk.CompileConfig(options=options, dynamic=False)
    CompiledModule(config).build(Heads().eval(), [x]).save(tmp_path / "bundle")
    loaded = CompiledModule.load(tmp_path / "bundle", Heads().eval(), trust=True)
    loaded.deploy()
    torch.testing.assert_close(loaded(x), Heads()(x).detach(), atol=0.05, rtol=0.05)
    described = loaded.describe()
    assert "graphs held: 0 of 1\ngraphs loaded in this process: 0, compiled: 1" in described
    assert (
        "note: a graph's code is not in the bundle: it has tensors of its own, such as weights that are frozen, packed "
        "or quantised; it is compiled again where the bundle is loaded"
    ) in described


def precise(module, x):
    return copy.deepcopy(module).double()(x.double())


@torch.no_grad()
def test_loaded_code_in_a_lower_precision_is_measured(tmp_path, x):
    """Casts need no weights of their own, so their code is in the bundle; its error is measured where it is loaded."""
    x = x[:1].repeat(4, 1)
    config = bk.CompileConfig(options={"precision": "bf16", "max_error": 0.02}, dynamic=False)
    CompiledModule(config).build(Heads().eval(), [x]).save(tmp_path / "bundle")
    loaded = CompiledModule.load(tmp_path / "bundle", module := Heads().eval(), trust=True)
    loaded.deploy()
    assert 1e-4 < (loaded(x) - precise(module, x)).norm() / precise(module, x).norm() < 0.02
    assert "graphs held: 1 of 1\ngraphs loaded in this process: 1, compiled: 0" in loaded.describe()

    again = CompiledModule.load(tmp_path / "bundle", cancelling := Heads().eval(), trust=True)
    cancelling.k.weight.mul_(1000)
    cancelling.k.bias.copy_(-cancelling.k.weight @ x[0])
    again.activate()
    with pytest.warns(BackendKwargsWarning, match="A graph is compiled without precision 'bf16': output"):
        result = again(x)
    torch.testing.assert_close(result, cancelling(x), atol=1e-3, rtol=1e-3)
    assert "graphs loaded in this process: 0, compiled: 1" in again.describe()


def test_a_decision_without_code_is_counted_apart(tmp_path, x, monkeypatch, capsys):
    """A bundle has no code of a graph that auto leaves to eager, only the decision, which names the model."""
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: False)
    config = bk.CompileConfig(backend="tmpl-inductor:auto", options={"candidates": [], "race": "always"}, dynamic=False)
    built = CompiledModule(config).build(Heads().eval(), [x])
    assert "graphs held: 0 of 1, and auto's decision alone for 1" in built.describe()
    assert '"model":"Heads"' in "".join(path.read_text() for path in (tmp_path / "store").rglob("*.json"))
    built.save(tmp_path / "bundle")
    inspect(tmp_path / "bundle")
    assert capsys.readouterr().out.endswith(f"{NO_CODE}\n")
