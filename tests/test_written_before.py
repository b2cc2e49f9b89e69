"""Files written by an earlier version of the package are read correctly."""

import json
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from backend_kwargs import Backend, BackendKwargsError, CompileConfig, CompiledModule, load_templates, make_backend
from backend_kwargs.auto.decisions_toml import read_decisions
from backend_kwargs.auto.lock import read_lock
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.bundles.config import REMOVED
from backend_kwargs.bundles.disk.contents import inspected
from backend_kwargs.compare import Row, to_json
from backend_kwargs.compare.comparison import Comparison
from backend_kwargs.page import read_document
from benchmarks.execution import records
from tests.bundles.small_module import scaled

# All written by commit 3aa9903, on torch 2.13: the pickle by pickle.dumps, the config by Backend.to_json, the rest
# by the commands `decisions export`, `compare` and `benchmarks run`.
# Commit 33c293b wrote the bundles, of `tests.bundles.small_module.scaled`, the configs, the lock, the folders of
# decisions and the report. `signer.pem` is the public key of what is signed. The package of `bundle-aoti` is left out.
WRITTEN = Path(__file__).parent / "written_before"
RACED = "0d6576c4ebc0d87f42c13963c4bb3637f05c2880266f87b496f715f7ea387090"
PUT = "ab" * 32


def test_pickled_backends():
    """Old pickles of every compiler's backends give the backends of their reprs."""
    backends = pickle.loads((WRITTEN / "backends.pickle").read_bytes())
    reprs = (WRITTEN / "backends.txt").read_text().splitlines()
    assert [repr(backend) for backend in backends] == reprs
    assert backends == [eval(line, {"make_backend": make_backend}) for line in reprs]


def test_a_pickled_backend_that_was_removed():
    """A pickle with tmpl-openvino, of release 0.1, is refused with what to write instead."""
    with pytest.raises(BackendKwargsError) as raised:
        pickle.loads((WRITTEN / "removed.pickle").read_bytes())
    assert str(raised.value) == (
        "Backend 'tmpl-openvino' was removed: write 'openvino-native', or 'openvino' for OpenVINO's own backend."
    )


def test_pickles_name_what_restores_them():
    """A new pickle names the same function as an old one, so that either version reads both."""
    backend = make_backend("tmpl-inductor:aten")
    assert backend.__reduce__()[0].__module__ == "backend_kwargs.backend"
    assert b"cbackend_kwargs.backend\n_restored\n" in pickle.dumps(backend, protocol=0)


def test_config():
    """A config file gives its backend, with the recorded key."""
    backend = Backend.from_config((WRITTEN / "backend.json").read_text())
    assert backend == make_backend("tmpl-inductor:aten+freezing", {"triton.cudagraphs": False})
    assert backend.to_config() == json.loads((WRITTEN / "backend.json").read_text())
    assert backend.key() == "3d2b5c743b77779765c35943b01b059d130263ec1dd6d7fb266a59caab3e33e5"


def test_exported_decisions():
    """An old TOML export has keys that no graph has now: that is said, and that its winners are templates."""
    with pytest.raises(BackendKwargsError) as raised:
        read_decisions(WRITTEN / "decisions.toml", lambda name: {})
    assert str(raised.value) == (
        f"'{WRITTEN / 'decisions.toml'}' has no schema, not 2: another release of backend-kwargs made its keys, which "
        "no graph has here. Its winners are still templates."
    )


def test_exported_templates():
    """load_templates reads the winners of an old TOML export."""
    names = load_templates(WRITTEN / "decisions.toml")
    assert names == [f"auto-{RACED[:12]}", f"auto-{PUT[:12]}"]
    options = {"triton.cudagraphs": True, "epilogue_fusion": True}
    assert make_backend(f"tmpl-inductor:{names[1]}").options == options


