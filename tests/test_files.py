import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.files import check_writable, retried, write_whole

# A process may limit the size of the files it writes; past it a write fails part-way, as on a full disk.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from backend_kwargs.files import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_whole(Path(sys.argv[1]), "x" * 100_000)
except ValueError as error:
    print(error)
"""


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_writes(tmp_path):
    """The file contains the text, is readable by all, and no other file is left."""
    write_whole(tmp_path / "a.json", "ä\n")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "ä\n"
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o644
    assert names(tmp_path) == ["a.json"]


def test_replaces(tmp_path):
    """An existing file is replaced as a whole, so a reader that has it open keeps the old text."""
    path = tmp_path / "a.json"
    path.write_text("old text")
    with path.open() as reader:
        write_whole(path, "new")
        assert (reader.read(), path.read_text()) == ("old text", "new")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("missing/a.json", "No such file or directory", id="no-directory"),
        pytest.param("file/a.json", "Not a directory", id="file-for-directory"),
        pytest.param("directory", "Is a directory", id="directory-in-place"),
    ],
)
def test_refuses(tmp_path, name, reason):
    """A failed write is reported in one line, and leaves nothing behind."""
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    with pytest.raises(BackendKwargsError) as e:
        write_whole(tmp_path / name, "text")
    assert str(e.value) == f"Cannot write {str(tmp_path / name)!r}: {reason}."
    assert names(tmp_path) == ["directory", "file"]


def test_unwritable_directory():
    """A directory that accepts no files, even from root, is reported in one line."""
    with pytest.raises(BackendKwargsError) as e:
        write_whole(Path("/proc/a.json"), "text")
    assert str(e.value) == "Cannot write '/proc/a.json': No such file or directory."


def test_full_disk_leaves_the_old_file(tmp_path):
    """A write that fails half-way is reported, keeps the old file and leaves nothing else."""
    path = tmp_path / "a.json"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", FULL_DISK, path], capture_output=True, text=True, check=True)
    assert done.stdout == f"Cannot write {str(path)!r}: File too large.\n"
    assert (path.read_text(), names(tmp_path)) == ("old", ["a.json"])


def refused(path):
    with pytest.raises(BackendKwargsError) as e:
        write_whole(path, "text")
    return str(e.value)


def device(path):
    if os.geteuid():
        pytest.skip("only root makes devices")
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def listening(path):
    with socket.socket(socket.AF_UNIX) as each:
        each.bind(str(path))


@pytest.mark.parametrize("make", [os.mkfifo, device, listening], ids=["pipe", "device", "socket"])
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "by a link"])
def test_only_regular_files_are_replaced(make, linked, tmp_path, monkeypatch):
    """What is no file stays as it is, and nobody waits for a reader of a pipe."""
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    path = Path("thing")
    make(path)
    before = path.lstat()
    if linked:
        Path("link").symlink_to("thing")
        path = Path("link")
    message = f"Cannot write {str(path)!r}: it is not a regular file; name another."
    assert refused(path) == message
    with pytest.raises(BackendKwargsError) as e:
        check_writable(path)
    assert str(e.value) == message
    assert Path("thing").lstat() == before


def test_an_open_file_without_a_name_is_refused(tmp_path):
    """/dev/stdout may lead to one."""
    path = tmp_path / "a.json"
    with path.open("w") as opened:
        path.unlink()
        path = Path(f"/proc/self/fd/{opened.fileno()}")
        assert refused(path) in {
            f"Cannot write {str(path)!r}: it is not a regular file; name another.",
            f"Cannot write {str(path)!r}: No such file or directory.",
        }


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux has /proc")
@pytest.mark.parametrize("through", ["/proc/self/fd", "/dev/fd", "link", "../proc/self/fd"])
def test_an_open_file_is_not_replaced(through, tmp_path):
    """What a process writes to its standard output later would be lost, also if that is a file with a name."""
    path = tmp_path / "a.json"
    with path.open("w") as opened:
        (tmp_path / "link").symlink_to("/dev/fd")
        place = Path("/dev" if through[0] == "." else tmp_path, through, str(opened.fileno()))
        message = f"Cannot write {str(place)!r}: it is not a regular file; name another."
        assert refused(place) == message
        opened.write("whole")
    assert path.read_text() == "whole"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="this system has no /dev/shm")
def test_a_file_in_memory_is_written():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "link").symlink_to("a.json")
        write_whole(Path(folder) / "link", "new")
        assert (Path(folder) / "a.json").read_text() == "new"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_one(exists, tmp_path):
    (tmp_path / "folder").mkdir()
    if exists:
        (tmp_path / "folder" / "a.json").write_text("old")
    (tmp_path / "link").symlink_to("folder/a.json")
    (tmp_path / "link2").symlink_to("link")
    write_whole(tmp_path / "link2", "new")
    assert (tmp_path / "link").readlink() == Path("folder/a.json")
    assert (tmp_path / "link2").readlink() == Path("link")
    assert (tmp_path / "folder" / "a.json").read_text() == "new"
    assert names(tmp_path / "folder") == ["a.json"]


def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert refused(tmp_path / "a") == f"Cannot write {str(tmp_path / 'a')!r}: Too many levels of symbolic links."


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_a_file_keeps_its_mode(mode, tmp_path):
    path = tmp_path / "a.json"
    path.touch()
    path.chmod(mode)
    write_whole(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o002, 0])
def test_a_new_file_has_the_mode_that_the_umask_permits(mask, tmp_path):
    old = os.umask(mask)
    try:
        write_whole(tmp_path / "a.json", "new")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o666 & ~mask


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes to files of others")
def test_a_file_keeps_its_owner(tmp_path):
    path = tmp_path / "a.json"
    path.touch()
    os.chown(path, 65534, 65534)
    write_whole(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every file")
def test_a_file_that_is_read_only_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.touch(mode=0o444)
    assert refused(path) == f"Cannot write {str(path)!r}: Permission denied."


@pytest.mark.parametrize("size", [250, 255])
def test_a_long_name(size, tmp_path):
    write_whole(tmp_path / ("a" * size), "new")
    assert names(tmp_path) == ["a" * size]


NULL = "embedded null byte" if sys.version_info < (3, 13) else "lstat: embedded null character in path"


@pytest.mark.parametrize(
    ("name", "reason"),
    [pytest.param("a" * 256, "File name too long", id="long"), pytest.param("a\0", NULL, id="null")],
)
def test_a_name_that_no_file_can_have_is_refused(name, reason, tmp_path):
    assert refused(tmp_path / name) == f"Cannot write {str(tmp_path / name)!r}: {reason}."
    assert names(tmp_path) == []


def test_a_pause_is_asked_for_after_a_failure():
    """So that no attempt begins where the pauses have ended meanwhile, as at a deadline."""
    seen = []
    pauses = (seen.append("pause") or 0.0 for _ in range(2))
    with pytest.raises(OSError, match="nowhere"):
        retried(lambda: seen.append("attempt") or Path("/nowhere").stat(), lambda error: True, pauses)
    assert seen == ["attempt", "pause", "attempt", "pause", "attempt"]
