"""Private folders: who may enter them, and what is left of them after forks, signals and kills."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from backend_kwargs import BackendKwargsError
from backend_kwargs.bundles.disk.place import private_folder
from backend_kwargs.files import opened_file

ROOT = str(Path(__file__).parents[2])

# A process that has a folder of its own, says so, and goes on until it is told to end.
HOLDER = """
    import sys
    from backend_kwargs.bundles.disk.place import private_folder

    with private_folder() as folder:
        print(folder, flush=True)
        sys.stdin.readline()
"""


def names(path):
    return sorted(each.name for each in path.iterdir())


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files of this test alone."""
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def started(program, temporary, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": ROOT, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


def test_only_its_user_may_enter_it(temporary):
    with private_folder() as path:
        assert path.parent == temporary
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert names(temporary) == []


def test_a_name_that_somebody_has_taken_is_not_used(temporary):
    """A folder that stands at the name is neither entered nor removed."""
    with private_folder(name="a" * 16) as path:
        (path / "part").write_text("theirs")
        with private_folder(name="a" * 16) as other:
            assert other != path
        assert (path / "part").read_text() == "theirs"


def test_a_forked_child_leaves_the_folder_of_its_parent(temporary):
    """The child ends as Python does, with its exit handlers; the parent's folder stays, and is locked."""
    program = """
        import os, sys
        from backend_kwargs.bundles.disk.place import private_folder

        with private_folder() as folder:
            if os.fork() == 0:
                sys.exit()
            os.wait()
            left = len(os.listdir(sys.argv[1]))
            with private_folder() as other:
                print(left, other.exists(), folder.exists())
    """
    process, said = started(program, temporary, temporary)
    process.communicate()
    assert said == "1 True True"
    assert names(temporary) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_folder_of_a_killed_process_is_removed_by_the_next(number, temporary):
    """Python ends without its exit handlers; nobody holds the lock on the folder any more."""
    process, path = started(HOLDER, temporary)
    with private_folder():
        assert Path(path).exists()
    process.send_signal(number)
    process.communicate()
    assert Path(path).exists()
    with private_folder() as own:
        assert [*temporary.iterdir()] == [own]


@pytest.mark.parametrize(
    "name", ["backend_kwargs.unpacked-mine", "backend_kwargs.unpacked-" + "0" * 17, "backend_kwargs_abcdefgh"]
)
def test_folders_of_other_names_are_left(name, temporary):
    (temporary / name).mkdir(mode=0o700)
    with private_folder():
        pass
    assert names(temporary) == [name]


def test_a_link_of_such_a_name_is_left(temporary, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "thesis").write_text("years of work")
    (temporary / ("backend_kwargs.unpacked-" + "0" * 16)).symlink_to(home)
    with private_folder():
        pass
    assert (home / "thesis").read_text() == "years of work"


def test_a_folder_that_others_can_replace_is_refused(temporary):
    """A folder for everybody must have the sticky bit, as /tmp has."""
    temporary.chmod(0o777)
    with pytest.raises(BackendKwargsError) as raised, private_folder():
        pass
    assert str(raised.value) == (
        f"The temporary folder {str(temporary)!r} is not safe, since everybody can rename what is in "
        f"{str(temporary)!r}: set TMPDIR to a folder of your own."
    )
    temporary.chmod(0o1777)
    with private_folder():
        pass


def test_without_a_temporary_folder_the_error_is_one_line(monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    with pytest.raises(BackendKwargsError) as raised, private_folder():
        pass
    assert str(raised.value) == "No temporary folder can be written to: set TMPDIR to one that can."


def test_a_parent_that_is_missing_is_named(temporary):
    with pytest.raises(BackendKwargsError) as raised, private_folder(temporary / "none"):
        pass
    assert str(raised.value) == f"Cannot make a folder in {str(temporary / 'none')!r}: No such file or directory."


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
def test_what_is_no_regular_file_is_not_opened(make, temporary):
    make(temporary / "file")
    with pytest.raises(OSError, match="it is not a regular file"), opened_file(temporary / "file"):
        pass


SERVES = """
    import os, sys
    import torch
    import backend_kwargs as bk
    from tests.bundles.small_module import scaled

    served = bk.CompiledModule.load(sys.argv[1], scaled(), trust=True)
    served.deploy()
    served(torch.randn(4, 8))
    print(sorted(name for name in os.listdir(os.environ["TMPDIR"]) if "unpacked" in name), flush=True)
    sys.stdin.readline()
"""


def test_a_process_that_serves_has_no_files(bundle_with_code, temporary):
    """Code is loaded from files that are removed at once, so that a signal leaves none."""
    process, listed = started(SERVES, temporary, bundle_with_code)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert listed == "[]"
    assert [name for name in names(temporary) if "backend_kwargs" in name] == []
