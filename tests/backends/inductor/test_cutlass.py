"""CUTLASS as installed from PyPI, laid out for Inductor; the packages here are small stand-ins in a directory."""

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir

from backend_kwargs import BackendKwargsError, BackendKwargsWarning, make_backend
from backend_kwargs.backends.inductor import compiler
from backend_kwargs.backends.inductor.cutlass import cutlass_dir, found_by_inductor
from backend_kwargs.options.machine import Machine

INSTALL = 'pip install "nvidia-cutlass<5,>=4.2"'
HEADER = "include/cutlass/cutlass.h"


def install(site: Path, release: str) -> None:
    """Lay out the files of the nvidia-cutlass wheel."""
    for package in ("cutlass_library", "cutlass_cppgen", "pycute"):
        (site / package).mkdir(parents=True, exist_ok=True)
        (site / package / "__init__.py").touch()
    for name in (HEADER, "tools/util/include/t.h", "examples/e.cu"):
        file = site / "cutlass_library" / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"// {release}", encoding="utf-8")
    metadata = site / "nvidia_cutlass.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: nvidia-cutlass\nVersion: {release}\n", encoding="utf-8")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    where = tmp_path / "the user's cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(where))
    monkeypatch.delenv("TORCHINDUCTOR_CUTLASS_DIR", raising=False)
    return where


@pytest.fixture
def site(tmp_path, monkeypatch, cache):
    where = tmp_path / "site with spaces"
    install(where, "4.2.0.0")
    monkeypatch.syspath_prepend(str(where))
    return where


@pytest.fixture
def inductor_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return Path(cache_dir()) / "torch_cutlass"


def seen() -> str:
    """Return the settings that a new thread reads, like those that run nvcc."""
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.append(config.cutlass.cutlass_dir))
    thread.start()
    thread.join()
    return read[0]


def test_layout(site, cache):
    """The directory is in the user's cache and has Inductor's layout of a CUTLASS checkout, also with spaces."""
    directory = cutlass_dir()
    assert directory.parent == cache / "backend-kwargs" / "cutlass"
    assert {str(p.relative_to(directory)) for p in (*directory.glob("*"), *directory.glob("python/*"))} == {
        *("python", "include", "tools", "examples"),
        *("python/cutlass_library", "python/cutlass_cppgen", "python/pycute"),
    }
    assert (directory / HEADER).read_text(encoding="utf-8") == "// 4.2.0.0"


def test_second_time(site):
    """An existing directory is used unchanged."""
    first = cutlass_dir()
    made = first.stat()
    assert (cutlass_dir(), first.stat().st_ino) == (first, made.st_ino)


def test_upgrade(site):
    """Another release of the package gets its own directory."""
    old = cutlass_dir()
    install(site, "4.3.0.0")
    new = cutlass_dir()
    assert (new != old, new.name[:7], (new / HEADER).read_text(encoding="utf-8")) == (True, "4.3.0.0", "// 4.3.0.0")


def test_other_place(site, tmp_path, monkeypatch):
    """The same release in another environment gets its own directory."""
    old = cutlass_dir()
    install(tmp_path / "other", "4.2.0.0")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    assert cutlass_dir() != old


