"""Where a bundle is written: beside its place, which it takes by one rename; nothing that is not ours is touched."""

import ctypes
import errno
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs import BackendKwargsError, CompiledModule
from backend_kwargs.bundles.disk import place
from backend_kwargs.bundles.disk.contents import inspected
from backend_kwargs.files import BESIDE
from backend_kwargs.keys import digest
from tests.bundles.small_module import scaled

EAGER = bk.CompileConfig(backend="eager", check_numbers="off")


def names(path):
    return sorted(each.name for each in path.iterdir())


@pytest.fixture(scope="module")
def compiled():
    return CompiledModule(EAGER).build(scaled(0), [torch.randn(4, 8)])


@pytest.fixture(scope="module")
def other():
    return CompiledModule(EAGER).build(scaled(1), [torch.randn(4, 8)])


def weight(bundle):
    module = scaled(seed=99)
    CompiledModule.load(bundle, module)
    return module.linear.weight


def holds(bundle, compiled):
    return torch.equal(weight(bundle), compiled._known().module.linear.weight)


def tree(path):
    """Return everything below a folder: kind, content or target."""
    found = {}
    for each in sorted(path.rglob("*")):
        content = str(each.readlink()) if each.is_symlink() else each.read_bytes() if each.is_file() else ""
        found[str(each.relative_to(path))] = (stat.S_IFMT(each.lstat().st_mode), content)
    return found


