"""`Store`: a place with how long to wait for it, and whom to trust there, as a value."""

import json
import math
import pickle
from pathlib import Path

import pytest

from backend_kwargs import Backend, BackendKwargsError, Store, make_backend

SAID = {"connect_s": 1, "lookup_s": 0.1, "label": "team", "min_generation": 2}
STORES = [
    pytest.param(Store(), "Store()", id="the user's own"),
    pytest.param(Store(Path("a")), "Store('a')", id="a folder"),
    pytest.param(
        Store("redis://host/0", **SAID),
        "Store('redis://host/0', connect_s=1.0, lookup_s=0.1, label='team', min_generation=2)",
        id="a URL",
    ),
]


@pytest.mark.parametrize(("store", "expression"), STORES)
def test_it_is_a_value(store, expression):
    """It is what its repr makes, equal to a copy, and as good a key."""
    assert repr(store) == expression
    for other in (eval(expression), pickle.loads(pickle.dumps(store)), Store.of(store.given)):
        assert (other == store, hash(other) == hash(store), other != Store("other")) == (True, True, True)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in a list"])
def test_a_backend_with_it_is_written_and_read(alone, monkeypatch, tmp_path):
    """A pickle, a config, its JSON, and the repr give an equal backend."""
    monkeypatch.chdir(tmp_path)
    Path("a.pem").touch()
    store = Store("a", **SAID, signing_key="a.pem", trusted_keys=["a.pem"])
    backend = make_backend("tmpl-inductor:auto", store=store if alone else ["b", store])
    assert backend.options["store"] == (store if alone else ["b", store])
    written = json.loads(json.dumps(backend.to_config()))
    for read in (
        pickle.loads(pickle.dumps(backend)),
        eval(repr(backend)),
        Backend.from_config(written, trust=True),
        make_backend("tmpl-inductor:auto", **written["options"]),
    ):
        assert (read, hash(read)) == (backend, hash(backend))


def test_a_key_object_is_shared_and_not_written():
    """As an option, a key of the package cryptography stays what it is; a config cannot hold it."""
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    store = Store("a", signing_key=ed25519.Ed25519PrivateKey.generate())
    backend = make_backend("tmpl-inductor:auto", store=store)
    assert backend.options["store"] is store
    with pytest.raises(BackendKwargsError, match=r"^Option 'store' cannot be written: Store"):
        backend.to_config()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(
            {"connect_s": math.inf},
            "Store's 'connect_s' must be float of at least 0, but finite, got inf (float).",
            id="endless",
        ),
        pytest.param(
            {"signing_key": 3},
            "Store's 'signing_key' must be an Ed25519 private key, or the path of its PEM file, got 3 (int).",
            id="no private key",
        ),
        pytest.param(
            {"trusted_keys": ["a.pem", b""]},
            "Each of Store's 'trusted_keys' must be an Ed25519 public key, or the path of its PEM file, got b'' "
            "(bytes).",
            id="no public key",
        ),
        pytest.param({"ur": "a"}, "Unknown argument of Store: 'ur'. Did you mean 'url'?", id="name"),
    ],
)
def test_refused(given, message):
    """A wrong value is one line, which shows no password, when the value is made or read."""
    with pytest.raises(BackendKwargsError) as raised:
        Store.of(given)
    assert str(raised.value) == message
    with pytest.raises(BackendKwargsError) as raised:
        make_backend("tmpl-inductor:auto", store=["b", given])
    assert str(raised.value) == message
