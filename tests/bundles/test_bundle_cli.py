"""`backend-kwargs bundle build`, `inspect` and `run` on the command line."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from backend_kwargs.bundles.disk.place import DOMAIN
from backend_kwargs.keys import digest
from backend_kwargs.stores import documents
from tests import forks

MODEL = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval(), (torch.randn(4, 8),)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model's file and its bundle, and the output of `build`."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "model.py").write_text(MODEL)
    built = call(folder, "bundle", "build", "model.py:build", "-o", "bundle", "--static")
    assert built.returncode == 0, built.stderr
    (folder / "built.txt").write_text(built.stdout)
    return folder


def write_keys(private, public):
    """Write a new Ed25519 key and its public part as PEM files."""
    key = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519").Ed25519PrivateKey.generate()
    s = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))


@pytest.fixture
def signed(folder, tmp_path):
    """A folder with a signed copy of the bundle, and the public key."""
    write_keys(tmp_path / "private.pem", tmp_path / "public.pem")
    shutil.copytree(folder / "bundle", tmp_path / "bundle")
    content = (tmp_path / "bundle" / "manifest.json").read_bytes()
    signature = documents.signed(DOMAIN, content, tmp_path / "private.pem")
    (tmp_path / "bundle" / "signatures" / digest(content)).write_bytes(signature)
    return tmp_path


def call(folder, *arguments, **environment):
    return forks.run("-m", "backend_kwargs", *arguments, cwd=folder, env={**os.environ, **environment})


def test_build_says_what_it_made(folder):
    output = (folder / "built.txt").read_text()
    assert output.startswith("CompiledModule(dynamic=False)\nstate: active on cpu\n")
    assert re.search(r"compiling +\d+\.\d\d", output)
    assert output.endswith("Serve it: backend-kwargs bundle run bundle model.py:build --trust\n")


def test_run_shows_the_first_call_beside_the_compile(folder, tmp_path):
    """In a fresh process with an empty cache nothing is compiled, and a table shows both times."""
    empty = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "empty")}
    ran = call(folder, "bundle", "run", "bundle", "model.py:build", "--trust", **empty)
    assert ran.returncode == 0, ran.stderr
    seconds = dict(re.findall(r"^ ([a-z][^\d\n]*?) {2,}(\d+\.\d\d)", ran.stdout, re.MULTILINE))
    assert {"compiling, when it was built", "load and deploy", "first call"} <= seconds.keys()
    assert "graphs loaded in this process: 1, compiled: 0" in ran.stdout
    assert "a call: " in ran.stdout


@pytest.mark.parametrize("arguments", [[], ["--trust"], ["--key", "public.pem"]], ids=["plain", "trusted", "signed"])
def test_run_imports_no_factory_that_the_user_did_not_name(signed, arguments):
    """The factory's source is no part of a bundle: another file of its name may lie in the current folder."""
    (signed / "model.py").write_text("open('ran', 'w')")
    ran = call(signed, "bundle", "run", "bundle", *arguments)
    wanted = "Pass FACTORY, the function that makes the model: MODULE_OR_FILE:NAME."
    assert (ran.returncode, ran.stderr) == (2, f"error: {wanted} It was built with 'model.py:build'.\n")
    assert not (signed / "ran").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param("", "is signed by none of the trusted keys, or was changed since.", id="another's"),
        pytest.param("remove", "is not signed; pass trust=True, and no keys, if you trust its author.", id="none"),
    ],
)
def test_keys_hold_beside_trust(signed, change, reason):
    """With --key a signature must verify, also with --trust, before anything is imported."""
    write_keys(signed / "other.pem", signed / "foreign.pem")
    if change:
        shutil.rmtree(signed / "bundle" / "signatures")
    (signed / "model.py").write_text("open('ran', 'w')")
    ran = call(signed, "bundle", "run", "bundle", "model.py:build", "--trust", "--key", "foreign.pem")
    assert (ran.returncode, ran.stderr) == (2, f"error: Bundle 'bundle' {reason}\n")
    assert not (signed / "ran").exists()


