"""What is shown of a store's URL, and what is not."""

import json
import subprocess
import sys
from urllib.parse import unquote

import pytest

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.registry import make_backend
from backend_kwargs.stores.opening import opened, place_in_variable
from backend_kwargs.stores.urls import failure, label_of, secrets_of

UNCLEAR = (
    "A store's URL must be SCHEME://USER:PASSWORD@HOST/NAME, with @ : / ? # % of the user and the password "
    "written as %40 %3A %2F %3F %23 %25. The one given is not shown: it may contain a password."
)


@pytest.mark.parametrize(
    ("url", "label"),
    [
        pytest.param("postgresql://u:pw@host:5432/db?sslmode=require", "postgresql://host:5432/db", id="postgresql"),
        pytest.param("postgresql://u:p%40%2F@a:1,b:2/db", "postgresql://a:1,b:2/db", id="two-hosts"),
        pytest.param("postgresql:///db?host=/run/postgresql&password=pw", "postgresql:///db", id="password-in-query"),
        pytest.param("rediss://:pw@[::1]:6380/1", "rediss://[::1]:6380/1", id="no-user"),
        pytest.param("s3://bucket/some@place", "s3://bucket/some@place", id="at-sign-in-a-path"),
        pytest.param("simplecache::s3://bucket/p", "simplecache::s3://bucket/p", id="chained"),
        pytest.param("file:///tmp/x", "file:///tmp/x", id="file"),
        pytest.param("PostgreSQL://U:pw@Host/DB", "PostgreSQL://Host/DB", id="another-case"),
        pytest.param("redis://@host/0", "redis://host/0", id="an-empty-user"),
        pytest.param("redis://u:@host", "redis://host", id="an-empty-password"),
        pytest.param("redis://host?password=a&password=b", "redis://host", id="two-passwords-in-a-query"),
    ],
)
def test_label(url, label):
    """A label has neither user nor password nor parameters."""
    assert label_of(url) == label


@pytest.mark.parametrize("password", ["a@b", "a/b", "a?b", "a#b", "a%b", "12/34", "a/b@c", "x?y=z"])
@pytest.mark.parametrize("scheme", ["postgresql", "redis", "sftp"])
def test_a_password_that_is_not_escaped(scheme, password, monkeypatch):
    """Where a password's end is unclear, the URL is refused and not shown."""
    monkeypatch.setenv("STORE", f"{scheme}://user:{password}@host/db")
    with pytest.raises(BackendKwargsError) as e:
        place_in_variable("STORE")
    assert str(e.value) == UNCLEAR


def test_no_password_in_an_error():
    """An error of a client library is one line without the password, however long, in every way of writing it."""
    url = "postgresql://user:p%40ss+w@host/db?sslpassword=other  one"
    ways = "p@ss w, p%40ss+w, P%40SS%20W, p@ss%2bw\nand 'other  one' "
    error = failure("label", url, RuntimeError(ways + "x" * 130 + "p@ss+w"))
    assert str(error) == f"Store 'label' failed: RuntimeError: ***, ***, ***, *** and '*** ***' {'x' * 130}***."


def test_a_short_secret_hides_no_words():
    """It is hidden where it stands alone."""
    error = failure("label", "https://host/db?a=1&b=no", RuntimeError("Errno 111: no node, 1 of 1"))
    assert str(error) == "Store 'label' failed: RuntimeError: Errno 111: *** node, *** of ***."


# What each URL shows, where "S3cr3t" is secret.
SECRET = [
    "https://h/db?pwd=S3cr3t https://h/db",
    "https://h/db?sas=S3cr3t&x= https://h/db",
    "https://h/db?S3cr3t https://h/db",
    "https://h/db?sslmode=require;pwd=S3cr3t https://h/db",
    "postgresql:///db?user=u&p%61ss=S3cr3t postgresql:///db",
    "postgresql:///db?options=S3cr3t postgresql:///db",
    "redis://h:1/0;password=S3cr3t redis://h:1/0",
    "redis://h:1/0%3Bpassword%3DS3cr3t redis://h:1/0",
    "redis://h:1/0&password=S3cr3t redis://h:1/0",
    "postgresql://tuner:S3cr3t postgresql://tuner",
    "postgresql://tuner%3AS3cr3t/db postgresql://tuner/db",
    "postgresql://a:1,b:S3cr3t/db postgresql://a/db",
    "redis://[::1]:S3cr3t/0 redis://[::1]/0",
    "https://S3cr3t@h/db https://h/db",
    "https://S3cr3t:x-oauth-basic@h/db https://h/db",
    "HTTPS://u%3AS3cr3t@h/db HTTPS://h/db",
    "s3://S3cr3t@bucket/a s3://bucket/a",
    "simplecache::https://h/x?a=S3cr3t simplecache::https://h/x",
    "file://u:S3cr3t@/tmp/x file:///tmp/x",
]


