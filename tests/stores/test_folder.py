"""A folder as a store: what it keeps on an ordinary disk, on a network disk, and when processes die."""

import errno
import os
import random
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from backend_kwargs.stores import Documents
from backend_kwargs.stores.documents import Document, Kind, RefusedError, decoded, encoded
from backend_kwargs.stores.folder import ABANDONED_S, BESIDE, Folder
from tests import forks
from tests.stores.faulty_folder import faulty

NAME = "units/a.json"


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "store")


def test_is_a_store(folder):
    """It has the methods of a store, and its name for people is its path."""
    assert isinstance(folder, Documents)
    assert folder.label == str(folder.path)


def test_keeps_what_it_is_given(folder):
    """A document is read back as it was put, in place of an earlier one, until it is forgotten."""
    assert folder.get(NAME) is None
    folder.put(NAME, b"1")
    folder.put(NAME, b"2")
    assert folder.get(NAME) == b"2"
    folder.forget(NAME)
    folder.forget(NAME)
    assert folder.get(NAME) is None


def test_reading_makes_nothing(folder):
    """A look-up and a listing make no folder."""
    assert (folder.get(NAME), [*folder.list("")]) == (None, [])
    assert not folder.path.exists()


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        pytest.param("", ["decisions/cpu/ab.json", "decisions/gpu/ab.json", "units/a.json"], id="all"),
        pytest.param("decisions/", ["decisions/cpu/ab.json", "decisions/gpu/ab.json"], id="folder"),
        pytest.param("decisions/cpu/a", ["decisions/cpu/ab.json"], id="begin of a name"),
        pytest.param("decisions/c", ["decisions/cpu/ab.json"], id="begin of a folder"),
        pytest.param("decisions/cpu/b", [], id="none"),
        pytest.param("other/", [], id="no folder"),
    ],
)
def test_lists_what_begins_so(folder, prefix, names):
    """Names are listed in order, with their documents."""
    for name in ("units/a.json", "decisions/gpu/ab.json", "decisions/cpu/ab.json"):
        folder.put(name, name.encode())
    assert [*folder.list(prefix)] == [(name, name.encode()) for name in names]


def test_lists_nothing_else(folder):
    """Files of others, links to folders, pipes, and what is too long are no documents, and are replaced by some."""
    folder.put(NAME, b"1")
    units = folder.path / "units"
    (units / "Notes.txt").write_text("mine")
    (units / "up.json").symlink_to("..")
    os.mkfifo(units / "pipe.json")
    (units / "huge.json").write_bytes(b"x" * 2**21)
    (folder.path / "loop").symlink_to(".")
    assert [*folder.list("")] == [(NAME, b"1")]
    for name in ("units/pipe.json", "units/huge.json"):
        folder.put(name, b"2")
        assert folder.get(name) == b"2"


@pytest.mark.parametrize(
    "name", ["../a.json", "units/../a.json", "/etc/passwd", "a.json", "units//a", "units/.a", "U/a", f"u/{'a' * 200}"]
)
def test_no_name_leads_out(folder, name):
    """A name that is none is refused by each method."""
    for call in (folder.get, folder.forget, lambda name: folder.put(name, b"")):
        with pytest.raises(RefusedError, match=r"is not the name of a document$"):
            call(name)
    assert not folder.path.exists()


def test_a_misspelled_path_makes_no_folders(tmp_path):
    """One folder at most is made for a path that the user gives."""
    with pytest.raises(FileNotFoundError):
        Folder(tmp_path / "a" / "b").put(NAME, b"1")
    assert not (tmp_path / "a").exists()


def test_the_users_own_folder_is_made_with_those_above(tmp_path):
    """In a new home folder there is no folder for data yet; the folders above are not the store's."""
    folder = Folder(tmp_path / "share" / "data" / "decisions", private=True)
    folder.put(NAME, b"1")
    assert folder.get(NAME) == b"1"


