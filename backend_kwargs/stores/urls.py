"""URLs of stores: what is shown of one, and what must not be."""

import re
from urllib.parse import parse_qsl, unquote, urlsplit

from backend_kwargs.errors import LONGEST_SAYING, BackendKwargsError, printable, shortened

_URL = re.compile(
    r"(?P<scheme>[a-z0-9+.:-]+)://(?:(?P<login>[^@/?#]*)@)?(?P<hosts>[^@/?#]*)(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?",
    re.IGNORECASE,
)
_CHAIN = re.compile(r"(?:[a-z0-9+.-]+::)*", re.IGNORECASE)  # fsspec's, before what it reads
_ESCAPED = re.compile(r"(?:[^%]|%[0-9A-Fa-f]{2})*")
SECRET = re.compile(r"pass|secret|token|key|credential|sig", re.IGNORECASE)
HIDDEN = "***"


def label_of(url: str) -> str:
    """Return `url` without user, password and parameters; raise if it is unclear where a password ends."""
    found = _URL.fullmatch(url)
    # The rest of a password that contains "/" or "?" is in the path or the query, with the "@" after it.
    if (
        not found
        or not _ESCAPED.fullmatch(found["login"] or "")
        or (":" in found["hosts"] and "@" in f"{found['path']}{found['query']}")
    ):
        raise unclear()
    return f"{found['scheme']}://{found['hosts']}{found['path'] or ''}"


def unclear() -> BackendKwargsError:
    """Return the error for a text that may contain a password, nobody knows where."""
    return BackendKwargsError(
        "A store's URL must be SCHEME://USER:PASSWORD@HOST/NAME, with @ : / ? # % of the user and the password "
        "written as %40 %3A %2F %3F %23 %25. The one given is not shown: it may contain a password."
    )


def secrets_of(url: str) -> set[str]:
    """Return the passwords in a URL, as written and as they are read."""
    url = _CHAIN.sub("", url, count=1)
    try:
        parts = urlsplit(url)
        found = [parts.password] if parts.password else []
        found += [value for name, value in parse_qsl(parts.query) if SECRET.search(name) and value]
        # As it is written, which a client that cannot read it says.
        pairs = [each.partition("=") for each in parts.query.split("&")]
        found += [value for name, _, value in pairs if SECRET.search(unquote(name)) and value]
    except ValueError:
        found = [url.partition("://")[2]]
    return {form for each in found for form in (each, unquote(each))}


def without_secrets(error: BaseException, url: str) -> str:
    """Return the error of a client library as one line, without the passwords in `url`."""
    text = " ".join(str(error).split())
    for secret in sorted(secrets_of(url), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)  # before it is shortened, which may cut a password
    if isinstance(error, BackendKwargsError):
        return printable(text)
    text = shortened(printable(text), LONGEST_SAYING)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def failure(label: str, url: str, error: BaseException) -> BackendKwargsError:
    """Return the error of a client library as one of this package."""
    why = without_secrets(error, url)
    return BackendKwargsError(f"Store {label!r} failed: {why}{'' if why.endswith(('.', '?')) else '.'}")