def refused(save, path):
    with pytest.raises(BackendKwargsError) as raised:
        save(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def in_parts(bundle, make):
    make(bundle / "parts" / "wheel.step")


def of_parts(bundle, make):
    part = next((bundle / "parts").iterdir())
    part.unlink()
    make(part)


def of_lock(bundle, make):
    make(bundle / ".lock")


def of_manifest(bundle, make):
    (bundle / "manifest.json").unlink()
    make(bundle / "manifest.json")


def of_folder(bundle, make):
    shutil.rmtree(bundle / "signatures")
    make(bundle / "signatures")


MAKES = {
    "file": lambda path: path.write_text("years of work"),
    "link to a file": lambda path: path.symlink_to("../thesis"),
    "link to a folder": lambda path: path.symlink_to(path.parent.parent / "home"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in MAKES.items()])
@pytest.mark.parametrize("where", [in_parts, of_parts, of_lock, of_manifest, of_folder])
def test_what_is_not_of_the_bundle_is_named_and_left(where, make, compiled, other, tmp_path):
    """A folder with anything that its manifest does not list is not replaced, and nothing in or beside it changes."""
    if (where, make) == (of_parts, MAKES["file"]) or (where, make) == (of_folder, MAKES["folder"]):
        pytest.skip("a bundle has this")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").write_text("years of work")
    bundle = tmp_path / "bundle"
    compiled.save(bundle)
    where(bundle, make)
    before = tree(tmp_path)
    message = refused(other.save, bundle)
    assert message.startswith(f"Cannot write bundle {str(bundle)!r}: the folder contains '")
    assert message.endswith("', which is not part of a bundle; name another.")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("content", ["precious", "{}", '{"schema": 1}', '{"schema": 9}', ""])
def test_a_users_folder_with_the_names_of_a_bundle_is_left(content, compiled, tmp_path):
    bundle = tmp_path / "wheel"
    (bundle / "parts").mkdir(parents=True)
    (bundle / "parts" / "wheel.step").write_text("precious")
    (bundle / "manifest.json").write_text(content)
    before = tree(tmp_path)
    assert refused(compiled.save, bundle) == (
        f"Cannot write bundle {str(bundle)!r}: the folder contains 'manifest.json', which is not part of a bundle; "
        "name another."
    )
    assert tree(tmp_path) == before


def test_a_bundle_of_a_former_release_is_read_and_replaced(compiled, other, tmp_path):
    """Bundles of former releases have an empty file .lock."""
    compiled.save(tmp_path / "bundle")
    (tmp_path / "bundle" / ".lock").touch()
    assert holds(tmp_path / "bundle", compiled)
    other.save(tmp_path / "bundle")
    assert holds(tmp_path / "bundle", other)
    assert names(tmp_path / "bundle") == ["manifest.json", "parts", "signatures"]
    assert names(tmp_path) == ["bundle"]


def test_the_users_own_link_stays_one(compiled, other, tmp_path):
    """A bundle at a link is written to the folder that the link names, and read from there."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/bundle")
    for each in (compiled, other):
        each.save(tmp_path / "link")
        assert (tmp_path / "link").readlink() == Path("disk/bundle")
        assert names(tmp_path / "disk") == ["bundle"]
        assert holds(tmp_path / "link", each)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o777])
def test_a_folder_that_exists_keeps_its_mode(mode, compiled, other, tmp_path):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle").chmod(mode)
    for each in (compiled, other):
        each.save(tmp_path / "bundle")
        assert stat.S_IMODE((tmp_path / "bundle").stat().st_mode) == mode


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002])
def test_a_new_bundle_has_the_modes_that_the_umask_permits(mask, compiled, tmp_path):
    old = os.umask(mask)
    try:
        compiled.save(tmp_path / "bundle")
    finally:
        os.umask(old)
    modes = {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "bundle").rglob("*")}
    assert modes == {0o666 & ~mask, 0o777 & ~mask}
    assert stat.S_IMODE((tmp_path / "bundle").stat().st_mode) == 0o777 & ~mask


@pytest.mark.parametrize("mask", [0o777, 0o477])
def test_its_owner_may_read_a_bundle_whatever_the_umask_is(mask, compiled, other, tmp_path):
    old = os.umask(mask)
    try:
        for each in (compiled, other):
            each.save(tmp_path / "bundle")
    finally:
        os.umask(old)
    for each in (tmp_path / "bundle", *(tmp_path / "bundle").rglob("*")):
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600)
    assert names(tmp_path) == ["bundle"]


def test_a_path_through_a_link_is_read_where_it_was_written(compiled, tmp_path):
    """The parent of a link is that of the folder it names, for save and load alike."""
    (tmp_path / "disk" / "inner").mkdir(parents=True)
    (tmp_path / "b").symlink_to("disk/inner")
    compiled.save(f"{tmp_path}/b/../c")
    assert names(tmp_path / "disk") == ["c", "inner"]
    assert holds(f"{tmp_path}/b/../c", compiled)


@pytest.mark.parametrize("path", [None, 3, b"b"], ids=repr)
def test_what_is_no_path_is_refused(path, compiled):
    message = f"must be the path of a folder, got {path!r} ({type(path).__name__})."
    assert refused(compiled.save, path) == f"save's `path` {message}"
    assert refused(lambda path: CompiledModule.load(path, scaled()), path) == f"load's `path` {message}"


@pytest.mark.parametrize("keys", ["key.pem", Path("key.pem"), 3, b"key"], ids=repr)
def test_keys_that_are_no_list_are_refused(keys, compiled, tmp_path):
    compiled.save(tmp_path / "bundle")
    assert refused(lambda keys: CompiledModule.load(tmp_path / "bundle", scaled(), trusted_keys=keys), keys) == (
        "load's `trusted_keys` must be a list of public keys or of paths of their PEM files, got "
        f"{keys!r} ({type(keys).__name__})."
    )


def test_no_keys(compiled, tmp_path):
    compiled.save(tmp_path / "bundle")
    CompiledModule.load(tmp_path / "bundle", scaled(), trusted_keys=None)


SIGNATURES = {
    "pipe": (os.mkfifo, "it is not a regular file"),
    "folder": (Path.mkdir, "it is not a regular file"),
    "link": (lambda path: path.symlink_to("../manifest.json"), "Too many levels of symbolic links"),
    "long": (lambda path: path.write_bytes(b"x" * 2000), "it is longer than 1024 bytes"),
}


@pytest.mark.parametrize(("make", "why"), SIGNATURES.values(), ids=SIGNATURES)
def test_a_signature_that_is_none(make, why, compiled, tmp_path):
    compiled.save(bundle := tmp_path / "bundle")
    content = (bundle / "manifest.json").read_bytes()
    make(bundle / "signatures" / digest(content))
    assert refused(lambda path: CompiledModule.load(path, scaled(), trusted_keys=["none.pem"]), bundle) == (
        f"Bundle {str(bundle)!r} has no valid signature: {why}."
    )
    assert inspected(bundle, ())[1] == f"with a signature that is not valid ({why})"


def test_a_temporary_folder_that_was_deleted_is_named(compiled, tmp_path, monkeypatch):
    compiled.save(tmp_path / "bundle")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert refused(lambda path: CompiledModule.load(path, scaled()), tmp_path / "bundle") == (
        f"The temporary folder {str(tmp_path / 'gone')!r} cannot be used: No such file or directory; set TMPDIR to "
        "another."
    )


@pytest.mark.parametrize("size", [250, 255])
def test_a_long_name(size, compiled, other, tmp_path):
    for each in (compiled, other):
        each.save(tmp_path / ("b" * size))
        assert holds(tmp_path / ("b" * size), each)
    assert names(tmp_path) == ["b" * size]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("b" * 256, "File name too long", id="name too long"),
        pytest.param("a\0b", "embedded null byte", id="null byte"),
        pytest.param("file", "it is a file; name a folder", id="file"),
        pytest.param("pipe", "Not a directory", id="pipe"),
        pytest.param("loop", "Not a directory", id="loop of links"),
        pytest.param("file/b", "Not a directory", id="below a file"),
        pytest.param(
            ".",
            "it is a mounted or the current folder, which cannot be replaced; name a folder in it",
            id="current folder",
        ),
    ],
)
def test_a_place_that_cannot_have_a_bundle_is_refused(name, reason, compiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    assert refused(compiled.save, name) == f"Cannot write bundle {name!r}: {reason}."
    assert names(tmp_path) == before


def test_a_bundle_is_saved_from_a_deleted_folder(compiled, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    compiled.save(tmp_path / "bundle")
    assert holds(tmp_path / "bundle", compiled)
    assert refused(compiled.save, "b") == (
        "Cannot write bundle 'b': the current folder was deleted; change to another."
    )


def test_a_folder_that_cannot_be_written_to_is_refused(compiled, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    assert refused(compiled.save, tmp_path / "bundle") == (
        f"Cannot write bundle {str(tmp_path / 'bundle')!r}: {str(tmp_path)!r} is not a folder that can be written to."
    )
    tmp_path.chmod(0o700)


# ---- the renames


def test_two_folders_exchange_their_names_at_once(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    place._exchange(tmp_path / "a", tmp_path / "b")
    assert (names(tmp_path / "a"), names(tmp_path / "b")) == (["b"], ["a"])
    with pytest.raises(FileNotFoundError):
        place._exchange(tmp_path / "a", tmp_path / "none")


def test_a_file_system_that_cannot_exchange_names_replaces_no_bundle(compiled, other, tmp_path, monkeypatch):
    """What is there stays, and is named before anything is written; a new name needs no exchange."""
    compiled.save(bundle := tmp_path / "bundle")
    monkeypatch.setattr(place, "RENAME_EXCHANGE", 1 << 20)
    assert refused(other.save, bundle) == (
        f"Cannot write bundle {str(bundle)!r}: its file system cannot exchange two folders; delete the old "
        "bundle first, or name another."
    )
    assert holds(bundle, compiled)
    other.save(tmp_path / "new")
    (tmp_path / "empty").mkdir(mode=0o750)
    other.save(tmp_path / "empty")
    assert holds(tmp_path / "empty", other)
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o750
    assert names(tmp_path) == ["bundle", "empty", "new"]


def test_a_system_that_cannot_exchange_names_says_so(tmp_path, monkeypatch):
    """Whatever error an earlier call has left."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
    ctypes.set_errno(errno.ENOENT)
    with pytest.raises(OSError, match="its file system cannot exchange two folders"):
        place._exchange(tmp_path, tmp_path)


def test_a_file_that_comes_during_the_save_is_not_deleted(compiled, other, tmp_path, monkeypatch):
    """The old folder is looked at again after it was renamed, since nobody finds it under its name then."""
    compiled.save(tmp_path / "bundle")
    take_over = place._take_over

    def late(old, new):
        (old / "thesis").write_text("years of work")
        take_over(old, new)

    monkeypatch.setattr(place, "_take_over", late)
    assert "the folder contains 'thesis'" in refused(other.save, tmp_path / "bundle")
    assert (tmp_path / "bundle" / "thesis").read_text() == "years of work"
    assert names(tmp_path) == ["bundle"]


@pytest.mark.parametrize("name", ["thesis", "parts/thesis"])
def test_a_file_that_comes_while_the_old_bundle_is_deleted_stays(name, compiled, other, tmp_path, monkeypatch):
    """Only what the bundle lists is deleted of it."""
    compiled.save(tmp_path / "bundle")
    of, looks = place._names, []

    def late(path):
        found = of(path)
        looks.append(path)
        if looks.count(path) == 2:  # as the look before it is deleted
            (path / name).write_text("years of work")
        return found

    monkeypatch.setattr(place, "_names", late)
    with pytest.warns(bk.BackendKwargsWarning, match="the old one cannot be deleted"):
        other.save(tmp_path / "bundle")
    assert holds(tmp_path / "bundle", other)
    assert [each.read_text() for each in tmp_path.rglob("thesis")] == ["years of work"]


def test_what_a_kill_leaves_before_the_manifest_has_its_name_is_deleted(compiled, tmp_path):
    left = tmp_path / f"{place._beside(tmp_path / 'bundle')}{'0' * 16}"
    for each in ("parts", "signatures"):
        (left / each).mkdir(parents=True)
        (left / each / "ab").touch()
    (left / f"{BESIDE}{'0' * 16}").touch()
    compiled.save(tmp_path / "bundle")
    assert names(tmp_path) == ["bundle"]


def killed_in_place(each, bundle):
    """Save in a process that ends when the new bundle is in place, before the old one is deleted."""
    child = os.fork()
    if not child:
        sync = place._sync
        place._sync = lambda *folders: os._exit(9) if folders == (bundle.parent,) else sync(*folders)
        each.save(bundle)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_bundle_that_is_removed_does_not_come_back(compiled, other, tmp_path):
    """What a kill has left of the old bundle is never loaded, and the next save deletes it."""
    compiled.save(tmp_path / "bundle")
    killed_in_place(other, tmp_path / "bundle")
    assert holds(tmp_path / "bundle", other)
    assert len(names(tmp_path)) == 2
    shutil.rmtree(tmp_path / "bundle")
    with pytest.raises(BackendKwargsError, match=r"^No bundle at"):
        CompiledModule.load(tmp_path / "bundle", scaled())
    other.save(tmp_path / "bundle")
    assert names(tmp_path) == ["bundle"]


def test_an_old_bundle_that_stays_is_named(compiled, other, tmp_path, monkeypatch):
    compiled.save(tmp_path / "bundle")
    remove = place._remove
    monkeypatch.setattr(place, "_remove", lambda path: (path / "manifest.json").exists() or remove(path))
    with pytest.warns(bk.BackendKwargsWarning) as warned:
        other.save(tmp_path / "bundle")
    (left,) = set(names(tmp_path)) - {"bundle"}
    assert str(warned[0].message) == (
        f"Bundle {str(tmp_path / 'bundle')!r} is saved; the old one cannot be deleted: {str(tmp_path / left)!r} stays."
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may delete everything")
def test_a_bundle_with_folders_that_are_read_only_is_replaced(compiled, other, tmp_path):
    compiled.save(tmp_path / "bundle")
    (tmp_path / "bundle" / "parts").chmod(0o500)
    other.save(tmp_path / "bundle")
    assert names(tmp_path) == ["bundle"]


def test_a_reader_of_the_old_bundle_goes_on(compiled, other, tmp_path):
    """A part that is open, or a folder that is, is the old one's to its end."""
    compiled.save(tmp_path / "bundle")
    part = next((tmp_path / "bundle" / "parts").iterdir())
    content = part.read_bytes()
    with part.open("rb") as opened:
        other.save(tmp_path / "bundle")
        assert opened.read() == content


def test_writers_and_readers_at_once(compiled, other, tmp_path):
    """Threads that save and load one bundle get one of the two each time, and leave nothing else."""
    compiled.save(tmp_path / "bundle")
    errors = []

    def saves(each):
        try:
            for _ in range(15):
                each.save(tmp_path / "bundle")
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=saves, args=(each,)) for each in (compiled, other)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found = weight(tmp_path / "bundle")
        assert any(torch.equal(found, each._known().module.linear.weight) for each in (compiled, other))
    assert errors == []
    assert names(tmp_path) == ["bundle"]
