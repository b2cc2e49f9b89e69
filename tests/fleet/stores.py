"""A store with claims in the memory of a test, whose server has its own clock; a unit's document as stores keep it."""

import json
import threading

from backend_kwargs.fleet.board import KIND, name_of
from backend_kwargs.stores.documents import Document, encoded


class Documents:
    """Documents in memory; `now` is the server's time, and `away` an error that each call raises."""

    label = "memory"

    def __init__(self):
        self.documents, self.leases, self.now, self.away = {}, {}, 0.0, None
        self.lock = threading.Lock()

    def _answer(self):
        if self.away:
            raise self.away

    def get(self, name):
        self._answer()
        return self.documents.get(name)

    def put(self, name, document):
        self._answer()
        self.documents[name] = document

    def list(self, prefix):
        self._answer()
        yield from [(name, each) for name, each in self.documents.items() if name.startswith(prefix)]

    def forget(self, name):
        self._answer()
        self.documents.pop(name, None)


class Claimed(Documents):
    """The same with claims."""

    def claim(self, name, document, lease_s):
        self._answer()
        with self.lock:
            if name in self.documents and self.leases[name] > self.now:
                return False
            self.documents[name], self.leases[name] = document, self.now + lease_s
            return True

    def renew(self, name, document, lease_s):
        self._answer()
        if self.documents.get(name) != document:
            return False
        self.leases[name] = self.now + lease_s
        return True


def store_file(path, url, **fields):
    """Write a file that names a store with its keys, as `--store` takes it, and return its path."""
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in {"url": url, **fields}.items()))
    return path


def written(document):
    """Return a unit's document as a store keeps it."""
    return encoded(KIND, Document(name_of(document.unit), document))
