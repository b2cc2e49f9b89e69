import stat
import subprocess
import sys
from pathlib import Path

import pytest

from backend_kwargs.atomic_write import write_whole
from backend_kwargs.errors import BackendKwargsError

# A process may limit the size of the files it writes; past it a write fails part-way, as on a full disk.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from backend_kwargs.atomic_write import write_whole
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
        pytest.param("missing/a.json", "there is no directory '{0}/missing'", id="no-directory"),
        pytest.param("file/a.json", "Not a directory", id="file-for-directory"),
        pytest.param("directory", "it is a directory", id="directory-in-place"),
    ],
)
def test_refuses(tmp_path, name, reason):
    """A failed write is reported in one line, and leaves nothing behind."""
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    with pytest.raises(BackendKwargsError) as e:
        write_whole(tmp_path / name, "text")
    assert str(e.value) == f"Cannot write {str(tmp_path / name)!r}: {reason.format(tmp_path)}."
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