@pytest.mark.parametrize("case", SECRET, ids=lambda case: case.split()[0])
def test_what_is_not_known_to_be_plain_is_secret(case, monkeypatch):
    """No label, repr or error shows it, also of a variable of the environment; a value that has it is refused."""
    url, label = case.split()
    assert label_of(url) == label
    assert "S3cr3t" in secrets_of(url)
    with pytest.raises(BackendKwargsError) as e:
        make_backend("tmpl-inductor", store=url)
    assert str(e.value).startswith(f"Store {label!r} must not contain a password: ")
    monkeypatch.setenv("STORE", url)
    place = place_in_variable("STORE")
    told = place.without_secrets(RuntimeError(f"no answer of {url} ({unquote(url)}), is s3cr3t a port?"))
    try:
        shown = repr(opened("env:STORE"))
    except BackendKwargsError as error:
        shown = str(error)
    assert "s3cr3t" not in f"{place!r} {told} {shown}".lower()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u@h:5432/db?sslmode=verify-full&sslrootcert=/etc/ca.pem",
        "postgresql:///db?host=/run/postgresql",
        "postgresql:///db?password=&user=u",
        "postgresql://%2Frun%2Fpostgresql/db",
        "postgresql://a:1,b:2/db?target_session_attrs=any",
        "postgresql:///db?fallback_application_name=a&krbsrvname=pg",
        "redis://h:6379/0?protocol=3&socket_timeout=1.5",
        "redis://h?max_connections=8&retry_on_timeout=1",
        "redis://:@h",
        "s3://bucket/some@place",
        "s3://bucket/date=2024/a&b",
        "abfs://container@account.dfs.core.windows.net/p",
        "sftp://me@h/p",
    ],
)
def test_what_is_known_to_be_plain_is_no_secret(url):
    """Ports, users of a database, and parameters that say how to connect may stand in a value."""
    assert secrets_of(url) == set()


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("https://h/db#S3cr3t", id="a-fragment"),
        pytest.param("https://S3cr3t/x@h/db", id="a-token-with-a-slash"),
        pytest.param("redis://u:p@S3cr3t@h", id="two-at-signs"),
        pytest.param("https://S3cr3t%40h/db", id="an-at-sign-that-is-escaped"),
        pytest.param("zip://a::https://u:S3cr3t@h/x", id="a-chain-behind-a-path"),
        pytest.param("s3://bucket/https://u:S3cr3t@h", id="a-url-in-a-path"),
        pytest.param("postgresql:///db?host=u:S3cr3t@h", id="a-login-in-a-query"),
    ],
)
def test_what_is_unclear_is_not_shown(url, monkeypatch):
    """Neither as a value nor of a variable of the environment."""
    assert secrets_of(url) == {url.partition("://")[2]}
    monkeypatch.setenv("STORE", url)
    for name in (url, "env:STORE"):
        with pytest.raises(BackendKwargsError) as e:
            opened(name)
        assert str(e.value) == UNCLEAR


@pytest.mark.parametrize("given", ["", " ", "\n"], ids=["nothing", "a blank", "a line"])
def test_an_empty_text_is_no_store(given):
    """A variable of a shell that is not set does not make the current folder a store, wherever it is named."""
    message = f"A store must be a folder, a URL or 'env:NAME', got {given.strip()!r} (str)."
    for name in (opened, lambda store: make_backend("tmpl-inductor:auto", store=store)):
        with pytest.raises(BackendKwargsError) as e:
            name(given)
        assert str(e.value) == message


def test_drivers_are_light():
    """Importing the drivers, and opening their stores, imports neither torch nor a client library."""
    code = """
import json, sys
from backend_kwargs.stores import objects, postgres, redis
postgres.open("postgresql://host/db"), redis.open("redis://host")
print(json.dumps([name for name in ("torch", "psycopg", "redis", "fsspec", "s3fs") if name in sys.modules]))
"""
    assert json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) == []