def test_inspect_runs_nothing_and_shows_the_parts(folder):
    shown = call(folder, "bundle", "inspect", "bundle").stdout
    assert "CompiledModule(dynamic=False) of torch.nn.modules.container.Sequential, not signed" in shown
    assert re.search(r"^ weights +\d+ ", shown, re.MULTILINE)
    assert shown.endswith("Its code can be used on this machine.\n")


def test_inspect_tells_a_signature_from_a_verified_one(signed):
    """Whatever is in the folder of signatures, only a key can say who signed."""
    unverified, foreign = "with a signature that is not verified (pass --key)", signed / "foreign.pem"
    write_keys(signed / "other.pem", foreign)
    assert unverified in call(signed, "bundle", "inspect", "bundle").stdout
    assert (
        ", signed by a key that was passed, "
        in call(signed, "bundle", "inspect", "bundle", "--key", "public.pem").stdout
    )
    refused = call(signed, "bundle", "inspect", "bundle", "--key", "foreign.pem")
    assert (refused.returncode, refused.stdout) == (2, "")
    (signature,) = (signed / "bundle" / "signatures").iterdir()
    signature.write_bytes(b"garbage")
    assert unverified in call(signed, "bundle", "inspect", "bundle").stdout
    assert call(signed, "bundle", "inspect", "bundle", "--key", "public.pem").returncode == 2


def test_no_bundle_is_one_line(folder):
    ran = call(folder, "bundle", "inspect", "nothing")
    assert (ran.returncode, ran.stderr) == (
        2,
        "error: No bundle at 'nothing': cannot read manifest.json (No such file or directory).\n",
    )


LOUD = """
import torch

def build():
    print("the factory runs")
    return torch.nn.Linear(8, 8).eval(), (torch.randn(4, 8),)
"""


@pytest.fixture
def loud(tmp_path):
    """A folder with the file of a factory that says when it runs, a foreign folder, and a key that is none."""
    (tmp_path / "model.py").write_text(LOUD)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis").write_text("years of work")
    (tmp_path / "no.pem").write_text("no key")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            ["-o", "b", "--sign", "missing.pem"],
            "Cannot read a private key from 'missing.pem': FileNotFoundError",
            id="key",
        ),
        pytest.param(
            ["-o", "b", "--sign", "no.pem"], "Cannot read a private key from 'no.pem': ValueError: ", id="no key"
        ),
        pytest.param(
            ["-o", "foreign"],
            "Cannot write bundle 'foreign': the folder contains 'thesis', which is not part of a bundle; name another.",
            id="foreign folder",
        ),
        pytest.param(["-o", "model.py"], "Cannot write bundle 'model.py': it is a file; name a folder.\n", id="file"),
    ],
)
def test_a_bundle_that_cannot_be_written_is_refused_before_the_model_is_made(arguments, words, loud):
    if "--sign" in arguments:
        pytest.importorskip("cryptography")
    before = sorted(loud.rglob("*"))
    ran = call(loud, "bundle", "build", "model.py:build", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"error: {words}")
    assert ran.stderr.count("\n") == 1
    assert sorted(loud.rglob("*")) == before


def test_a_deleted_folder_is_one_line(loud, tmp_path):
    ran = forks.run(
        "-c",
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); sys.argv[1:] = "
        "['bundle', 'build', 'model:build', '-o', 'b']; from backend_kwargs.cli import main; main()",
        cwd=loud,
    )
    assert (ran.returncode, ran.stderr) == (2, "error: The current folder was deleted: change to another.\n")


@pytest.mark.parametrize(
    "words",
    ["bundle build model.py:build -o b", "compare model.py:build", "explain inductor"],
    ids=["build", "compare", "explain"],
)
def test_without_a_temporary_folder_a_command_is_one_line(loud, words):
    """As in a container whose disk cannot be written to; a process of its own, since importing torch looks for one."""
    code = (
        "import sys, tempfile; tempfile.tempdir = None; tempfile._candidate_tempdir_list = lambda: ['/proc/none']; "
        f"sys.argv[1:] = {words.split()!r}; from backend_kwargs.cli import main; main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=False, cwd=loud, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (
        2,
        "error: No temporary folder can be written to: set TMPDIR to one that can.\n",
    )
