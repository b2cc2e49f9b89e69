"""Faults of a bundle: kills, full disks, flipped bits, hostile files, and concurrent processes."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs import BackendKwargsError, CompiledModule
from tests import forks
from tests.bundles.small_module import scaled
from tests.full_disk import full_disk

ROOT = str(Path(__file__).parents[2])
TIMES = int(os.environ.get("BACKEND_KWARGS_FAULTS", "1"))
EAGER = bk.CompileConfig(backend="eager")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the fault is made by a feature of Linux")


def run(program, *arguments):
    """Run a program in another process and return it."""
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return forks.run("-c", textwrap.dedent(program), *arguments, env=environment)


def seed_of(bundle):
    """Return which module a bundle contains; raise if it is incomplete."""
    module = scaled(seed=99)
    CompiledModule.load(bundle, module, trust=True)
    return next(seed for seed in range(30) if torch.equal(scaled(seed).linear.weight, module.linear.weight))


def save(seed, path):
    CompiledModule(EAGER).build(scaled(seed), [torch.randn(4, 8)]).save(path)


@pytest.fixture
def bundle(tmp_path, bundle_with_code):
    return Path(shutil.copytree(bundle_with_code, tmp_path / "bundle"))


KILLED = """
    import os, signal, sys
    import torch
    import backend_kwargs as bk
    from tests.bundles.small_module import scaled

    new = bk.CompiledModule(bk.CompileConfig(backend="eager")).build(scaled(1), [torch.randn(4, 8)])
    old = bk.CompiledModule(bk.CompileConfig(backend="eager")).build(scaled(0), [torch.randn(4, 8)])
    path, stages = sys.argv[1], 0
    while True:
        # Each child is killed at the next call that touches a file.
        child = os.fork()
        if not child:
            left = [stages]

            def kill(event, args):
                if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "fcntl.flock", "os.listdir"):
                    if not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left[0] -= 1

            sys.addaudithook(kill)
            new.save(f"{path}/{stages}")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        stages += 1
    print(stages)
"""


@linux
def test_a_kill_at_any_stage_of_save_leaves_the_old_bundle(tmp_path):
    """After SIGKILL at any file operation the bundle is the old or the new one, and can be saved again."""
    for stage in range(60):
        save(0, tmp_path / "old") if not stage else None
        shutil.copytree(tmp_path / "old", tmp_path / "bundles" / str(stage))
    ran = run(KILLED, tmp_path / "bundles")
    assert ran.returncode == 0, ran.stderr
    stages = int(ran.stdout)
    assert stages > 10
    found = [seed_of(tmp_path / "bundles" / str(stage)) for stage in range(stages + 1)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 1)
    built = CompiledModule(EAGER).build(scaled(2), [torch.randn(4, 8)])
    for stage in range(stages + 1):
        built.save(tmp_path / "bundles" / str(stage))
    assert seed_of(tmp_path / "bundles" / "5") == 2
    assert all(each.name.isdecimal() for each in (tmp_path / "bundles").iterdir())  # what the killed ones left is gone


FULL = """
    import resource, signal, sys
    import torch
    import backend_kwargs as bk
    from tests.bundles.small_module import scaled

    built = bk.CompiledModule(bk.CompileConfig(backend="eager")).build(scaled(1, size=8), [torch.randn(4, 8)])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    try:
        built.save(sys.argv[1])
    except bk.BackendKwargsError as error:
        print(error)