def test_results_of_the_suite():
    """An old results file is read completely: environment, ceilings, cells, and finished groups."""
    results = records.read(WRITTEN / "suite.jsonl")
    assert results.environments[0]["command"].startswith("python -m benchmarks run --suite smoke")
    assert set(results.ceilings[0]["figures"]) >= {"copy", "fp32"}
    assert [(cell.peer, cell.status, cell.repeats["wall"]) for cell in results.cells] == [
        ("eager", "pass", 106),
        ("default", "pass", 1),
        ("A/A", "pass", 110),
        ("+5 %", "pass", 62),
    ]
    assert results.cells[1].compile.cold_s == 1.3893145719994209
    assert results.groups == {
        "rms_norm_residual@1 fwd torch.bfloat16 smoke cold run0 events wall 2 eager,default",
    }


def test_cells_are_written_as_then():
    """A cell of an old results file is written again with the same keys and values."""
    lines = [json.loads(line) for line in (WRITTEN / "suite.jsonl").read_text().splitlines()]
    cells = [line for line in lines if line["record"] == "cell"]
    assert [records.line_of(cell) for cell in records.read(WRITTEN / "suite.jsonl").cells] == cells


def test_compare_writes_the_keys_of_then():
    """`compare --samples` still has the same keys, also per candidate."""
    then = json.loads((WRITTEN / "compare.json").read_text())
    now = to_json(Comparison([Row("eager", "eager")], {}, None, None, "inference", []))
    assert list(now) == list(then)
    assert list(now["candidates"][0]) == list(then["candidates"][0])


# ---- bundles, configs, a lock, folders of decisions, a report


@pytest.fixture
def written(tmp_path):
    """A copy of the folder, where nothing is written into the original."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "written"))


def test_a_bundle_is_read(written):
    """A signed bundle gives its weights and graphs, and says what it was built with."""
    manifest, signed = inspected(written / "bundle", [written / "signer.pem"])
    assert (signed, [graph.key[:8] for graph in manifest.graphs]) == ("signed by a key that was passed", ["677da846"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on another machine its code is compiled again
        loaded = CompiledModule.load(written / "bundle", module := scaled(5), trusted_keys=[written / "signer.pem"])
    assert loaded.config == CompileConfig()
    assert all(torch.equal(value, scaled().state_dict()[name]) for name, value in module.state_dict().items())


def test_a_package_is_refused(written):
    """A bundle with an ahead-of-time package is refused in one line, however it is read."""
    path = written / "bundle-aoti"
    message = f"Kind 'aoti' of bundle {str(path)!r} was removed: build again, and {REMOVED['kind']}."
    for read in (lambda: inspected(path, []), lambda: CompiledModule.load(path, scaled(), trust=True)):
        with pytest.raises(BackendKwargsError) as raised:
            read()
        assert str(raised.value) == message


def test_a_compile_config_of_a_package_is_refused():
    """A config file with `kind="aoti"` is refused in one line."""
    with pytest.raises(BackendKwargsError) as raised:
        CompileConfig.from_json(WRITTEN / "compile_config_aoti.json")
    assert str(raised.value) == f"CompileConfig field 'kind' was removed: {REMOVED['kind']}."


def test_a_compile_config_is_read():
    """A config file of a bundle is read."""
    assert CompileConfig.from_json(WRITTEN / "compile_config.json") == CompileConfig(
        backend="tmpl-inductor:freezing", unmatched="eager"
    )


def test_a_lock_has_other_keys():
    """A lock of version 1 has keys that no graph has now: it says that a new one is to be written."""
    with pytest.raises(BackendKwargsError) as raised:
        read_lock(WRITTEN / "pins.lock")
    assert str(raised.value) == f"Lock '{WRITTEN / 'pins.lock'}' has version 1, not 2: pin again."


@pytest.mark.parametrize(("store", "count"), [("store", 2), ("store-signed", 1)])
def test_folders_of_decisions_are_counted(written, store, count):
    """Decisions in folders have keys that no graph has now: they are not read, and counted without a warning."""
    catalogue = Catalogue(written / store)
    assert (catalogue.all(), len(catalogue.earlier)) == ([], count)
    if store == "store":  # nobody here can sign what would take the place of the others
        assert (catalogue.forget(), catalogue.all(), len(catalogue.earlier)) == (count, [], 0)


def test_a_report_is_read():
    """The JSON of a report gives its page."""
    document = read_document(WRITTEN / "report.json")
    assert [(group.title, [row.name for row in group.rows]) for group in document.speedups] == [
        ("graph 1/0", ["eager", "default", "freezing"])
    ]
