"""Servers, each started once for the tests of a process that ask for it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from tests.stores import servers

S = TypeVar("S", bound=servers.Server)


@contextmanager
def _running(start: Callable[[], S]) -> Iterator[S]:
    server = start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[servers.Postgres]:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with _running(servers.Postgres) as server:
        server.run(
            f"CREATE ROLE reader LOGIN PASSWORD '{servers.PASSWORD}'",
            f"CREATE ROLE counted SUPERUSER LOGIN PASSWORD '{servers.PASSWORD}'",  # whose sessions are counted
            "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
        )
        yield server


@pytest.fixture(scope="session")
def pgbouncer(postgres) -> Iterator[servers.PgBouncer]:
    with _running(lambda: servers.PgBouncer(postgres)) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[servers.Redis]:
    pytest.importorskip("redis", reason="redis is not installed")
    with _running(servers.Redis) as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[servers.S3]:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    with _running(servers.S3) as server:
        yield server


@pytest.fixture
def no_file_systems():
    """Let fsspec forget the file systems that it keeps for each URL: they keep the server of an earlier test."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3(s3_server, no_file_systems, monkeypatch) -> str:
    """Return the URL of a new bucket."""
    import boto3

    for name, value in s3_server.variables().items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{servers.free_port()}"
    client = boto3.client("s3")
    client.create_bucket(Bucket=bucket)
    client.close()
    return f"s3://{bucket}/prefix"


@pytest.fixture
def url(kind, request, tmp_path):
    """Return the text that names an empty store."""
    if kind == "folder":
        return str(tmp_path / "store")
    if kind == "file":
        return (tmp_path / "store").as_uri()
    if kind == "memory":
        return f"memory://store-{os.urandom(8).hex()}"
    if kind in ("postgres", "pgbouncer"):
        server = request.getfixturevalue(kind)
        request.getfixturevalue("postgres").run("DROP TABLE IF EXISTS backend_kwargs_documents")
        return server.url()
    if kind == "redis":
        server = request.getfixturevalue("redis_server")
        server.client().flushall()
        return server.url()
    return request.getfixturevalue("s3")
