"""Servers reached under TLS, whose certificate the client checks."""

import warnings

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.auto.process_memory import nothing_decided
from backend_kwargs.stores import postgres, redis
from tests.stores import servers
from tests.stores.servers.certificates import certify

DRIVERS = {
    "postgres": (postgres, servers.Postgres, "?sslmode=verify-full&sslrootcert="),
    "redis": (redis, servers.Redis, "?ssl_ca_certs="),
}
WHY = {
    ("postgres", "issuer"): "SSL error: certificate verify failed",
    ("postgres", "host"): 'does not match host name "localhost"',
    ("redis", "issuer"): "certificate verify failed: self-signed certificate",
    ("redis", "host"): "Hostname mismatch, certificate is not valid for 'localhost'.",
}


@pytest.fixture(scope="module", params=DRIVERS)
def kind(request):
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    pytest.importorskip({"postgres": "psycopg", "redis": "redis"}[request.param])
    return request.param


@pytest.fixture(scope="module")
def server(kind):
    started = DRIVERS[kind][1](tls=True)
    yield started
    started.close()


def test_a_certificate_that_is_trusted(kind, server):
    """The driver reads and writes where the certificate is trusted and is for the server's address."""
    driver, _, trusting = DRIVERS[kind]
    store = driver.open(f"{server.url()}{trusting}{server.folder / 'cert.pem'}")
    store.put("a/b", b"1")
    assert store.get("a/b") == b"1"
    store.close()


@pytest.mark.parametrize("wrong", ["issuer", "host"])
def test_a_certificate_that_is_wrong(kind, server, wrong, tmp_path, monkeypatch):
    """A certificate of another issuer or for another host is one warning that says so, and the compile goes on."""
    url = f"{server.url()}{DRIVERS[kind][2]}{certify(tmp_path) if wrong == 'issuer' else server.folder / 'cert.pem'}"
    host = "127.0.0.1" if wrong == "issuer" else "localhost"
    monkeypatch.setenv("OF_TLS", url.replace("127.0.0.1", host))
    backend = bk.make_backend("tmpl-inductor:auto", race="never", store=bk.Store("env:OF_TLS", connect_s=60.0))
    torch.compiler.reset()
    x = torch.ones(4)
    with nothing_decided(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(torch.compile(lambda x: x + 1, backend=backend)(x), x + 1)
    (text,) = [str(each.message) for each in caught if issubclass(each.category, bk.BackendKwargsWarning)]
    assert text.startswith(f"Store '{url.partition('//')[0]}//{host}:{server.port}/")
    assert "cannot be read: " in text
    assert WHY[kind, wrong] in text
    assert "Zebra" not in text
    assert text.endswith(" It is left out, and tried again for later graphs.")
