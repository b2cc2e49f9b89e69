"""What is shown of a store's URL, and what is not."""

import json
import subprocess
import sys

import pytest

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.registry import make_backend
from backend_kwargs.stores.opening import open_store, place_in_variable
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
    """An error of a client library is one line without the password, however long, in both ways of writing it."""
    url = "postgresql://user:p%40ss@host/db?sslpassword=other"
    error = failure("label", url, RuntimeError("a p@ss and p%40ss\nand other " + "x" * 185 + "p@ss"))
    assert str(error) == f"Store 'label' failed: RuntimeError: a *** and *** and *** {'x' * 175}..."


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        pytest.param("redis://u:pw@host", {"pw"}, id="a password"),
        pytest.param("redis://u:p%40w@host", {"p%40w", "p@w"}, id="escaped"),
        pytest.param("redis://u@host", set(), id="a user alone"),
        pytest.param("redis://u:@host", set(), id="an empty password"),
        pytest.param("a::b::s3://u:pw@host", {"pw"}, id="chained twice"),
        pytest.param("postgresql:///db?PASSWORD=one&sslKey=two&user=u", {"one", "two"}, id="in other case"),
        pytest.param("postgresql:///db?password=&user=u", set(), id="an empty one in a query"),
        pytest.param("postgresql:///db?password=a%20b", {"a b", "a%20b"}, id="escaped in a query"),
        pytest.param("postgresql:///db?password=p%40s%zz", {"p%40s%zz", "p@s%zz"}, id="escaped wrongly in a query"),
        pytest.param("s3://b/p?X-Amz-Signature=s&X-Amz-Date=d", {"s"}, id="a signature"),
        pytest.param("redis://[u:pw@host", {"[u:pw@host"}, id="no URL"),
    ],
)
def test_which_parts_are_secret(url, secrets):
    """Passwords, and parameters that are named like one; of what cannot be read, all of it."""
    assert secrets_of(url) == secrets


@pytest.mark.parametrize("given", ["", " ", "\n"], ids=["nothing", "a blank", "a line"])
def test_an_empty_text_is_no_store(given):
    """A variable of a shell that is not set does not make the current folder a store, wherever it is named."""
    message = f"A store must be a folder, a URL or 'env:NAME', got {given.strip()!r} (str)."
    for name in (open_store, lambda store: make_backend("tmpl-inductor:auto", store=store)):
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
