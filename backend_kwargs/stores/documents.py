"""A document: one JSON object with its kind, name and generation, sealed by its SHA-256 and perhaps a signature.

Both are of the bytes of the inner object, so that copies stay valid wherever they lie. A kind is declared where its
body is: `Kind("decision", Decision)`.

Signatures, of bundles' manifests too, are Ed25519: each has a domain, so that one kind's is never valid for another.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from backend_kwargs.errors import BackendKwargsError, error_text, pip_install, wrong_value
from backend_kwargs.files import read_bytes
from backend_kwargs.keys import digest

LONGEST = 1 << 16  # bytes of a PEM file


def signed(domain: str, content: bytes, key: object) -> bytes:
    """Return the signature of `content` for `domain`, such as "backend-kwargs decision 1"."""
    return bytes(private_key(key).sign(f"{domain}\n".encode() + content))


def signer(domain: str, content: bytes, signature: bytes, keys: Sequence[object]) -> object:
    """Return the one of the public `keys` that signed `content` for `domain`, None if none did.

    With the domain "" the content alone was signed.
    """
    said = f"{domain}\n".encode() + content if domain else content
    for key, public in [(key, public_key(key)) for key in keys]:
        from cryptography.exceptions import InvalidSignature  # it is there: there are keys

        with suppress(InvalidSignature):
            public.verify(signature, said)
            return key
    return None


def public_key(key: object) -> Any:
    """Return the Ed25519 public key that is given, or named by the path of its PEM file; raise if it is none."""
    return _key(key, "public", "A trusted key")


def private_key(key: object) -> Any:
    """Return the Ed25519 private key that is given, or named by the path of its PEM file; raise if it is none."""
    return _key(key, "private", "`signing_key`")


def several_keys(where: str, keys: object) -> list[object]:
    """Return `keys` as a list; raise if they are not several public keys, but one."""
    if keys is None:
        return []
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise wrong_value(f"{where} `trusted_keys`", "a list of public keys or of paths of their PEM files", keys)
    return [*keys]


def _key(given: object, which: Literal["private", "public"], what: str) -> object:
    """Return a key as it is, or read from the PEM file that it names; raise for `what` if it is none of Ed25519."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise BackendKwargsError(
            f"Signatures need the package cryptography: {pip_install('signing')} ({error_text(error)})."
        ) from None
    key = given
    if isinstance(given, str | Path):
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

        content = read_bytes(given, f"a {which} key", LONGEST)
        try:
            key = load_pem_private_key(content, None) if which == "private" else load_pem_public_key(content)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise BackendKwargsError(f"Cannot read a {which} key from {str(given)!r}: {error_text(error)}.") from None
    kind = ed25519.Ed25519PrivateKey if which == "private" else ed25519.Ed25519PublicKey
    if not isinstance(key, kind):
        raise wrong_value(what, f"an Ed25519 {which} key, or the path of its PEM file", given)
    return key


LARGEST = 1 << 20  # bytes
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)+")
PREFIX = re.compile(r"([a-z0-9][a-z0-9._-]*/)*([a-z0-9][a-z0-9._-]*)?")
LONGEST_NAME = 200
AHEAD_S = 86400.0  # of this machine's clock, that another's may be
NEWEST = 1 << 53  # a larger generation is no JSON number that all readers have
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Signature = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{128})?\Z")]
Generation = Annotated[int, msgspec.Meta(ge=1, le=NEWEST)]
Label = Annotated[str, msgspec.Meta(max_length=200)]

Body = TypeVar("Body")


class RefusedError(ValueError):
    """A document that is not used; the message says why."""


class EarlierError(RefusedError):
    """A document of an earlier release that this one has no use for."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[Body]):
    """What a document is about: the type of its body, the schema, and a further check that raises ValueError.

    A document is refused if its schema is before `oldest`, or if its body is `named` differently. A body that `stays`
    is kept in folders of this machine alone, and never copied to another store.
    """

    name: str
    body: type[Body]
    schema: int = 1
    oldest: int = 1
    check: Callable[[Body], object] = lambda body: None
    stays: Callable[[Body], bool] = lambda body: False
    named: Callable[[Body], str] | None = None

    def domain(self, schema: int) -> str:
        """Return what a signature of such a document is for."""
        return f"backend-kwargs {self.name} {schema}"


@dataclass(frozen=True, slots=True)
class Document(Generic[Body]):
    """A body under a name; None in place of one that was forgotten. `label` says who may be asked, if its maker chose.

    Of two with one name the larger `order` is newer. `made` is in seconds since the epoch, by the maker's clock.
    """

    name: str
    body: Body | None
    generation: int = 1
    made: float = field(default_factory=time.time)
    label: str = ""
    sha256: str = ""  # of what was read
    is_signed: bool = field(default=False, compare=False)  # by whomever
    schema: int = field(default=0, compare=False)

    @property
    def order(self) -> tuple[int, bool, float, str]:
        """What makes a document newer than another of its name; what was forgotten stays so, whatever a clock says."""
        return self.generation, self.body is None, self.made, self.sha256

    def after(self, other: "Document[Any] | None") -> "Document[Body]":
        """Return this document as one that is newer than `other`."""
        if other is None:
            return self
        return replace(self, generation=max(self.generation, min(other.generation + 1, NEWEST)))


class _Inner(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    schema: Annotated[int, msgspec.Meta(ge=1)]
    name: str
    generation: Generation
    made: float
    label: Label = ""
    forgotten: bool = False
    body: msgspec.Raw


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    sha256: Digest
    signature: Signature = ""
    document: msgspec.Raw


def check_name(name: str) -> str:
    """Return a name; raise if it is none, such as one that leads out of a folder."""
    if not is_name(name):
        raise RefusedError(f"{str(name)[:LONGEST_NAME]!r} is not the name of a document")
    return name


def is_name(name: object) -> bool:
    """Return whether a document may have this name: what a shared store lists is of anyone."""
    return isinstance(name, str) and len(name) <= LONGEST_NAME and NAME.fullmatch(name) is not None


def check_prefix(prefix: str) -> str:
    """Return what names begin with; raise if none can, such as a path that leads out of a folder."""
    if not isinstance(prefix, str) or len(prefix) > LONGEST_NAME or not PREFIX.fullmatch(prefix):
        raise RefusedError(f"{str(prefix)[:LONGEST_NAME]!r} is not the beginning of a document's name")
    return prefix


def check_content(content: bytes) -> bytes:
    """Return a document's bytes; raise if there are none, as a crash may leave of a file, or too many."""
    if not 0 < len(content) <= LARGEST:
        raise RefusedError(f"a document has 1 to {LARGEST} bytes, this one {len(content)}")
    return content


