"""Documents as strings of Redis, with a sorted set of their names, which finds those that begin with a prefix."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.stores.connections import AT_ONCE, LIMIT_S, Server
from backend_kwargs.stores.documents import LARGEST, check_content, check_name, is_name
from backend_kwargs.stores.urls import label_of

NAMES = "backend-kwargs:names"
DOCUMENT = "backend-kwargs:document:"
_ANY = "surrogateescape"  # bytes that are no text: nothing of ours
_CLAIM = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) or redis.call('GET', KEYS[1]) == ARGV[1]
    and redis.call('PTTL', KEYS[1]) > 0 and redis.call('PEXPIRE', KEYS[1], ARGV[2]) then
  redis.call('ZADD', KEYS[2], 0, ARGV[3])
  return 1
end
return 0"""
_RENEW = """
return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('PTTL', KEYS[1]) > 0
    and redis.call('PEXPIRE', KEYS[1], ARGV[2]) or 0"""
# Only if it is still missing: another process may have put it since.
_UNLIST = """
for at = 2, #KEYS do
  if redis.call('EXISTS', KEYS[at]) == 0 then redis.call('ZREM', KEYS[1], ARGV[at - 1]) end
end"""


def open(url: str, limit_s: float = LIMIT_S) -> "Redis":  # noqa: A001 - the drivers' common name
    """Return the store at `url`, whose calls take about `limit_s` seconds at most; nothing is connected yet."""
    path = urlsplit(url).path.strip("/")
    if path and not path.isdecimal():  # redis-py would take database 0
        raise BackendKwargsError(f"The path of store {label_of(url)!r} must be the number of a database, such as 0.")
    return Redis(url, label_of(url), limit_s)


class Redis(Server[Any]):
    """A store of a string for each document, and the set of their names."""

    def get(self, name: str) -> bytes | None:
        """Return the document, None if there is none."""
        key = DOCUMENT + check_name(name)

        def run(client: Any) -> bytes | None:
            with client.pipeline(transaction=False) as pipeline:
                document, place = pipeline.getrange(key, 0, LARGEST).zscore(NAMES, name).execute()
            if document and place is None:
                with suppress(Exception):  # of one who may only read
                    client.zadd(NAMES, {name: 0})
            return document if 0 < len(document) <= LARGEST else None

        return self.call(run)

    def put(self, name: str, document: bytes) -> None:
        """Keep `document` in place of any other; it is as safe as the server's `appendfsync` says when this returns."""
        key = DOCUMENT + check_name(name)
        check_content(document)
        self.call(lambda client: client.pipeline(transaction=True).set(key, document).zadd(NAMES, {name: 0}).execute())

    def forget(self, name: str) -> None:
        """Remove the document if there is one."""
        key = DOCUMENT + check_name(name)
        self.call(lambda client: client.pipeline(transaction=True).delete(key).zrem(NAMES, name).execute())

    def claim(self, name: str, document: bytes, lease_s: float) -> bool:
        """Put `document` unless another one is there whose lease runs, by the server's clock; return whether it was."""
        return self._leased(_CLAIM, name, document, lease_s)

    def renew(self, name: str, document: bytes, lease_s: float) -> bool:
        """Extend the lease if the document there is still `document`; return whether it was."""
        return self._leased(_RENEW, name, document, lease_s)

    def _leased(self, script: str, name: str, document: bytes, lease_s: float) -> bool:
        given = DOCUMENT + check_name(name), NAMES, check_content(document), max(1, int(lease_s * 1000)), name
        return bool(self.call(lambda client: client.eval(script, 2, *given)))

    def _page(self, begin: str, end: str) -> tuple[Iterable[tuple[str, bytes]], str | None]:
        """Return some names and documents; names without documents, as of claims that ended, are taken off the list."""

        def run(client: Any) -> tuple[list[tuple[str, bytes]], str | None]:
            ends = f"[{begin}".encode(errors=_ANY), f"({end}"
            listed = [each.decode(errors=_ANY) for each in client.zrangebylex(NAMES, *ends, start=0, num=AT_ONCE)]
            names = [name for name in listed if is_name(name)]
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.getrange(DOCUMENT + name, 0, LARGEST)
            documents = dict(zip(names, pipeline.execute(), strict=True))
            if missing := [name for name, document in documents.items() if not document]:
                with suppress(Exception):  # of one who may only read
                    client.eval(_UNLIST, 1 + len(missing), NAMES, *(DOCUMENT + name for name in missing), *missing)
            found = [(name, document) for name, document in documents.items() if 0 < len(document) <= LARGEST]
            return found, listed[-1] if len(listed) == AT_ONCE else None

        return self.call(run)

    def _connect(self, url: str, left_s: float) -> Any:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        # redis-py before 6 does not compare the certificate's host with the server's.
        checked = {"ssl_check_hostname": True} if url.startswith("rediss://") else {}
        client = redis.Redis.from_url(
            url,
            **checked,
            socket_connect_timeout=left_s,
            socket_timeout=left_s,
            retry=Retry(NoBackoff(), 0),
            single_connection_client=True,
            decode_responses=False,
        )
        client.ping()
        return client

    @staticmethod
    def _interrupt(client: Any) -> None:
        if (connection := client.connection) is not None:
            connection.disconnect()  # drops the socket, which ends a call that waits for it
