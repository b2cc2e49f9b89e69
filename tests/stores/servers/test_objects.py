"""Object storage's own."""

import os

import pytest

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.stores import objects
from backend_kwargs.stores.folder import Folder


def test_the_layout_is_a_folders(s3, tmp_path):
    """Objects are named as the files of a folder are, so that either can be copied to the other."""
    import fsspec

    objects.open(s3).put("decisions/h100/a.json", b"1")
    files, root = fsspec.url_to_fs(s3)
    files.get(root, str(tmp_path / "copy"), recursive=True)
    assert dict(Folder(tmp_path / "copy").list("")) == {"decisions/h100/a.json": b"1"}


def test_other_objects_are_no_documents(s3):
    """Objects of other names, without content, or too large are left out."""
    import fsspec

    store = objects.open(s3)
    store.put("a/b", b"1")
    files, root = fsspec.url_to_fs(s3)
    for name, content in {"README.TXT": b"x", "a/Upper": b"x", "a/empty": b"", "a/large": b"x" * (2 << 20)}.items():
        files.pipe_file(f"{root}/{name}", content)
    assert dict(store.list("")) == {"a/b": b"1"}
    assert store.get("a/empty") is None
    assert store.get("a/large") is None


def test_what_another_process_wrote_is_listed(s3):
    """A list is not answered from what fsspec remembers."""
    store = objects.open(s3)
    assert [*store.list("")] == []
    child = os.fork()
    if not child:
        store.put("a/b", b"1")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert dict(store.list("")) == {"a/b": b"1"}


def test_no_such_bucket(s3):
    """A put into a bucket that does not exist is an error, and makes none."""
    store = objects.open("s3://no-such-bucket/prefix")
    with pytest.raises(BackendKwargsError) as e:
        store.put("a/b", b"1")
    assert str(e.value) == (
        "Store 's3://no-such-bucket/prefix' failed: FileNotFoundError: The specified bucket does not exist."
    )


@pytest.mark.parametrize(
    ("url", "message"),
    [
        pytest.param(
            "nosuch://a/b",
            "Unknown scheme of store 'nosuch://a/b': 'nosuch'. docs/stores.md lists those in use.",
            id="unknown",
        ),
        pytest.param(
            "simplecache::s33://b",
            "Unknown scheme of store 'simplecache::s33://b': 's33'. Did you mean 's3'?",
            id="in-a-chain",
        ),
        pytest.param(
            "gs://bucket/p",
            "Store 'gs://bucket/p' needs the package gcsfs: pip install gcsfs (gcsfs is not importable).",
            id="not-installed",
        ),
    ],
)
def test_a_file_system_that_is_not_there(url, message):
    """A missing package is an error at once."""
    with pytest.raises(BackendKwargsError) as e:
        objects.open(url)
    assert str(e.value) == message
