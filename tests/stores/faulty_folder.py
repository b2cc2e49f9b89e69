"""A file system of a network disk, as a folder sees it: calls that fail although they did their work, or fail once."""

import errno
import os
import time
from contextlib import contextmanager
from pathlib import Path


class Listing(list):
    """What `os.scandir` returned some time ago."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class FaultyDisk:
    """One in `every` calls fails: a rename with ENOENT after it is done, opening with ESTALE. Listings are stale."""

    replace, open, scandir = Path.replace, staticmethod(os.open), staticmethod(os.scandir)

    def __init__(self, stale_s, every):
        self.stale_s, self.every = stale_s, every
        self.counts, self.listings = {"rename": 0, "open": 0}, {}

    def fails(self, name):
        self.counts[name] += 1
        return self.counts[name] % self.every == 0

    @property
    def rename(self):
        """A method of paths."""

        def replace(file, target):
            FaultyDisk.replace(file, target)
            if self.fails("rename"):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
            return Path(target)

        return replace

    def opened(self, path, flags, *args, **kwargs):
        if not flags & os.O_CREAT and str(path).endswith(".json") and self.fails("open"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return self.open(path, flags, *args, **kwargs)

    def listed(self, path):
        seen = self.listings.get(str(path))
        if seen is None or time.monotonic() - seen[0] > self.stale_s:
            with self.scandir(path) as found:
                self.listings[str(path)] = seen = time.monotonic(), Listing(found)
        return seen[1]


def refused(*_, **__):
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@contextmanager
def faulty(monkeypatch, *, stale_s=0.0, every=2):
    """Put all folders on such a disk, which has no links and no locks; yield how often it was called."""
    disk = FaultyDisk(stale_s, every)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", disk.rename)
        patch.setattr(os, "open", disk.opened)
        patch.setattr(os, "scandir", disk.listed)
        patch.setattr(os, "link", refused)
        patch.setattr("fcntl.flock", refused)
        yield disk.counts
