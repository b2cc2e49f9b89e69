"""URLs of stores: scheme, host and path are shown of one; all else may be secret.

Which part of a URL is a password depends on who reads it. So whatever is not known to be none is one.
"""

import json
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote

from backend_kwargs.errors import LONGEST_SAYING, BackendKwargsError, printable, shortened

ENV, NAME = "env:", re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
URL = re.compile(r"(?P<chain>(?:[a-z0-9+.-]+::)*)(?P<scheme>[a-z][a-z0-9+.-]+)://", re.IGNORECASE)
# What is no URL, but no folder either.
UNCLEAR = re.compile(
    r"""://|^[a-z][a-z0-9+.-]+:/  # jdbc:postgresql://..., redis:/...
    |^(?![a-z]:[\\/])(?://)?[^/]*:.*@  # user:password@host
    # password=..., but not as a folder in another one: data/key=1
    |(?:^|[^\w.%/-])[\w.%-]*(?:pass(?:w(?:or)?d)?|pwd|secret|token|key|credentials?|sig(?:nature)?|sas|auth)\s*=
    |[?&;]\s*[\w.%-]+\s*=|^\s*\w+\s*=\s*\S+\s+\w+\s*=  # host/db?name=..., host=... name=...""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)
_COLON = "(?::|%3a)"
_BRACKETS = r"\[[0-9a-f:.]+\]"
_URL = re.compile(
    r"(?:[a-z0-9+.-]+::)*(?P<scheme>[a-z][a-z0-9+.-]*)://"  # with fsspec's chain before what it reads
    rf"(?:(?P<user>[^@/?#]*?)(?:{_COLON}(?P<password>[^@/?#]*))?@)?(?P<hosts>[^@/?#]*)"
    r"(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?",
    re.IGNORECASE,
)
_ESCAPED = re.compile(r"(?:[^%]|%[0-9A-Fa-f]{2})*")
_PORTS = re.compile(rf"(?:{_BRACKETS}|(?:(?!{_COLON})[^\[\],])*)(?::[0-9]{{0,5}})?(?:,|\Z)", re.IGNORECASE)
_HOST = re.compile(rf"({_BRACKETS}|.*?)(?:{_COLON}(.*))?", re.IGNORECASE | re.DOTALL)
# Where a path ends and parameters begin, in whatever way a client or a hurried hand writes them.
_PARAMETERS = re.compile(r"(?:;|%3b).*|(?:[&\s]|%26|%3f|%20)[^/]*?(?:=|%3d).*", re.IGNORECASE | re.DOTALL)
_BETWEEN = re.compile(r"[&;?\s]|%26|%3b|%3f|%20", re.IGNORECASE)
# Whose user is a name, or a container; elsewhere it may be a token.
_NAMES_A_USER = re.compile("postgres(?:ql)?|s?ftp|ssh|smb|(?:web)?hdfs|abfss?|az|adl|wasbs?", re.IGNORECASE)
# Whose paths have no "@", so that one stands behind a password with a "/".
_NO_AT_IN_PATH = re.compile("postgres(?:ql)?|rediss?|https?|s?ftp|ssh|ray", re.IGNORECASE)
# Parameters of libpq and redis-py that are never secret, and what their values consist of.
_PLAIN = re.compile(
    "(?:fallback_)?application_name|channel_binding|client_(?:encoding|name)|connect_timeout|db(?:name)?|"
    "gssencmode|health_check_interval|host(?:addr)?|keepalives(?:_count|_idle|_interval)?|krbsrvname|"
    "load_balance_hosts|max_connections|port|protocol|retry_on_timeout|service|"
    "socket_(?:connect_timeout|keepalive|timeout)|ssl(?:cert|crl|mode|negotiation|rootcert|sni)|"
    "ssl_(?:ca_certs|ca_path|cert_reqs|certfile|check_hostname|keyfile|min_protocol_version|min_version)|"
    "target_session_attrs|tcp_user_timeout|user(?:name)?",
    re.IGNORECASE,
)
_PLAIN_VALUE = re.compile(r"[\w ./,*~-]*")
_SHORT = 4  # characters: a shorter secret is hidden where it is a word, not within others
HIDDEN = "***"


def check_shown(given: str) -> None:
    """Raise if the text that names a store, which is printed and written, has a password, or may have one."""
    if given.startswith(ENV):
        check_variable(given.removeprefix(ENV))
    elif not URL.match(given):
        if UNCLEAR.search(given):
            raise unclear()
    elif secrets_of(given):
        raise BackendKwargsError(
            f"Store {label_of(given)!r} must not contain a password: put the URL into a variable of the environment, "
            "and write store='env:NAME'."
        )


def check_variable(name: str) -> None:
    """Raise if this is no name of a variable, such as the URL that a shell puts into "env:$TUNED"."""
    if not NAME.fullmatch(name):
        raise BackendKwargsError(
            "After 'env:' a store has the name of a variable of the environment, such as env:TUNED. What was given is "
            "not shown: it may contain a password."
        )


def label_of(url: str) -> str:
    """Return the scheme, hosts and path of `url`; raise if it is unclear where a password ends."""
    found = _parts(url)
    if found is None:
        raise unclear()
    hosts, _ = _hosts(found["hosts"])
    return f"{url[: found.end('scheme')]}://{hosts}{_PARAMETERS.sub('', found['path'] or '')}"


def unclear() -> BackendKwargsError:
    """Return the error for a text that may contain a password, nobody knows where."""
    return BackendKwargsError(
        "A store's URL must be SCHEME://USER:PASSWORD@HOST/NAME, with @ : / ? # % of the user and the password "
        "written as %40 %3A %2F %3F %23 %25. The one given is not shown: it may contain a password."
    )


def secrets_of(url: str) -> set[str]:
    """Return what may be secret in a URL, as it is written: of one that is unclear, all but the scheme."""
    found = _parts(url)
    if found is None:
        return {url.partition("://")[2]} - {""}
    _, behind = _hosts(found["hosts"])
    secrets = {found["password"], behind, *re.split(f"{_COLON}|,", behind, flags=re.IGNORECASE)}
    if not _NAMES_A_USER.fullmatch(found["scheme"]):
        secrets.add(found["user"])
    parameters = _PARAMETERS.search(found["path"] or "")
    for text in (parameters[0] if parameters else "", found["query"] or ""):
        secrets.update(_values(text))
    return {each for each in secrets if each}


def without_secrets(error: BaseException, url: str) -> str:
    """Return the error of a client library as one line, without what may be secret in `url`."""
    text = str(error)
    if secrets := sorted(secrets_of(url), key=len, reverse=True):
        # Before it is shortened, which may cut a password, and before blanks are joined, which may be in one.
        text = re.sub("|".join(map(_written, secrets)), HIDDEN, text, flags=re.IGNORECASE)
    text = printable(" ".join(text.split()))
    if isinstance(error, BackendKwargsError):
        return text
    text = shortened(text, LONGEST_SAYING)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def failure(label: str, url: str, error: BaseException) -> BackendKwargsError:
    """Return the error of a client library as one of this package."""
    why = without_secrets(error, url)
    return BackendKwargsError(f"Store {label!r} failed: {why}{'' if why.endswith(('.', '?')) else '.'}")


def _parts(url: str) -> re.Match[str] | None:
    """Return the parts of a URL, None if it is none, or if it is unclear where a password ends."""
    found = _URL.fullmatch(url)
    if found is None or not _ESCAPED.fullmatch(f"{found['user']}:{found['password']}") or "%40" in found["hosts"]:
        return None
    # The rest of a password that contains "/" or "?" is in the path or the query, with the "@" after it.
    behind = f"{found['path'] or ''}?{found['query'] or ''}"
    at_is_plain = not _NO_AT_IN_PATH.fullmatch(found["scheme"]) and not re.search(":.*@", found["hosts"] + behind)
    return found if at_is_plain or "@" not in behind else None


def _hosts(text: str) -> tuple[str, str]:
    """Return the hosts with their ports, or else the first host, and what is behind it, such as a password."""
    host, behind = _HOST.fullmatch(text).groups()  # type: ignore[union-attr]
    return (host, behind) if behind and _PORTS.sub("", text) else (text, "")


def _values(text: str) -> Iterator[str]:
    """Yield the values among `name=value&...` that are not known to be plain, and what has no name."""
    for pair in _BETWEEN.split(text):
        name, given, value = pair.replace("%3D", "=").replace("%3d", "=").partition("=")
        plain = _PLAIN.fullmatch(unquote(name)) and _PLAIN_VALUE.fullmatch(unquote(value))
        if not plain:
            yield value if given else name


def _written(secret: str) -> str:
    """Return a pattern of a secret in every way of writing it: as it is, percent-encoded, decoded, in quotes."""
    forms = ("".join(map(_character, each)) for each in dict.fromkeys((secret, unquote(secret))))
    pattern = f"(?:{'|'.join(forms)})"
    return pattern if len(unquote(secret)) >= _SHORT else rf"(?<!\w){pattern}(?!\w)"


def _character(each: str) -> str:
    ways = [each, quote(each, safe="", errors="replace"), f"%{ord(each):02x}", repr(each)[1:-1], json.dumps(each)[1:-1]]
    blanks = {" ": r"|\s|\+", "+": r"|\s|%20"}.get(each, "")
    return f"(?:{'|'.join(map(re.escape, dict.fromkeys(ways)))}{blanks})"