"""


@linux
def test_a_full_disk_leaves_the_old_bundle(tmp_path):
    save(0, tmp_path / "bundle")
    ran = run(FULL, tmp_path / "bundle")
    assert ran.stdout.startswith("Cannot write"), ran.stderr
    assert ran.stdout.strip().endswith("File too large.")
    assert seed_of(tmp_path / "bundle") == 0
    assert len([*(tmp_path / "bundle" / "parts").iterdir()]) == 1
    assert [*tmp_path.iterdir()] == [tmp_path / "bundle"]


def parts_of(bundle):
    return sorted((bundle / "parts").iterdir())


def test_a_flipped_bit_in_any_part_is_found(bundle, state_of):
    """Every part is verified before anything is loaded, and the module stays unchanged."""
    assert len(parts_of(bundle)) == 3  # weights, the code of a graph, and its library
    for part in parts_of(bundle):
        content = part.read_bytes()
        for at in (0, len(content) // 2, len(content) - 1):
            part.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            module = scaled(seed=5)
            before = state_of(module)
            with pytest.raises(BackendKwargsError) as raised:
                CompiledModule.load(bundle, module, trust=True)
            assert str(raised.value) == (
                f"Part {part.name[:12]} of the bundle is damaged: its size or SHA-256 does not match the manifest."
            )
            torch.testing.assert_close(module.state_dict(), before)
        part.write_bytes(content)
    assert seed_of(bundle) == 0


def test_a_flipped_bit_in_a_signed_manifest_is_found(bundle, tmp_path):
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    key = ed25519.Ed25519PrivateKey.generate()
    CompiledModule.load(bundle, scaled(), trust=True).save(tmp_path / "signed", signing_key=key)
    file = tmp_path / "signed" / "manifest.json"
    content = file.read_bytes()
    for at in range(0, len(content), max(1, len(content) // (20 * TIMES))):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(BackendKwargsError):
            CompiledModule.load(tmp_path / "signed", scaled(), trusted_keys=[key.public_key()])


def test_a_truncated_file_is_found(bundle):
    for file in [*parts_of(bundle), bundle / "manifest.json"]:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(BackendKwargsError):
            CompiledModule.load(bundle, scaled(), trust=True)
        file.write_bytes(content)


def changed(bundle, change):
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def escape(manifest):
    manifest["weights"]["sha256"] = "../../../../etc/passwd"


def escape_by_extension(manifest):
    manifest["extensions"] = {"../../.bashrc": manifest["weights"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(escape, "has no valid manifest: ValidationError", id="path in place of a hash"),
        pytest.param(escape_by_extension, "has no valid manifest: ValidationError", id="path of an extension"),
        pytest.param(
            lambda m: m.update(schema=3), "has schema 3, this release reads 2; update backend-kwargs.", id="newer"
        ),
        pytest.param(
            lambda m: m.update(schema=True),
            "has no valid manifest: ValidationError: Expected `int`, got `bool`",
            id="1",
        ),
        pytest.param(lambda m: m.update(wings=2), "has no valid manifest: ValidationError", id="unknown field"),
        pytest.param(lambda m: m["weights"].update(size=-1), "has no valid manifest: ValidationError", id="size"),
        pytest.param(lambda m: m.update(samples=[]), "has no valid manifest: ValidationError", id="no sample"),
        pytest.param(
            lambda m: m.update(samples=[[]]),
            "has no valid samples: it must be arguments and keywords, got [].",
            id="sample",
        ),
        pytest.param(
            lambda m: m.update(samples=[{"tuple": [{"tuple": [[]]}, {"dict": {}}]}]),
            "has no valid samples: AttributeError: ",
            id="argument",
        ),
        *(
            pytest.param(
                lambda m, tensor=tensor: m.update(samples=[{"tuple": [{"tuple": [{"tensor": tensor}]}, {"dict": {}}]}]),
                f"has no valid samples: {words}",
                id=name,
            )
            for name, tensor, words in [
                ("dtype", [[2], [1], "torch.none", "cpu", "torch.strided"], "AttributeError: "),
                ("function for a dtype", [[2], [1], "torch.load", "cpu", "torch.strided"], "TypeError: "),
                ("function for a layout", [[2], [1], "torch.int8", "cpu", "torch.load"], "TypeError: "),
                ("device", [[2], [1], "torch.int8", "moon", "torch.strided"], "RuntimeError: "),
                ("negative size", [[-2], [1], "torch.int8", "cpu", "torch.strided"], "ValueError: sizes and strides "),
                ("negative stride", [[2], [-1], "torch.int8", "cpu", "torch.strided"], "ValueError: sizes and "),
                ("text for a size", [["2"], [1], "torch.int8", "cpu", "torch.strided"], "ValueError: sizes and "),
                ("true for a size", [[True], [1], "torch.int8", "cpu", "torch.strided"], "ValueError: sizes and "),
                ("missing stride", [[2, 2], [1], "torch.int8", "cpu", "torch.strided"], "ValueError: 2 sizes have 1 "),
                ("huge", [[35 << 40], [1], "torch.int8", "cpu", "torch.strided"], "tensors of 38483 GB "),
                ("huge stride", [[2], [35 << 40], "torch.int8", "cpu", "torch.strided"], "tensors of "),
                ("huge in steps of 0", [[35 << 40], [0], "torch.int8", "cpu", "torch.strided"], "tensors of "),
            ]
        ),
        pytest.param(lambda m: m.update(cold_s=-1.0), "has no valid manifest: ValidationError", id="seconds"),
        pytest.param(
            lambda m: m["weights"].update(sha256=m["weights"]["sha256"] + "\n"),
            "has no valid manifest: ValidationError",
            id="newline after a hash",
        ),
    ],
)
def test_a_hostile_manifest_is_an_error(change, words, bundle):
    changed(bundle, change)
    with pytest.raises(BackendKwargsError) as raised:
        CompiledModule.load(bundle, scaled(), trust=True)
    assert str(raised.value).startswith(f"Bundle {str(bundle)!r} {words}")


@pytest.mark.parametrize("dtype", ["float33", "torch.load", "int8", "", 5, [], "\x1b[31m"])
def test_an_output_dtype_that_is_none_is_an_error(dtype, bundle_of_eager, tmp_path):
    bundle = Path(shutil.copytree(bundle_of_eager, tmp_path / "bundle"))
    changed(bundle, lambda manifest: manifest.update(output_dtypes=[dtype]))
    with pytest.raises(BackendKwargsError, match=r"^(An output dtype must be|Bundle .* has no valid manifest)"):
        CompiledModule.load(bundle, scaled())


# Any one of them in place of any value of a manifest.
HOSTILE = [None, -1, 35 << 40, 1e308, "x", "torch.load", "\x1b[31m", [], [["a"]], {}, {"tuple": []}, [[[[[[[]]]]]]]]


def places(value, at=()):
    """Yield the place of each value in JSON values."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def put(value, at, new):
    if not at:
        return new
    copied = value.copy()
    copied[at[0]] = put(value[at[0]], at[1:], new)
    return copied