def encoded(kind: Kind[Body], document: Document[Body], signing_key: object = None) -> bytes:
    """Return the document's bytes, signed if there is a key; raise if it is too long, or would be refused."""
    inner = _Inner(
        kind=kind.name,
        schema=kind.schema,
        name=check_name(document.name),
        generation=document.generation,
        made=document.made,
        label=document.label,
        forgotten=document.body is None,
        body=msgspec.Raw(msgspec.json.encode(document.body, enc_hook=repr)),
    )
    content = msgspec.json.encode(inner)
    signature = "" if signing_key is None else signed(kind.domain(kind.schema), content, signing_key).hex()
    sealed = msgspec.json.encode(_Sealed(sha256=digest(content), signature=signature, document=msgspec.Raw(content)))
    if len(sealed) > LARGEST:
        raise RefusedError(f"it would have {len(sealed)} bytes, more than {LARGEST}")
    decoded(kind, document.name, sealed)
    return sealed


def decoded(
    kind: Kind[Body], name: str, content: bytes, trusted_keys: Sequence[object] = (), min_generation: int = 0
) -> Document[Body]:
    """Return the document that was kept as `name`; raise RefusedError for one that must not be used.

    If keys are given, one of them must have signed it.
    """
    read = heading(content, kind, trusted_keys)
    if read.name != name:
        raise RefusedError(f"it is {kind.name} {read.name!r}")
    check_schema(kind, read)
    if read.schema < kind.oldest and read.body is not None:
        raise EarlierError(f"an earlier release of backend-kwargs wrote it (schema {read.schema})")
    if read.generation < min_generation:
        raise RefusedError(f"its generation {read.generation} is before min_generation={min_generation}")
    body = None if read.body is None else _body(kind, read.body)
    if kind.named and body is not None and (own := kind.named(body)) != name:
        raise RefusedError(f"the {kind.name} in it is {own[:LONGEST_NAME]!r}")
    return replace(read, body=body)  # type: ignore[return-value, arg-type]


def heading(
    content: bytes, kind: Kind[Any] | None = None, trusted_keys: Sequence[object] = ()
) -> Document[msgspec.Raw]:
    """Return a document of any schema with its body as it is, to compare and copy; raise RefusedError if it is none.

    If a kind is given, it must be of that kind, and one of the keys must have signed it as such, if there are any.
    """
    if len(content) > LARGEST:
        raise RefusedError(f"it has more than {LARGEST} bytes")
    try:
        sealed = msgspec.json.decode(content, type=_Sealed)
        inner = msgspec.json.decode(sealed.document, type=_Inner)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"it is not a document: {error_text(error)}") from None
    raw, signature = bytes(sealed.document), bytes.fromhex(sealed.signature)
    if digest(raw) != sealed.sha256:
        raise RefusedError("its SHA-256 is another: it was changed, or written in part")
    if inner.made > time.time() + AHEAD_S:
        raise RefusedError("it was made more than a day after now, by its maker's clock or this one's")
    if kind and inner.kind != kind.name:
        raise RefusedError(f"it is {inner.kind[:40]} {inner.name[:LONGEST_NAME]!r}")
    if kind and trusted_keys and signer(kind.domain(inner.schema), raw, signature, trusted_keys) is None:
        raise RefusedError("it is signed by none of the trusted keys" if signature else "it is not signed")
    body = None if inner.forgotten else inner.body
    said = inner.generation, inner.made, inner.label
    return Document(check_name(inner.name), body, *said, sealed.sha256, bool(signature), inner.schema)


def readable(content: bytes | None) -> Document[msgspec.Raw] | None:
    """Return the heading of what is kept under a name, None if that is nothing, or no document."""
    try:
        return None if content is None else heading(content)
    except RefusedError:
        return None


def check_schema(kind: Kind[Any], read: Document[Any]) -> None:
    """Raise if a newer release wrote a document."""
    if read.schema > kind.schema:
        raise RefusedError(f"a newer release of backend-kwargs wrote it (schema {read.schema}); update this one")


def _body(kind: Kind[Body], raw: msgspec.Raw) -> Body:
    try:
        body = msgspec.json.decode(raw, type=kind.body)
        kind.check(body)
    except (ValueError, TypeError, RecursionError) as error:  # MsgspecError is a ValueError
        raise RefusedError(f"its {kind.name} is not valid: {error_text(error)}") from None
    return body