def test_damaged(site):
    """A directory with a missing part, as after cleaning the cache, is rebuilt."""
    (cutlass_dir() / "python" / "pycute").unlink()
    directory = cutlass_dir()
    assert (directory / "python" / "pycute" / "__init__.py").is_file()
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_at_once(site, cache):
    """Several processes that create it at the same time agree, and leave nothing else."""
    code = "from backend_kwargs.backends.inductor.cutlass import cutlass_dir; input(); print(cutlass_dir())"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, text=True, env=environment, **pipes) for _ in range(4)]
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate() for process in running]
    assert [error for _, error in outputs] == [""] * 4
    (directory,) = {Path(output.strip()) for output, _ in outputs}
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_unwritable(site, tmp_path, monkeypatch):
    """A read-only cache is reported, with the ways out."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BackendKwargsError) as error:
        cutlass_dir()
    where = str(error.value).split("'")[1]
    assert where.startswith(f"{tmp_path}/file/backend-kwargs/cutlass/4.2.0.0-")
    assert str(error.value) == (
        f"Cannot lay out CUTLASS in {where!r}: Not a directory. "
        "Set XDG_CACHE_HOME to a writable folder, or TORCHINDUCTOR_CUTLASS_DIR to a CUTLASS checkout."
    )


def test_full_disk(site, monkeypatch):
    """A full disk is reported, and the next call completes what it began."""

    def refuse(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "replace", refuse)
        with pytest.raises(
            BackendKwargsError, match=r"^Cannot lay out CUTLASS in .*: No space left on device\. Set XDG"
        ):
            cutlass_dir()
    assert (cutlass_dir() / HEADER).is_file()


def test_not_installed(cache):
    """Without the packages the error says how to install them."""
    with pytest.raises(BackendKwargsError) as error:
        cutlass_dir()
    assert str(error.value) == f"CUTLASS 4 is not installed (cutlass_library is not importable): {INSTALL}."


def test_no_sources(site):
    """A cutlass_library without the C++ sources is reported with the missing path."""
    (site / "cutlass_library" / "source").rename(site / "elsewhere")
    lacking = site / "cutlass_library" / "source" / "include"
    with pytest.raises(BackendKwargsError) as error:
        cutlass_dir()
    assert str(error.value) == f"The installed CUTLASS has no directory {str(lacking)!r}: {INSTALL}."


def test_every_thread_finds_it(site, inductor_cache):
    """While Inductor compiles, its threads have the directory and nvcc; afterwards the configuration is restored."""
    before = config.get_config_copy()
    with found_by_inductor("/opt/nvcc"):
        assert (seen(), config.cuda.cuda_cxx) == (str(cutlass_dir()), "/opt/nvcc")
    assert config.get_config_copy() == before


def test_found_after_a_patch(site, inductor_cache):
    """An earlier patch of the option in this thread does not hide the directory."""
    with config.patch({"cutlass.cutlass_dir": "/nowhere"}):
        pass
    with found_by_inductor(None):
        assert (config.cutlass.cutlass_dir, seen()) == (str(cutlass_dir()), str(cutlass_dir()))


def test_failed_compile_leaves_no_trace(site, inductor_cache):
    """Inductor's configuration is restored after an error too."""
    before = seen()
    with pytest.raises(RuntimeError), found_by_inductor(None):
        raise RuntimeError
    assert seen() == before


def test_variable_wins(site, inductor_cache, cache, tmp_path, monkeypatch):
    """A TORCHINDUCTOR_CUTLASS_DIR set by the user is kept, and nothing is laid out."""
    monkeypatch.setenv("TORCHINDUCTOR_CUTLASS_DIR", str(tmp_path))
    before = config.cutlass.cutlass_dir
    with found_by_inductor(None):
        assert seen() == before
    assert not cache.exists()


def test_option_wins(site, inductor_cache, tmp_path):
    """A checkout that the user sets as an option reaches the threads."""
    (tmp_path / "checkout" / "python").mkdir(parents=True)
    with config.patch({"cutlass.cutlass_dir": str(tmp_path / "checkout")}), found_by_inductor(None):
        assert seen() == str(tmp_path / "checkout")


def test_links_of_another_environment(site, inductor_cache, tmp_path):
    """A link of another environment in Inductor's cache is redirected to this one's package."""
    inductor_cache.mkdir(parents=True)
    (inductor_cache / "pycute").symlink_to(tmp_path / "gone")
    with found_by_inductor(None):
        assert (inductor_cache / "pycute").resolve() == site / "pycute"


def test_inductor_imports_it(site):
    """Inductor's own search finds the packages in the directory, at each release's place."""
    code = (
        "from backend_kwargs.backends.inductor.cutlass import found_by_inductor\n"
        "from torch._inductor.codegen.cutlass.utils import try_import_cutlass\n"
        "from torch._inductor.codegen.cuda.compile_utils import _cutlass_include_paths\n"
        "with found_by_inductor(None): print(try_import_cutlass(), _cutlass_include_paths()[0])"
    )
    for name in ("generator", "library", "manifest"):
        (site / "cutlass_library" / f"{name}.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(site), "TORCHINDUCTOR_CACHE_DIR": str(site / "inductor")}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert (ran.stdout, ran.stderr) == (f"True {site}/cutlass_library/source/include\n", "")


LARGE_GPU = Machine(gpu="a GPU", capability=(9, 0), sms=132, triton=True, nvcc="/opt/nvcc", cutlass="nvidia-cutlass")


@pytest.mark.parametrize(
    ("spec", "here", "finds"),
    [
        pytest.param("tmpl-inductor:cutlass", LARGE_GPU, True, id="template"),
        pytest.param("tmpl-inductor:triton", LARGE_GPU, False, id="other template"),
        pytest.param("tmpl-inductor:cutlass", Machine(), False, id="machine without CUTLASS"),
    ],
)
def test_compile(spec, here, finds, site, inductor_cache, cache, monkeypatch):
    """Compiling lays CUTLASS out only if it is needed."""
    torch._dynamo.reset()  # equal backends would share what one of them compiled
    monkeypatch.setattr(compiler, "machine", lambda: here)
    found = torch.compile(lambda x: x.sin() + 1, backend=make_backend(spec, fx_graph_cache=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendKwargsWarning)  # warned once per process
        found(torch.ones(3))
    assert cache.exists() == finds