@pytest.mark.filterwarnings("ignore:Bundle")
def test_a_hostile_value_anywhere_in_a_manifest(bundle_of_eager, tmp_path, monkeypatch, state_of):
    """It is loaded, or the error is one line and ours, and then the module is unchanged."""
    from backend_kwargs.bundles.disk import contents

    monkeypatch.setattr(contents, "PAUSES_S", ())
    bundle = Path(shutil.copytree(bundle_of_eager, tmp_path / "bundle"))
    manifest = json.loads((bundle / "manifest.json").read_text())
    every = [(at, value) for at in places(manifest) for value in HOSTILE]
    module = scaled(seed=5)
    before = state_of(module)
    refused = []
    for at, value in every[:: max(1, 3 // TIMES)]:
        (bundle / "manifest.json").write_text(json.dumps(put(manifest, at, value)))
        try:
            loaded = CompiledModule.load(bundle, module, trust=True)
            module.load_state_dict(before)
            loaded.deploy()
        except BackendKwargsError as error:
            refused.append(str(error))
        assert all(map(torch.equal, module.state_dict().values(), before.values()))
    assert len(refused) > 100
    assert all(map(str.isprintable, refused))


def test_a_manifest_that_is_not_utf8_is_an_error(bundle):
    file = bundle / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"cpu"', b'"\xff"'))
    with pytest.raises(BackendKwargsError, match=r"^Bundle '.*' has no valid manifest: DecodeError: "):
        CompiledModule.load(bundle, scaled(), trust=True)


def test_weights_that_name_unknown_tensors_are_an_error(bundle):
    changed(bundle, lambda manifest: manifest.update(shared_weights={"linear.weight": "nothing"}))
    with pytest.raises(BackendKwargsError, match=r"^The bundle's weights cannot be read: KeyError"):
        CompiledModule.load(bundle, scaled(), trust=True)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore:Bundle")
def test_a_hostile_pickle_is_never_read_without_trust(bundle, tmp_path):
    """A malicious pickle in place of a compiled graph, with the right hash, is not read."""
    import hashlib

    content = pickle.dumps(Evil(tmp_path / "ran"))
    digest = hashlib.sha256(content).hexdigest()
    (bundle / "parts" / digest).write_bytes(content)
    part = {"sha256": digest, "size": len(content)}
    changed(bundle, lambda manifest: manifest["graphs"][0].update(code=part))
    x = torch.randn(4, 8)
    loaded = CompiledModule.load(bundle, scaled())
    loaded.activate()
    loaded(x)
    assert not (tmp_path / "ran").exists()


def test_hostile_options_are_refused_without_trust(bundle):
    """A compiler's path in the config is code, and refused without trust."""
    changed(bundle, lambda manifest: manifest["config"].update(options={"cpp.cxx": "/tmp/evil"}))
    with pytest.raises(BackendKwargsError, match=r"^Inductor option 'cpp.cxx' is code"):
        CompiledModule.load(bundle, scaled())


@linux
def test_a_pipe_in_place_of_a_part_makes_nobody_wait(bundle):
    part = parts_of(bundle)[0]
    part.unlink()
    os.mkfifo(part)
    with pytest.raises(BackendKwargsError, match=r"cannot be read: it is not a regular file"):
        CompiledModule.load(bundle, scaled(), trust=True)


def test_no_bundle_is_an_error(tmp_path):
    with pytest.raises(BackendKwargsError) as raised:
        CompiledModule.load(tmp_path / "none", scaled())
    assert str(raised.value) == (
        f"No bundle at {str(tmp_path / 'none')!r}: cannot read manifest.json (No such file or directory)."
    )


BESIDE = """
    import sys
    import torch
    import backend_kwargs as bk
    from tests.bundles.small_module import scaled

    def built_of(seed):
        return bk.CompiledModule(bk.CompileConfig(backend="eager")).build(scaled(seed), [torch.randn(4, 8)])

    built = [built_of(int(sys.argv[2]) + more) for more in (0, 1)]
    print("ready", flush=True)
    sys.stdin.readline()
    for time in range(int(sys.argv[3])):
        built[time % 2].save(sys.argv[1])
"""


def test_two_processes_save_and_a_third_loads(tmp_path):
    """Every load gets a complete bundle of one of two processes that keep saving."""
    path, times = tmp_path / "bundle", 60 * TIMES
    save(0, path)
    environment = {**os.environ, "PYTHONPATH": ROOT}
    savers = [
        forks.Fork(
            *("-c", textwrap.dedent(BESIDE), path, seed, times), env=environment, stdin=subprocess.PIPE, stderr=None
        )
        for seed in (1, 3)
    ]
    for saver in savers:
        assert saver.stdout.readline() == "ready\n"
    for saver in savers:
        saver.stdin.write("\n")
        saver.stdin.flush()
    found = {0}
    try:
        while any(saver.poll() is None for saver in savers):
            found.add(seed_of(path))
    finally:
        for saver in savers:
            saver.communicate()
    assert [saver.returncode for saver in savers] == [0, 0]
    assert found <= {0, 1, 2, 3, 4}
    assert len(found) > 1
    assert seed_of(path) in {1, 2, 3, 4}
    assert [*tmp_path.iterdir()] == [path]


def test_threads_may_save_and_infer_at_once(tmp_path):
    """Saving during calls writes a complete bundle."""
    compiled = CompiledModule(EAGER).build(scaled(3), [torch.randn(4, 8)])
    threads = [threading.Thread(target=compiled.save, args=(tmp_path / "bundle",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        compiled(torch.randn(4, 8))
    for thread in threads:
        thread.join()
    assert seed_of(tmp_path / "bundle") == 3


def test_a_package_that_cannot_be_copied_is_an_error_of_one_line(tmp_path):
    """A full folder for temporary files is named."""
    from backend_kwargs.bundles.disk.contents import _Bundle
    from backend_kwargs.bundles.disk.place import Part
    from backend_kwargs.files import opened_folder

    content = b"x" * 5000
    part = Part(hashlib.sha256(content).hexdigest(), len(content))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / part.sha256).write_bytes(content)
    with full_disk(), pytest.raises(BackendKwargsError) as raised, opened_folder(tmp_path) as folder:
        _Bundle(tmp_path, folder, None, b"").copy(part, tmp_path / "model.pt2")
    assert str(raised.value) == (
        f"Cannot write {str(tmp_path / 'model.pt2')!r}: File too large; it takes 5000 bytes, and TMPDIR names its "
        "folder."
    )


# ---- decisions of auto


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    """A bundle of auto with its decision, made without a race, and with code; its config permits no precision."""
    path = tmp_path_factory.mktemp("decided")
    options = {"race": "never", "candidates": [], "store": str(path / "store")}
    config = bk.CompileConfig(backend="tmpl-inductor:auto", options=options, dynamic=False)
    CompiledModule(config).build(scaled(), [torch.randn(4, 8)]).save(path / "bundle")
    return path / "bundle"


def copied_with(bundle, path, **changed):
    """Return a copy of a bundle whose only graph is changed, without code."""
    shutil.copytree(bundle, path)
    manifest = json.loads((path / "manifest.json").read_bytes())
    (graph,) = manifest["graphs"]
    graph.update(code=None, libraries=[], **changed)
    (manifest["config"]["options"] or {}).pop("store", None)  # the path is code
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


FOREIGN = [
    pytest.param("bf16", {"precision": "bf16", "max_error": 0.9}, id="precision"),
    pytest.param("default", {"precision": "bf16", "max_error": 0.9}, id="precision of default"),
    pytest.param("freezing", {"freezing": True}, id="freezing"),
    pytest.param("default", {"cpp.cxx": "false"}, id="code"),
    pytest.param("default", {"no_such_option": 1}, id="unknown option"),
    pytest.param("default", {"max_autotune": "maybe"}, id="wrong value"),
    pytest.param("default", {"rewrites": [["packed"]]}, id="wrong rewrites"),
    pytest.param("tmpl-tvm", {}, id="another compiler"),
    pytest.param("\x1b[2J", {}, id="no name"),
]


@pytest.mark.parametrize(("winner", "options"), FOREIGN)
@torch.no_grad()
def test_a_decision_beyond_the_config_is_not_used(decided, tmp_path, monkeypatch, winner, options):
    """An untrusted bundle's decision is judged like one in a store: else the graph is compiled as the config says."""
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "store"))
    path = copied_with(decided, tmp_path / "bundle", winner=winner, options=options)
    with pytest.warns(bk.errors.BackendKwargsWarning) as warned:
        loaded = CompiledModule.load(path, module := scaled(1))
    assert [str(each.message) for each in warned] == [
        f"Bundle {str(path)!r}: a decision of auto is not used, since its config does not permit that."
    ]
    loaded.deploy()
    x = torch.randn(4, 8)
    torch.testing.assert_close(loaded(x), module(x), atol=1e-6, rtol=0)
    assert "compiled: 1" in loaded.describe()


@torch.no_grad()
def test_a_config_without_auto_has_no_decisions(bundle, tmp_path):
    """A decision in an untrusted bundle is ignored if its config does not name auto."""
    path = copied_with(bundle, tmp_path / "changed", winner="eager", options={})
    with pytest.warns(bk.errors.BackendKwargsWarning, match="a decision of auto is not used"):
        loaded = CompiledModule.load(path, scaled())
    loaded.deploy()
    loaded(torch.randn(4, 8))
    assert "graphs loaded in this process: 0, compiled: 1" in loaded.describe()


@pytest.mark.parametrize("options", [{"no_such_option": 1}, {"max_autotune": "maybe"}, {"rewrites": [1]}], ids=str)
@torch.no_grad()
def test_a_decision_that_fails_falls_back(decided, tmp_path, monkeypatch, options):
    """A trusted bundle's decision with a wrong option warns, and its graph is compiled as the config says."""
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "store"))
    loaded = CompiledModule.load(copied_with(decided, tmp_path / "bundle", options=options), scaled(), trust=True)
    loaded.deploy()
    x = torch.randn(4, 8)
    with pytest.warns(bk.errors.BackendKwargsWarning, match="A saved decision of auto fails, and its graph is"):
        result = loaded(x)
    torch.testing.assert_close(result, scaled()(x), atol=1e-6, rtol=0)
