"""Triton's extensions of this process, which a bundle includes."""

import mmap

import pytest

from backend_kwargs.bundles.disk.place import install, loaded_extensions

FOLDER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


@pytest.fixture
def mapped(tmp_path):
    """Map a file named as Triton names its extensions into this process, and return its path."""
    path = tmp_path / FOLDER / "cuda_utils.cpython-312-x86_64-linux-gnu.so"
    path.parent.mkdir()
    path.write_bytes(b"compiled")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        yield path


def found(path):
    return {place: file for place, file in loaded_extensions().items() if file == path}


def test_an_extension_is_found_where_triton_keeps_it(mapped):
    """An extension is found by its path in Triton's cache, the folder with the hash included."""
    assert found(mapped) == {f"{FOLDER}/{mapped.name}": mapped}


def test_an_extension_that_another_process_replaced_is_found(mapped):
    """Two processes with an empty cache both put the extension there: the first one's has been deleted."""
    other = mapped.with_name("tmp.other")
    other.write_bytes(b"compiled")
    other.replace(mapped)
    assert found(mapped) == {f"{FOLDER}/{mapped.name}": mapped}


def test_an_extension_whose_file_is_gone_is_left_out(mapped):
    """An extension whose file was removed cannot be copied into a bundle."""
    mapped.unlink()
    assert found(mapped) == {}


def test_nothing_is_installed_without_extensions():
    """A bundle without extensions needs no GPU, and no Triton, to be loaded."""
    install({})