@pytest.mark.parametrize(("private", "modes"), [(True, (0o700, 0o600)), (False, (0o755, 0o644))])
def test_whose_files_are(tmp_path, private, modes):
    """Those of a private folder are its user's alone; others follow the umask."""
    before = os.umask(0o022)
    try:
        made = Folder(tmp_path / "a", private=private)
        made.put(NAME, b"1")
    finally:
        os.umask(before)
    assert tuple(stat.S_IMODE(path.stat().st_mode) for path in (made.path, made.path / NAME)) == modes
    assert made.is_own is private


def test_removes_what_killed_writers_left(folder):
    """A file that a killed process wrote beside is removed after an hour, when the folder is listed."""
    folder.put(NAME, b"1")
    old, new = (folder.path / "units" / f"{BESIDE}{name}" for name in ("old", "new"))
    for path in (old, new):
        path.touch()
    os.utime(old, (0, time.time() - ABANDONED_S - 1))
    assert [*folder.list("")] == [(NAME, b"1")]
    assert (old.exists(), new.exists()) == (False, True)


# ---- a network disk


def test_on_a_network_disk_nothing_is_lost(folder, monkeypatch):
    """Each second rename fails after it is done, each second opening fails once: every document is there."""
    with faulty(monkeypatch) as counts:
        for at in range(20):
            folder.put(f"units/{at}.json", str(at).encode())
            assert folder.get(f"units/{at}.json") == str(at).encode()
        assert len([*folder.list("units/")]) == 20
    assert min(counts.values()) >= 20
    assert not [*folder.path.rglob(f"{BESIDE}*")]


def test_a_stale_listing_hides_no_document(folder, monkeypatch):
    """A document that is put and one that is forgotten are known by name, however old the listing is."""
    folder.put(NAME, b"1")
    with faulty(monkeypatch, stale_s=60, every=10**9):
        assert [name for name, _ in folder.list("units/")] == [NAME]
        folder.put("units/b.json", b"2")
        folder.forget(NAME)
        assert (folder.get(NAME), folder.get("units/b.json")) == (None, b"2")
        assert [*folder.list("units/")] == []


def test_four_threads_put_at_once(folder, monkeypatch):
    """The last of several that put one name is there, whole."""
    documents = [bytes([at]) * 10_000 for at in range(4)]
    with faulty(monkeypatch, every=3), ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: folder.put(NAME, documents[at % 4]), range(100)))
        assert folder.get(NAME) in documents


WRITER = """
import sys
from pathlib import Path
from backend_kwargs.stores.folder import Folder
store = Folder(Path(sys.argv[1]))
for at in range(100_000):
    store.put(f"units/{sys.argv[2]}-{at}.json", b"x" * 5000)
    print(at, flush=True)
"""


def test_killed_writers_lose_nothing(folder):
    """Two processes write at once and are killed: what they have confirmed is there, and everything is whole."""
    chance = random.Random(1)
    writers = [forks.Fork("-c", WRITER, folder.path, name, stderr=None) for name in "ab"]
    for writer in writers:
        writer.stdout.readline()
    time.sleep(chance.random())
    confirmed = set()
    for name, writer in zip("ab", writers, strict=True):
        os.kill(writer.pid, signal.SIGKILL)
        lines = writer.communicate()[0].splitlines(keepends=True)
        confirmed |= {f"units/{name}-{line.strip()}.json" for line in lines if line.endswith("\n")}
    there = dict(folder.list(""))
    assert confirmed <= {*there}
    assert {len(document) for document in there.values()} == {5000}


def test_a_full_disk_leaves_the_old_document(folder, monkeypatch):
    """A document that cannot be written is an error; the old one stays, and nothing beside it."""
    folder.put(NAME, b"1")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        folder.put(NAME, b"2")
    assert folder.get(NAME) == b"1"
    assert [path.name for path in (folder.path / "units").iterdir()] == ["a.json"]


def full(file):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_document_of_a_folder_is_valid(folder):
    """What is put is what is decoded."""
    kind = Kind("unit", dict)
    folder.put(NAME, encoded(kind, Document(NAME, {"x": 1})))
    assert decoded(kind, NAME, folder.get(NAME)).body == {"x": 1}
